import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.models import DLRMTrain, WideDeep
from meshrec.modules.boosted_trees import BoostedTrees, Branch, Leaf
from meshrec.optim import SGD
from meshrec.testing import assert_equal_to_unsharded

EDGES = [(0.0, 0.5, 1.0), (), (0.0, 1.0)]


def make_model(members=1, outputs=1, dim=4, **more):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t{i}", num_embeddings=10, embedding_dim=dim, feature_names=[f"f{i}"])
        for i in range(2)
    ]
    ebc = EmbeddingBagCollection(tables=tables)
    return WideDeep(ebc, EDGES, [8], num_members=members, num_outputs=outputs, **more)


def make_batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 10, (6,), generator=generator)
    sparse = KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.tensor([1, 0, 2, 1, 1, 1]))
    return torch.rand(3, 3, generator=generator), sparse


def test_three_terms_sum_up():
    model, (dense, sparse) = make_model(), make_batch()
    vectors = torch.cat([model.sparse_arch(sparse), model.numbers(dense)], 1)
    deep = vectors[:, :, 1:]
    products = deep @ deep.transpose(1, 2)
    both = 0.5 * (deep.sum(1).square() - deep.square().sum(1))
    assert torch.allclose(both.sum(1), torch.triu(products, diagonal=1).sum((1, 2)), atol=1e-6)
    expected = vectors[:, :, 0].sum(1) + model.mlp(torch.cat([deep.flatten(1), both], 1)).flatten()
    assert torch.allclose(model(dense, sparse).squeeze(1), expected, atol=1e-6)


def test_members_train_apart_and_score_together():
    model, batch = make_model(members=4, outputs=3, dim=8), make_batch()
    trained = model(*batch)
    assert trained.shape == (3, 3, 4)
    assert torch.allclose(model.eval()(*batch), trained.mean(2), atol=1e-6)


def test_dropped_ids_are_whole_embeddings():
    model, (dense, sparse) = make_model(id_dropout=0.5), make_batch()
    assert not torch.equal(model(dense, sparse), model(dense, sparse))
    model.eval()
    assert torch.equal(model(dense, sparse), model(dense, sparse))


def test_tables_must_be_wider_than_the_linear_weights():
    with pytest.raises(ValueError, match="first 4"):
        make_model(outputs=4)


def grown(num_inputs=5):
    """Trees that split the numbers and the scores of both features."""
    trees = BoostedTrees(num_inputs, 1)
    trees.set_trees([Branch(at, 0.2, Leaf(-1.0), Leaf(float(at))) for at in range(num_inputs)])
    return trees


def test_trees_split_numbers_and_scores_which_no_gradient_moves():
    torch.manual_seed(0)
    model, (dense, sparse) = make_model(trees=grown(), shrink=[1.0, 1.0]), make_batch()
    out = model.eval()(dense, sparse)
    rows = model.sparse_arch(sparse)
    inputs = torch.cat([dense, rows[:, :, 1]], 1)
    added = torch.where(inputs > 0.2, torch.arange(5.0), torch.tensor(-1.0)).sum(1)
    model.trees.set_trees([])
    assert torch.allclose(out.squeeze(1), model(dense, sparse).squeeze(1) + added, atol=1e-6)
    model.train()(dense, sparse).sum().backward()
    for bag in model.sparse_arch.embedding_bag_collection.embedding_bags.values():
        assert not bag.weight.grad[:, 1].any()
        assert bag.weight.grad[:, 0].any()


def test_trees_have_one_output():
    with pytest.raises(ValueError, match=r"num_outputs.*3"):
        make_model(outputs=3, dim=8, trees=grown())


@pytest.mark.parametrize("trees", [None, grown()])
def test_compiles_without_a_graph_break(trees):
    model, batch = make_model(trees=trees), make_batch()
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


def test_rows_are_pulled_to_zero_by_what_the_penalty_says():
    strengths, (dense, sparse) = [0.5, 2.0], make_batch()
    plain, pulled = make_model(wide_scale=3.0), make_model(wide_scale=3.0, shrink=strengths)
    for model in (plain, pulled):
        model(dense, sparse).mean().backward()
    rows = plain.sparse_arch(sparse)  # [B, F, D]
    scales = torch.tensor([9.0, 1.0, 1.0, 1.0])
    penalty = (rows.square() * torch.tensor(strengths)[:, None] * scales / 2).sum((1, 2)).mean()
    weights = [each.weight for each in plain.sparse_arch.embedding_bag_collection.embedding_bags.values()]
    wanted = torch.autograd.grad(penalty, weights)
    bags = pulled.sparse_arch.embedding_bag_collection.embedding_bags.values()
    for weight, more, found in zip(weights, wanted, bags, strict=True):
        assert torch.allclose(found.weight.grad, weight.grad + more, atol=1e-6)
    assert torch.equal(plain.eval()(dense, sparse), pulled.eval()(dense, sparse))


def test_bf16_gives_nearly_the_logits_of_fp32():
    torch.manual_seed(0)
    model = make_model(members=2).eval()
    exact = model(*make_batch())
    with torch.autocast("cpu", torch.bfloat16):
        rounded = model(*make_batch())
    assert rounded.dtype == torch.float32
    assert not torch.equal(rounded, exact)
    torch.testing.assert_close(rounded, exact, rtol=0.02, atol=0.02)
