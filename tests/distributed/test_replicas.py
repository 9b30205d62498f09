import functools

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from meshrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import Adam
from meshrec.testing import assert_equal_to_unsharded

# Few rows, or many, and the way that their gradients go.
SIZES = {"small": (5, 4), "large": (1000, 4), "tiny": (2, 6), "huge": (3000, 8)}


def collection(names, sequence=False):
    torch.manual_seed(0)
    kind, config = (
        (EmbeddingCollection, EmbeddingConfig) if sequence else (EmbeddingBagCollection, EmbeddingBagConfig)
    )
    return kind(
        tables=[
            config(
                name=name,
                num_embeddings=SIZES[name][0],
                embedding_dim=SIZES[name][1],
                feature_names=[f"f_{name}"],
            )
            for name in names
        ]
    )


def batch(names, size, seed):
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(0, SIZES[name][0] - 1, (size,), generator=generator) for name in names]
    return KeyedJaggedTensor(
        [f"f_{name}" for name in names],
        torch.cat(ids),
        lengths=torch.ones(size * len(names), dtype=torch.long),
    )


def exchange(names, size, optimizer):
    env, module = default_env(), collection(names)
    plan = md.construct_module_sharding_plan(
        module, {name: md.data_parallel() for name in names}, world_size=env.shard.size
    )
    sharded = md.EmbeddingBagCollectionSharder(Adam(lr=0.1) if optimizer else None).shard(module, plan, env)
    for step in range(3):
        with md.measure_traffic() as traffic:
            sharded(batch(names, size, 10 * step + env.world.rank)).values().square().sum().backward()
    tables = [table.weight if optimizer else table.weight.grad for table in sharded.embedding_bags.values()]
    return [table.tolist() for table in tables], sorted(traffic)


@pytest.mark.parametrize("optimizer", [True, False])
@pytest.mark.parametrize(
    ("names", "ways"),
    [
        (["small", "tiny"], {"gradients of replicas"}),
        (["large", "huge"], {"ids and gradients of replicas"}),
        (["large", "small", "huge", "tiny"], {"gradients of replicas", "ids and gradients of replicas"}),
    ],
    ids=["small", "large", "mixed"],
)
def test_each_table_goes_the_shorter_way(ranks, names, ways, optimizer):
    (first, traffic), (second, _) = ranks(2).run(exchange, names, 50, optimizer)
    assert first == second
    assert {name for name in traffic if "replicas" in name} == ways


def untouched():
    before = [table.weight[-1].tolist() for table in collection(["small", "large"]).embedding_bags.values()]
    return before == [table[-1] for table in exchange(["small", "large"], 100, True)[0]]


def test_rows_nobody_looked_up_stay(ranks):
    assert ranks(2).run(untouched) == [True, True]


@functools.cache
def environment(mesh):
    if mesh == "flat":
        return default_env()
    return md.ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))


class Model(torch.nn.Module):
    def __init__(self, sequence):
        super().__init__()
        self.collection, self.sequence = collection(SIZES, sequence), sequence

    def forward(self, features):
        output = self.collection(features)
        return [jagged.values() for jagged in output.values()] if self.sequence else [output.values()]


BUILDERS = {
    "flat": {name: md.data_parallel() for name in SIZES},
    "replicated": {
        "small": md.row_wise(),
        "large": md.column_wise(),
        "tiny": md.data_parallel(),
        "huge": md.grid_shard(),
    },
}


def equal(mesh, sequence):
    env = environment(mesh)
    plan = md.construct_module_sharding_plan(
        collection(SIZES, sequence), BUILDERS[mesh], world_size=env.shard.size
    )
    sharder = (md.EmbeddingCollectionSharder if sequence else md.EmbeddingBagCollectionSharder)(Adam(lr=0.1))
    batches = [
        [(batch(SIZES, 20 + 7 * rank, 10 * step + rank),) for rank in range(env.world.size)]
        for step in range(4)
    ]
    with md.measure_traffic() as traffic:
        assert_equal_to_unsharded(
            functools.partial(Model, sequence),
            md.ShardingPlan({"collection": plan}),
            batches,
            loss=lambda outputs: sum(output.square().sum() for output in outputs),
            sharders=[sharder],
            env=env,
            rtol=1e-4,
            atol=1e-5,
        )
    return {"gradients of replicas", "ids and gradients of replicas"} <= set(traffic)


@pytest.mark.parametrize("sequence", [False, True], ids=["pooled", "sequence"])
@pytest.mark.parametrize("mesh", ["flat", "replicated"])
def test_a_mix_of_ways_equals_the_unsharded_model(ranks, mesh, sequence):
    assert all(ranks(4 if mesh == "replicated" else 2).run(equal, mesh, sequence))
