from types import SimpleNamespace

import pytest

from meshrec import distributed as md
from meshrec.plan.builders import WorldShape, even_splits, tables_of

SIZE = md.TableSize(10, 7)
RANKS = WorldShape(4, 2)


def _rectangles(builder):
    return [str(shard) for shard in builder("t", SIZE, RANKS).shards]


def _module(num_tables=2):
    configs = [
        SimpleNamespace(name=f"t{i}", num_embeddings=10 + i, embedding_dim=4) for i in range(num_tables)
    ]
    return SimpleNamespace(embedding_bag_configs=lambda: configs)


def test_each_type_gives_its_rectangles():
    assert _rectangles(md.table_wise(rank=3)) == ["[0:10, 0:7]@3"]
    assert _rectangles(md.row_wise()) == [
        "[0:3, 0:7]@0",
        "[3:6, 0:7]@1",
        "[6:8, 0:7]@2",
        "[8:10, 0:7]@3",
    ]
    assert _rectangles(md.column_wise(ranks=[1, 1, 0])) == ["[0:10, 0:3]@1", "[0:10, 3:5]@1", "[0:10, 5:7]@0"]
    assert _rectangles(md.table_row_wise(node=1)) == ["[0:5, 0:7]@2", "[5:10, 0:7]@3"]
    assert _rectangles(md.table_row_wise(host_index=0)) == ["[0:5, 0:7]@0", "[5:10, 0:7]@1"]
    assert _rectangles(md.table_column_wise(node=1)) == ["[0:10, 0:4]@2", "[0:10, 4:7]@3"]
    assert _rectangles(md.grid_shard()) == ["[0:5, 0:4]@0", "[5:10, 0:4]@1", "[0:5, 4:7]@2", "[5:10, 4:7]@3"]
    assert _rectangles(md.data_parallel()) == []


def test_more_ranks_than_rows_leaves_ranks_without_rectangle():
    sharding = md.row_wise()("t", md.TableSize(2, 7), RANKS)
    assert sharding.ranks == (0, 1)


def test_even_splits_covers_everything():
    assert even_splits(10, 4) == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert even_splits(1, 2) == [(0, 1), (1, 1)]


def test_construct_module_sharding_plan():
    builders = {"t0": md.table_wise(rank=1), "t1": md.row_wise()}
    plan = md.construct_module_sharding_plan(_module(), builders, world_size=2)
    assert list(plan) == ["t0", "t1"]
    md.verify_module_plan(plan, tables_of(_module()), world_size=2)


@pytest.mark.parametrize(
    ("builders", "match"),
    [
        ({"t0": md.row_wise()}, "'t1'"),
        ({"t0": md.row_wise(), "t1": md.row_wise(), "t9": md.row_wise()}, "'t9'"),
        ({"t0": md.row_wise(), "t1": md.table_wise(rank=2)}, "'t1'.*rank 2.*2 ranks"),
        (
            {"t0": md.row_wise(), "t1": md.table_row_wise(node=1)},
            "'t1'.*node 1.*1 nodes",
        ),
    ],
)
def test_impossible_plans_are_refused(builders, match):
    with pytest.raises(ValueError, match=match):
        md.construct_module_sharding_plan(_module(), builders, world_size=2)


def test_local_size_must_divide():
    with pytest.raises(ValueError, match=r"world_size.*4.*local_size.*3"):
        md.construct_module_sharding_plan(_module(0), {}, world_size=4, local_size=3)


def test_tables_of_something_else():
    with pytest.raises(ValueError, match="embedding"):
        tables_of(object())
