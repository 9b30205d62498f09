import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec.compat.bridge.deepfm import FMInteractionArch, SimpleDeepFMNN


def collection():
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=5, embedding_dim=4, feature_names=[f"f{i}"])
            for i in range(2)
        ]
    )


def test_the_parts_make_the_whole():
    torch.manual_seed(0)
    model = SimpleDeepFMNN(3, collection(), hidden_layer_size=6, deep_fm_dimension=2)
    dense = torch.randn(2, 3)
    sparse = KeyedJaggedTensor(["f0", "f1"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    inner, embeddings = model.dense_arch(dense), model.sparse_arch(sparse)
    vectors = torch.cat([inner, embeddings["f0"], embeddings["f1"]], 1)
    deep = torch.relu(model.inter_arch.deep_fm.dense_module[0](vectors))
    products = (vectors.sum(1, keepdim=True) ** 2 - vectors.pow(2).sum(1, keepdim=True)) / 2
    logits = model.over_arch.model[0](torch.cat([inner, deep, products], 1))
    torch.testing.assert_close(model(dense, sparse), torch.sigmoid(logits))


def test_without_sparse_features_the_dense_vector_stays():
    dense = torch.randn(2, 4)
    assert FMInteractionArch(4, [], 2)(dense, None) is dense
