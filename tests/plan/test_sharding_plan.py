import pytest

from meshrec.distributed import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    ShardingType,
    TableSize,
    data_parallel,
    grid_shard,
    table_wise,
)
from meshrec.plan.builders import WorldShape


def _plan(rank: int = 1) -> ShardingPlan:
    size, ranks = TableSize(10, 7), WorldShape(4, 2)
    tables = {"t0": table_wise(rank=rank), "t1": grid_shard(), "t2": data_parallel()}
    return ShardingPlan(
        {
            "sparse.ebc": EmbeddingModuleShardingPlan(
                {name: builder(name, size, ranks) for name, builder in tables.items()}
            )
        }
    )


def test_json_round_trip(tmp_path):
    plan = _plan()
    assert ShardingPlan.from_json(plan.to_json()) == plan
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan
    assert isinstance(loaded.get_plan_for_module("sparse.ebc")["t1"], ParameterSharding)
    assert loaded.get_plan_for_module("other") is None


def test_json_of_another_version_is_refused():
    with pytest.raises(ValueError, match=r"version 1.*version 7"):
        ShardingPlan.from_json('{"version": 7, "plan": {}}')


def test_digest_sees_placement_but_not_order_or_device():
    assert _plan().digest() == _plan().digest()
    assert _plan(rank=1).digest() != _plan(rank=2).digest()
    tables = _plan().plan["sparse.ebc"]
    reordered = EmbeddingModuleShardingPlan(reversed(tables.items()))
    assert ShardingPlan({"sparse.ebc": reordered}).digest() == _plan().digest()
    on_cuda = table_wise(rank=1)("t0", TableSize(10, 7), WorldShape(4, 2, "cuda"))
    assert on_cuda.digest() == tables["t0"].digest()


def test_print_is_a_table_with_every_rectangle():
    lines = str(_plan()).splitlines()
    assert lines[0] == "module: sparse.ebc"
    assert lines[1].split()[:4] == ["table", "sharding", "type", "kernel"]
    assert lines[2].split() == ["t0", "table_wise", "fused", "1", "[0:10,", "0:7]@1"]
    assert "[5:10, 4:7]@3" in lines[3]
    assert lines[4].endswith("whole on every rank")


def test_sharding_type_has_torchrecs_values():
    assert {t.value for t in ShardingType} == {
        "data_parallel",
        "table_wise",
        "column_wise",
        "row_wise",
        "table_row_wise",
        "table_column_wise",
        "grid_shard",
    }
