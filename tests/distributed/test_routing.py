import torch

from meshrec import distributed as md
from meshrec.distributed.routing import Lookup, Route, RoutedTable, compile_plan
from meshrec.plan.builders import WorldShape
from meshrec.tables.table import Rectangle


def compiled(*builders, rows=10, dim=8, num_ranks=2):
    tables = [RoutedTable(f"t{i}", rows, dim, (f"f{i}", "shared")) for i in range(len(builders))]
    plan = {
        table.name: build(table.name, md.TableSize(rows, dim), WorldShape(num_ranks, num_ranks))
        for table, build in zip(tables, builders, strict=True)
    }
    return compile_plan(tables, md.EmbeddingModuleShardingPlan(plan), num_ranks=num_ranks)


def test_uses_come_in_table_order():
    routing = compiled(md.table_wise(rank=1), md.row_wise())
    assert [tuple(use) for use in routing.uses] == [(0, "f0"), (0, "shared"), (1, "f1"), (1, "shared")]
    assert routing.columns == [0, 8, 16, 24, 32]
    assert routing.row_split == [False, True]


def test_parts_of_one_table_on_one_rank_are_joined():
    routing = compiled(md.column_wise(ranks=[0, 0, 1]))
    assert routing.work[0].rectangles == (Rectangle(0, 0, 10, 0, 6),)
    assert routing.work[1].rectangles == (Rectangle(0, 0, 10, 6, 8),)
    rows = compiled(md.row_wise(ranks=[0, 0, 1]))
    assert rows.work[0].rectangles == (Rectangle(0, 0, 7, 0, 8),)


def placed(*rectangles, whole_rows, num_ranks=3):
    """What each rank has of a table of 10 x 8, from (rank, r0, r1, c0, c1)."""
    shards = tuple(
        md.ShardMetadata(
            shard_offsets=(r0, c0), shard_sizes=(r1 - r0, c1 - c0), placement=md.RemoteDevice(rank=rank)
        )
        for rank, r0, r1, c0, c1 in rectangles
    )
    sharding = md.ParameterSharding(
        sharding_type=md.ShardingType.GRID_SHARD, sharding_spec=md.EnumerableShardingSpec(shards=shards)
    )
    plan = md.EmbeddingModuleShardingPlan({"t": sharding})
    routing = compile_plan(
        [RoutedTable("t", 10, 8, ("f",))], plan, num_ranks=num_ranks, whole_rows=[0] if whole_rows else []
    )
    return [[tuple(x)[1:] for x in work.rectangles] for work in routing.work]


BANDS = (0, 0, 5, 0, 4), (0, 5, 10, 0, 4), (1, 0, 5, 4, 8), (2, 5, 10, 4, 8)
PINWHEEL = (0, 0, 6, 0, 3), (0, 0, 4, 3, 8), (0, 4, 10, 5, 8), (0, 6, 10, 0, 5), (0, 4, 6, 3, 5)


def test_rows_that_must_be_whole_are_cut_where_their_columns_change_hands():
    assert placed(*BANDS, whole_rows=False) == [[(0, 10, 0, 4)], [(0, 5, 4, 8)], [(5, 10, 4, 8)]]
    assert placed(*BANDS, whole_rows=True) == [
        [(0, 5, 0, 4), (5, 10, 0, 4)],
        [(0, 5, 4, 8)],
        [(5, 10, 4, 8)],
    ]
    halves = (0, 0, 3, 0, 4), (0, 3, 10, 0, 4), (1, 0, 7, 4, 8), (1, 7, 10, 4, 8)
    assert placed(*halves, whole_rows=True) == [[(0, 10, 0, 4)], [(0, 10, 4, 8)], []]


def test_a_rank_alone_has_the_whole_in_one():
    for whole_rows in (False, True):
        assert placed(*PINWHEEL, whole_rows=whole_rows) == [[(0, 10, 0, 8)], [], []]


def test_parts_that_do_not_touch_share_their_route():
    routing = compiled(md.column_wise(ranks=[0, 1, 0]))
    work = routing.work[0]
    assert work.routes == (Route(0, 0, 10), Route(1, 0, 10))
    assert work.lookups[:2] == (Lookup(0, 0, 0, 0, 3), Lookup(0, 1, 0, 6, 2))
    assert work.dim == 10


def test_data_parallel_tables_are_looked_up_by_every_rank_itself():
    routing = compiled(md.data_parallel(), md.table_wise(rank=0))
    assert routing.replicated == (True, False)
    assert routing.local.rectangles == (Rectangle(0, 0, 10, 0, 8),)
    assert routing.work[1].rectangles == ()


def test_router_sends_each_interval_to_the_routes_that_hold_it():
    cut_begin, cuts, interval_begin, interval_routes, routes = compiled(md.row_wise()).router
    assert cut_begin.tolist() == [0, 3, 6]
    assert cuts.tolist() == [0, 5, 10, 0, 5, 10]
    assert interval_begin.tolist() == [0, 1, 2, 3, 4]
    assert interval_routes.tolist() == [0, 2, 1, 3]
    assert routes.view(-1, 3).tolist() == [[0, 0, 0], [0, 1, 0], [1, 0, 5], [1, 1, 5]]


def test_ids_need_64_bits_only_for_huge_rectangles():
    assert compiled(md.table_wise(rank=0), rows=1 << 31).wide
    assert not compiled(md.row_wise(), rows=1 << 31).wide


def test_names_are_lines_for_the_kernels():
    assert bytes(compiled(md.row_wise()).names.tolist()) == b"t0\tf0\nt0\tshared\n"
    assert compiled(md.row_wise()).names.dtype == torch.uint8


def test_routes_say_how_much_they_read_and_which_take_an_id_once():
    routing = compiled(md.column_wise(ranks=[0, 1]), md.row_wise(), md.data_parallel())
    ranks, widths = routing.route_elements
    # Two uses of each table: halves of rows on both ranks, halves of the other table, the third one local.
    assert ranks == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert widths == [4, 4, 8, 8, 4, 4, 8, 8, 8, 8]
    routes, uses = routing.first_columns
    assert sorted(zip(uses.tolist(), routes.tolist(), strict=True)) == [
        (0, 0),
        (1, 1),
        (2, 2),
        (2, 6),
        (3, 3),
        (3, 7),
        (4, 8),
        (5, 9),
    ]
