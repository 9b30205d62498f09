import pytest

from meshrec import distributed as md
from meshrec.plan.builders import WorldShape

SIZE = md.TableSize(10, 8)


def _sharding(*rectangles, ranks=None):
    shards = tuple(
        md.ShardMetadata(
            shard_offsets=(r0, c0), shard_sizes=(rows, columns), placement=md.RemoteDevice(rank=rank)
        )
        for r0, c0, rows, columns, rank in rectangles
    )
    return md.ParameterSharding(
        sharding_type=md.ShardingType.GRID_SHARD,
        ranks=ranks,
        sharding_spec=md.EnumerableShardingSpec(shards=shards),
    )


def _verify(sharding):
    plan = md.EmbeddingModuleShardingPlan({"t0": sharding})
    md.verify_module_plan(plan, {"t0": SIZE}, world_size=2)


def test_exact_cover_that_is_no_grid_is_fine():
    _verify(_sharding((0, 0, 4, 8, 0), (4, 0, 6, 3, 1), (4, 3, 6, 5, 0)))


@pytest.mark.parametrize(
    ("sharding", "match"),
    [
        (
            _sharding((0, 0, 10, 8, 2)),
            r"'t0'.*\[0:10, 0:8\].*2.*rank 2.*\[0.*2",
        ),
        (_sharding((0, 0, 11, 8, 0)), "'t0'.*10 x 8"),
        (_sharding((0, 0, 0, 8, 0)), "'t0'.*below 0"),
        (
            _sharding((0, 0, 6, 8, 0), (5, 0, 5, 8, 1)),
            r"\[0:6, 0:8\].*0.*\[5:10, 0:8\].*1 overlap",
        ),
        (_sharding((0, 0, 5, 8, 0), (5, 0, 5, 7, 1)), "'t0'.*cover 75.*80 elements"),
        (_sharding((0, 0, 10, 8, 0), ranks=(1,)), "ranks.*1.*0"),
        (_sharding(), "'t0'.*grid_shard"),
        (
            md.ParameterSharding(
                sharding_type=md.ShardingType.DATA_PARALLEL,
                sharding_spec=_sharding((0, 0, 10, 8, 0)).sharding_spec,
            ),
            "'t0'",
        ),
    ],
)
def test_bad_plans_name_table_and_rectangle(sharding, match):
    with pytest.raises(ValueError, match=match):
        _verify(sharding)


def test_tables_and_modules_must_match():
    sharding = md.table_wise(rank=0)("t0", SIZE, WorldShape(1, 1))
    plan = md.ShardingPlan({"ebc": md.EmbeddingModuleShardingPlan({"t0": sharding})})
    md.verify_plan(plan, {"ebc": {"t0": SIZE}}, world_size=1)
    with pytest.raises(ValueError, match="'t1'"):
        md.verify_plan(plan, {"ebc": {"t0": SIZE, "t1": SIZE}}, world_size=1)
    with pytest.raises(ValueError, match="'t0'"):
        md.verify_plan(plan, {"ebc": {}}, world_size=1)
    with pytest.raises(ValueError, match="'other'"):
        md.verify_plan(plan, {"ebc": {"t0": SIZE}, "other": {}}, world_size=1)
    with pytest.raises(ValueError, match="'ebc'"):
        md.verify_plan(plan, {}, world_size=1)
