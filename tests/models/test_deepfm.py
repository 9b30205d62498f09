import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.models import DeepFMModel, DLRMTrain, FMInteractionArch
from meshrec.optim import SGD
from meshrec.testing import assert_equal_to_unsharded


def make_model(dims=(4, 4)):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=10, embedding_dim=dim, feature_names=[f"f{i}"])
        for i, dim in enumerate(dims)
    ]
    return DeepFMModel(EmbeddingBagCollection(tables=tables), 3, [8, 4], [8, 1])


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, (6,), generator=generator)
    sparse = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 0, 2, 1, 1, 1]))
    return torch.rand(3, 3, generator=generator), sparse


def test_the_machine_sums_the_products_of_all_pairs():
    vectors = torch.rand(2, 4, 3, dtype=torch.float64)
    products = vectors @ vectors.transpose(1, 2)
    expected = torch.triu(products, diagonal=1).sum((1, 2))
    assert torch.allclose(FMInteractionArch()(vectors).squeeze(1), expected)


def test_three_terms_sum_up():
    model, (dense, sparse) = make_model(), make_batch()
    vectors = torch.cat([model.dense_arch(dense).unsqueeze(1), model.sparse_arch(sparse)], dim=1)
    flat = vectors.flatten(1)
    expected = model.linear(flat) + model.inter_arch(vectors) + model.over_arch(flat)
    assert torch.equal(model(dense, sparse), expected)
    assert expected.shape == (3, 1)


def test_compiles_without_a_graph_break():
    model, batch = make_model(), make_batch()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.allclose(compiled(*batch), model(*batch))


class Batch:
    def __init__(self, seed):
        self.dense_features, self.sparse_features = make_batch(seed)
        self.labels = torch.tensor([0.0, 1.0, 1.0])


def check_sharded():
    path = "model.sparse_arch.embedding_bag_collection"
    builders = {"t0": md.row_wise(), "t1": md.column_wise(ranks=[0, 1])}
    train = DLRMTrain(make_model())
    plan = md.construct_module_sharding_plan(train.get_submodule(path), builders, world_size=2)
    assert_equal_to_unsharded(
        lambda: DLRMTrain(make_model()),
        md.ShardingPlan({path: plan}),
        [[(Batch(2 * step),), (Batch(2 * step + 1),)] for step in range(5)],
        loss=lambda output: output[0],
        sharders=[md.EmbeddingBagCollectionSharder(SGD(lr=0.1))],
    )


def test_sharded_equals_unsharded(ranks):
    ranks(2).run(check_sharded)


def test_widths_must_fit():
    with pytest.raises(ValueError, match=r"embedding_dim.*\[4, 8\]"):
        make_model((4, 8))
    with pytest.raises(ValueError, match=r"deep_layer_sizes.*1.*\[8, 2\]"):
        DeepFMModel(make_model().sparse_arch.embedding_bag_collection, 3, [8, 4], [8, 2])
