import pytest
import torch

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.distributed.gradient_exchange import Sizes, reduce_bytes
from meshrec.distributed.mesh import default_env
from meshrec.optim import Adam


def test_bytes_of_both_ways():
    sizes = Sizes(torch.zeros(2, 1, 4), [10, 30], [5, 7])
    assert sizes.gather_bytes() == 4 * 37
    assert reduce_bytes([(10, 3), (2, 7)], 2) == 4 * (40 + 16)
    assert reduce_bytes([(10, 3)], 4) == 2 * 3 * 4 * 40 // 4


def exchange(num_rows, batch, optimizer):
    torch.manual_seed(0)
    collection = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t0", num_embeddings=num_rows, embedding_dim=4, feature_names=["a"])]
    )
    env = default_env()
    plan = md.construct_module_sharding_plan(
        collection, {"t0": md.data_parallel()}, world_size=env.shard.size
    )
    module = md.EmbeddingBagCollectionSharder(Adam(lr=0.1) if optimizer else None).shard(
        collection, plan, env
    )
    generator = torch.Generator().manual_seed(env.world.rank)
    for _ in range(3):
        ids = torch.randint(0, num_rows - 1, (batch,), generator=generator)
        features = KeyedJaggedTensor(["a"], ids, lengths=torch.ones(batch, dtype=torch.long))
        with md.measure_traffic() as traffic:
            module(features).values().square().sum().backward()
    weight = module.embedding_bags["t0"].weight
    return (weight if optimizer else weight.grad).tolist(), sorted(traffic)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(("num_rows", "batch", "way"), [(5, 100, "dense"), (1000, 3, "sparse")])
def test_replicas_stay_equal_whichever_way_is_shorter(ranks, num_rows, batch, way, optimizer):
    (first, traffic), (second, _) = ranks(2).run(exchange, num_rows, batch, optimizer)
    assert first == second
    assert ("gradients of replicas" in traffic) == (way == "dense")
    assert ("ids and gradients of replicas" in traffic) == (way == "sparse")


def untouched(num_rows):
    torch.manual_seed(0)
    before = torch.empty(num_rows, 4).uniform_(-(num_rows**-0.5), num_rows**-0.5)
    return before[-1].tolist(), exchange(num_rows, 100, True)[0][-1]


def test_rows_nobody_looked_up_stay(ranks):
    for before, after in ranks(2).run(untouched, 5):
        assert before == after
