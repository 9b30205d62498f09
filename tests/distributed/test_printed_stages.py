"""What a sharded module shows of its stages."""

from meshrec.distributed.embedding_modules import printed_stages
from meshrec.plan.sharding_plan import (
    EmbeddingModuleShardingPlan,
    EnumerableShardingSpec,
    ParameterSharding,
    RemoteDevice,
    ShardingType,
    ShardMetadata,
)


def split(*ranks: int) -> ParameterSharding:
    shards = tuple(
        ShardMetadata(shard_offsets=(5 * i, 0), shard_sizes=(5, 4), placement=RemoteDevice(rank=rank))
        for i, rank in enumerate(ranks)
    )
    return ParameterSharding(
        sharding_type=ShardingType.ROW_WISE, ranks=ranks, sharding_spec=EnumerableShardingSpec(shards=shards)
    )


def test_a_stage_per_sharding_type_names_tables_and_shards():
    whole = ParameterSharding(sharding_type=ShardingType.DATA_PARALLEL)
    plan = EmbeddingModuleShardingPlan({"t": split(0, 1), "u": split(1), "v": whole})
    rows, copies = printed_stages("lookup", plan)
    assert repr(rows) == "lookup, row_wise\n    t: [0:5, 0:4]@0, [5:10, 0:4]@1\n    u: [0:5, 0:4]@1"
    assert repr(copies) == "lookup, data_parallel\n    v: on every rank"
    assert (
        repr(printed_stages("lookup", plan, 0)[0]) == "lookup, row_wise\n    t: [0:5, 0:4]@0\n    u: nothing"
    )
