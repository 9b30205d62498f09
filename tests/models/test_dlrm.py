from types import SimpleNamespace

import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec.models import DLRM, DLRM_DCN, DLRMTrain
from meshrec.optim import SGD


def collection(dims=(4, 4)):
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=10, embedding_dim=dim, feature_names=[f"f{i}"])
            for i, dim in enumerate(dims)
        ]
    )


def batch():
    features = KeyedJaggedTensor(["f1", "f0"], torch.tensor([1, 2, 3, 4]), lengths=torch.tensor([1, 1, 2, 0]))
    return SimpleNamespace(
        dense_features=torch.rand(2, 3), sparse_features=features, labels=torch.tensor([0, 1])
    )


@pytest.mark.parametrize("kind", ["dlrm", "dcn"])
def test_models_learn_a_batch(kind):
    torch.manual_seed(0)
    ebc = collection()
    model = DLRM(ebc, 3, [8, 4], [8, 1]) if kind == "dlrm" else DLRM_DCN(ebc, 3, [8, 4], [8, 1], 2, 3)
    train = DLRMTrain(fuse(model, optimizer=SGD(lr=0.5)))
    optimizer = torch.optim.SGD(
        [p for name, p in train.named_parameters() if "embedding_bags" not in name], lr=0.5
    )
    data, losses = batch(), []
    for _ in range(60):
        optimizer.zero_grad()
        loss, outputs = train(data)
        loss.backward()
        optimizer.step()
        losses.append(outputs.loss.item())
    assert outputs.logits.shape == (2,)
    assert losses[-1] < losses[0] / 2


def test_dlrm_is_what_the_paper_says():
    torch.manual_seed(0)
    model, data = DLRM(collection(), 3, [8, 4], [8, 1]), batch()
    sparse = model.sparse_arch(data.sparse_features)
    assert sparse.shape == (2, 2, 4)
    dense = model.dense_arch(data.dense_features)
    expected = model.over_arch(model.inter_arch(dense, sparse))
    assert torch.equal(model(data.dense_features, data.sparse_features), expected)


def test_widths_must_fit():
    with pytest.raises(ValueError, match=r"DLRM.*embedding_dim.*\[4, 8\]"):
        DLRM(collection((4, 8)), 3, [8, 4], [8, 1])
    with pytest.raises(ValueError, match=r"embedding_dim.*4"):
        DLRM(collection(), 3, [8, 5], [8, 1])
    with pytest.raises(ValueError, match=r"over_arch_layer_sizes.*needs 2"):
        DLRM(collection(), 3, [8, 4], [1])
