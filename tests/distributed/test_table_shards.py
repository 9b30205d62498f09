import functools

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from meshrec import distributed as md
from meshrec.comms.mesh import default_env
from meshrec.optim import RowWiseAdagrad
from meshrec.testing import RankError

SIZES = {"t0": (10, 8), "t1": (7, 5), "t2": (3, 4)}
PLANS = {
    "rows": {"t0": md.row_wise(), "t1": md.table_wise(rank=0), "t2": md.data_parallel()},
    "columns": {"t0": md.column_wise(ranks=[0, 1, 0]), "t1": md.row_wise(), "t2": md.table_wise(rank=1)},
    "grid": {"t0": md.grid_shard(), "t1": md.grid_shard(), "t2": md.grid_shard()},
}


def collection(seed=0):
    torch.manual_seed(seed)
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
            for name, (rows, dim) in SIZES.items()
        ]
    )


@functools.cache
def env():
    return default_env()


def sharded(plan, seed=0):
    world_size = env().shard.size
    module_plan = md.construct_module_sharding_plan(
        collection(), PLANS[plan], world_size=world_size, local_size=max(1, world_size // 2)
    )
    return md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1)).shard(
        collection(seed), module_plan, env()
    )


def train(module):
    lengths = torch.ones(6, dtype=torch.long)
    features = KeyedJaggedTensor(
        [f"f_{name}" for name in SIZES], torch.tensor([0, 1, 2, 2, 1, 0]), lengths=lengths
    )
    module(features).values().square().sum().backward()


def held(module):
    """(table, rectangle, weight, row state) of everything on this rank."""
    return [
        (name, tuple(table.rectangle), table.rows.tolist(), table.state[0].tolist())
        for name, shards in module.embedding_bags.items()
        for table in shards.tables
    ]


def whole(ranks):
    tables = {
        name: (torch.full(size, torch.nan), torch.full(size[:1], torch.nan)) for name, size in SIZES.items()
    }
    for name, (_, r0, r1, c0, c1), weight, state in (item for rank in ranks for item in rank):
        tables[name][0][r0:r1, c0:c1] = torch.tensor(weight)
        tables[name][1][r0:r1] = torch.tensor(state)
    return tables


def save(plan, folder):
    module = sharded(plan)
    train(module)
    train(module)
    state = {"model": module.state_dict(), "optimizer": module.fused_optimizer.state_dict()}
    dcp.save(state, checkpoint_id=folder)
    return held(module)


def load(plan, folder):
    module = sharded(plan, seed=1)
    state = {"model": module.state_dict(), "optimizer": module.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    module.load_state_dict(state["model"])
    module.fused_optimizer.load_state_dict(state["optimizer"])
    steps = {slots["step"] for slots in module.fused_optimizer.state.values()}
    return held(module), sorted(steps), sorted(module.state_dict())


@pytest.mark.parametrize(("saved", "loaded"), [("rows", "columns"), ("columns", "grid"), ("grid", "rows")])
@pytest.mark.parametrize("world_sizes", [(2, 4), (4, 2)], ids=["2 to 4", "4 to 2"])
def test_checkpoints_load_under_any_plan_and_world_size(ranks, tmp_path, saved, loaded, world_sizes):
    expected = whole(ranks(world_sizes[0]).run(save, saved, str(tmp_path)))
    found = ranks(world_sizes[1]).run(load, loaded, str(tmp_path))
    for _, steps, names in found:
        assert steps == [2]
        assert names == [f"embedding_bags.{name}.weight" for name in SIZES]
    values = whole([rank[0] for rank in found])
    for name in SIZES:
        assert torch.equal(values[name][0], expected[name][0])
        assert torch.equal(values[name][1], expected[name][1])
        assert expected[name][1].max() > 0


def plain_values(plan):
    source = collection(seed=5)
    module = sharded(plan)
    module.load_state_dict(source.state_dict())
    for name, table in module.embedding_bags.items():
        whole = source.embedding_bags[name].weight
        for r, shard in zip(table.rectangles, table.shards(), strict=True):
            assert torch.equal(shard, whole[r.r0 : r.r1, r.c0 : r.c1])
    return [(name, parameter.numel()) for name, parameter in module.named_parameters()]


def test_whole_tensors_load_and_names_survive(ranks):
    found = ranks(2).run(plain_values, "columns")
    sizes = [(50, 20, 0), (30, 15, 12)]  # t0 in two pieces on rank 0, where t2 has none
    for parameters, counts in zip(found, sizes, strict=True):
        assert parameters == [(f"embedding_bags.t{i}.weight", count) for i, count in enumerate(counts)]


def wrong_size():
    module = sharded("rows")
    state = collection().state_dict()
    state["embedding_bags.t0.weight"] = torch.zeros(11, 8)
    module.load_state_dict(state)


def other_plan():
    sharded("rows").load_state_dict(sharded("grid").state_dict())


def missing():
    state = sharded("rows").state_dict()
    del state["embedding_bags.t1.weight"]
    sharded("rows").load_state_dict(state)


@pytest.mark.parametrize(
    ("function", "match"),
    [
        (wrong_size, r"state.*\[11, 8\].*\[10, 8\]"),
        (other_plan, "rectangles"),
        (missing, "Missing"),
    ],
)
def test_what_does_not_fit_is_an_error_on_all_ranks(ranks, function, match):
    with pytest.raises(RankError, match=match) as failure:
        ranks(2).run(function)
    assert "rank 0" in str(failure.value)
    assert "rank 1" in str(failure.value)
