import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.compat.bridge.dlrm import DLRM_DCN
from meshrec.models import dlrm


def test_it_is_meshrecs_model():
    torch.manual_seed(0)
    ebc = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=5, embedding_dim=4, feature_names=["f"])]
    )
    model = DLRM_DCN(ebc, 3, [6, 4], [5, 1], dcn_num_layers=2, dcn_low_rank_dim=3)
    assert isinstance(model, dlrm.DLRM_DCN)
    other = dlrm.DLRM_DCN(ebc, 3, [6, 4], [5, 1], 2, 3)
    other.load_state_dict(model.state_dict())
    dense = torch.randn(2, 3)
    sparse = KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))
    assert torch.equal(model(dense, sparse), other(dense, sparse))
