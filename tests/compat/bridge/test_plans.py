import pytest
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from meshrec.compat.bridge.plans import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    from_core,
    module_to_core,
    to_core,
)
from meshrec.plan import builders as plan_builders
from meshrec.plan.builders import WorldShape
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan as OwnModulePlan
from meshrec.plan.sharding_plan import ShardingPlan as OwnPlan
from meshrec.plan.sharding_plan import ShardingType, TableSize


def own_plan(device="cpu"):
    size, ranks = TableSize(8, 4), WorldShape(4, 2, device)
    makers = {
        "rows": plan_builders.row_wise(),
        "columns": plan_builders.column_wise(ranks=[1, 0]),
        "copies": plan_builders.data_parallel(),
    }
    return OwnPlan({"ebc": OwnModulePlan({name: make(name, size, ranks) for name, make in makers.items()})})


def test_there_and_back_again():
    plan = own_plan()
    theirs = from_core(plan, world_size=4, local_size=2)
    placed = theirs.plan["ebc"]["columns"]
    assert (placed.sharding_type, placed.compute_kernel, placed.ranks) == ("column_wise", "fused", [1, 0])
    assert [(s.shard_offsets, s.shard_sizes) for s in placed.sharding_spec.shards] == [
        ([0, 0], [8, 2]),
        ([0, 2], [8, 2]),
    ]
    assert theirs.plan["ebc"]["copies"] == ParameterSharding("data_parallel", "fused", [0, 1, 2, 3])
    assert to_core(theirs).digest() == plan.digest()
    assert to_core(plan) is plan
    assert module_to_core(plan.plan["ebc"]) == plan.plan["ebc"]


def test_devices_are_numbered_on_their_node():
    theirs = from_core(own_plan("cuda"), world_size=4, local_size=2)
    shards = theirs.plan["ebc"]["rows"].sharding_spec.shards
    assert [str(shard.placement) for shard in shards] == [f"rank:{r}/cuda:{r % 2}" for r in range(4)]


def test_plans_print_as_tables():
    theirs = from_core(own_plan(), world_size=4, local_size=2)
    lines = str(theirs).splitlines()
    assert lines[0] == "module: ebc"
    assert lines[2] == " param  | sharding type | compute kernel |    ranks    "
    assert "columns | column_wise   | fused          | [1, 0]      " in lines
    assert "columns | [0, 2]        | [8, 2]      | rank:0/cpu" in lines
    assert theirs.get_plan_for_module("ebc") is theirs.plan["ebc"]
    assert theirs.get_plan_for_module("other") is None


def test_a_plan_without_shards_prints():
    plan = EmbeddingModuleShardingPlan({"t": ParameterSharding("data_parallel", "dense", [0])})
    assert "t     | data_parallel | dense          | [0]  " in str(ShardingPlan({"": plan}))


def spec():
    shard = ShardMetadata(shard_offsets=[0, 0], shard_sizes=[8, 4], placement="rank:0/cpu")
    return EnumerableShardingSpec([shard])


def test_enums_serve_as_their_values():
    placed = ParameterSharding(ShardingType.TABLE_WISE, "fused", [0], spec())
    assert module_to_core({"t": placed})["t"].sharding_type is ShardingType.TABLE_WISE


@pytest.mark.parametrize(
    ("placed", "message"),
    [
        (ParameterSharding("diagonal", "fused"), "'t'.*MeshRec.*ShardingType.*'diagonal'"),
        (ParameterSharding("table_wise", "fused_uvm"), "MeshRec.*EmbeddingComputeKernel.*'fused_uvm'"),
        (ParameterSharding("table_wise", "fused", [0]), "'t'.*table_wise.*sharding_spec"),
        (
            ParameterSharding("table_wise", "fused", [0], spec(), enforce_hbm=True),
            "'t'.*MeshRec.*enforce_hbm",
        ),
    ],
)
def test_what_plans_cannot_say(placed, message):
    with pytest.raises(ValueError, match=message):
        module_to_core({"t": placed})
