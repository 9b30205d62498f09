import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import SGD

PLANS = {
    "rows": {"t0": md.row_wise(), "t1": md.row_wise()},
    "columns": {"t0": md.column_wise(), "t1": md.column_wise()},
    "mixed": {"t0": md.row_wise(), "t1": md.data_parallel()},
}


def collection():
    torch.manual_seed(0)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=4, feature_names=features)
            for name, features in (("t0", ["a", "b"]), ("t1", ["b"]))
        ],
        is_weighted=True,
    )


def features(rank, *, requires_grad=True):
    """``b`` is read twice, ``c`` by nobody."""
    generator = torch.Generator().manual_seed(rank)
    lengths = torch.tensor([2, 0, 3, 1, 2, 2])
    ids = torch.randint(0, 10, (10,), generator=generator)
    weights = torch.rand(10, generator=generator).requires_grad_(requires_grad)
    return KeyedJaggedTensor(["a", "b", "c"], ids, weights, lengths=lengths)


def loss(values):
    return (values * torch.arange(values.shape[1])).square().sum()


def grads(plan, only_rank=None):
    env = default_env()
    rank = env.world.rank
    module = collection()
    builders = PLANS[plan]
    plan = md.construct_module_sharding_plan(module, builders, world_size=env.shard.size)
    sharded = md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, plan, env)
    batch, same = (features(rank, requires_grad=only_rank in (None, rank)) for _ in range(2))
    loss(sharded(batch).values()).backward()
    loss(module(same).values()).backward()
    found, expected = batch.weights().grad, same.weights().grad
    if expected is None:
        return found is None
    torch.testing.assert_close(found, expected)
    return bool(found[:6].abs().min() > 0 and (found[6:] == 0).all())


@pytest.mark.parametrize("plan", PLANS)
def test_they_are_those_of_this_ranks_own_loss(ranks, plan):
    assert ranks(2).run(grads, plan) == [True, True]


def test_one_rank_alone_may_want_them(ranks):
    assert ranks(2).run(grads, "mixed", 1) == [True, True]


def test_one_process():
    assert grads("mixed")


def traffic(requires_grad):
    env = default_env()
    module = collection()
    plan = md.construct_module_sharding_plan(module, PLANS["rows"], world_size=env.shard.size)
    sharded = md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, plan, env)
    with md.measure_traffic() as counted:
        loss(sharded(features(env.world.rank, requires_grad=requires_grad)).values()).backward()
    return "gradients of weights" in counted


@pytest.mark.parametrize("requires_grad", [False, True])
def test_nothing_travels_where_nobody_wants_them(ranks, requires_grad):
    assert ranks(2).run(traffic, requires_grad) == [requires_grad] * 2


def frozen_tables():
    env = default_env()
    module = collection()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    plan = md.construct_module_sharding_plan(module, PLANS["columns"], world_size=env.shard.size)
    sharded = md.EmbeddingBagCollectionSharder(SGD(lr=0.1)).shard(module, plan, env)
    before = [parameter.clone() for parameter in sharded.parameters()]
    batch = features(env.world.rank)
    loss(sharded(batch).values()).backward()
    return bool(batch.weights().grad.abs().sum() > 0) and all(map(torch.equal, before, sharded.parameters()))


def test_of_frozen_tables(ranks):
    assert ranks(2).run(frozen_tables) == [True, True]
