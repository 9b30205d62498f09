from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.plan.builders import (
    WorldShape,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from meshrec.plan.checks import verify_plan
from meshrec.plan.sharding_plan import EmbeddingModuleShardingPlan, ShardingPlan, ShardingType, TableSize
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import PHASES, CostModel
from meshrec.planner.evaluate import (
    evaluate,
    from_plan,
    sharding_type,
    to_plan,
    whole_row_placements,
)
from meshrec.planner.optimize import optimize
from meshrec.planner.problem import Layout, Scope
from meshrec.planner.search import Effort
from meshrec.planner.state import TablePlacement
from meshrec.planner.types import OptimizerKind, ParameterConstraints, Table, Topology

TWO_NODES = WorldShape(4, 2)


def by_hand(table, generator, world=TWO_NODES) -> Mapping[str, EmbeddingModuleShardingPlan]:
    size = TableSize(table.num_embeddings, table.embedding_dim)
    return {"": EmbeddingModuleShardingPlan({table.name: generator(table.name, size, world)})}


@pytest.fixture
def table():
    return Table(name="t", num_embeddings=1000, embedding_dim=64, pooling_factors=(10.0,))


def cost(table, generator, profile, **topology):
    machine = Topology(world_size=4, local_world_size=2, hardware=profile, **topology)
    return evaluate(by_hand(table, generator), [table], machine, batch_size=100)


def test_a_whole_table_loads_one_rank(table, profile):
    estimate = cost(table, table_wise(rank=3), profile)
    assert (estimate.load_RF[:3] == 0).all()
    assert estimate.load_RF[3].sum() > 0
    latencies = 4 * 2e-5 + 2 * 1e-5  # four all-to-alls over the network, two kernels
    assert estimate.seconds == pytest.approx(estimate.load_RF[3].sum() + latencies)
    assert sum(estimate.phases.values()) == pytest.approx(estimate.seconds)


def test_a_step_waits_for_the_slowest_rank_of_each_phase(profile):
    wide = Table(name="a", num_embeddings=10, embedding_dim=256, pooling_factors=(1.0,))
    many = Table(name="b", num_embeddings=10, embedding_dim=8, pooling_factors=(100.0,))
    machine = Topology(world_size=4, local_world_size=2, hardware=profile)
    size = {t.name: TableSize(t.num_embeddings, t.embedding_dim) for t in (wide, many)}
    plan = {"": EmbeddingModuleShardingPlan(
        a=table_wise(rank=0)("a", size["a"], TWO_NODES), b=table_wise(rank=1)("b", size["b"], TWO_NODES)
    )}  # fmt: skip
    estimate = evaluate(plan, [wide, many], machine, batch_size=100)
    assert estimate.load_RF[:, PHASES.index("ids")].argmax() == 1
    assert estimate.load_RF[:, PHASES.index("output")].argmax() == 0
    slowest_sum = estimate.load_RF.sum(axis=1).max()
    assert estimate.load_RF.max(axis=0).sum() > slowest_sum


def test_copies_load_every_rank_alike(table, profile):
    estimate = cost(table, data_parallel(), profile)
    assert np.ptp(estimate.load_RF, axis=0).max() == 0
    assert 0 < estimate.phases["ids"] < 1e-4  # no id travels, but all are passed over
    assert estimate.phases["data_parallel"] > 0


def test_rows_of_a_whole_node_are_summed_there(table, profile):
    summed = cost(table, table_row_wise(node=1), profile)
    flat = cost(table, table_row_wise(node=1), profile, sum_in_node=False)
    crossing = cost(table, row_wise(ranks=[1, 2]), profile)
    one_hop = cost(table, row_wise(ranks=[1, 2]), profile, sum_in_node=False)
    assert summed.phases["output"] < flat.phases["output"] == one_hop.phases["output"]
    # A rank alone with its part takes the way through the node, too, and nothing is summed there.
    assert crossing.phases["output"] > one_hop.phases["output"]


def test_column_parts_are_charged_for_row_statistics(table, profile):
    assert cost(table, column_wise(ranks=[0, 1]), profile).phases["row_stats"] > 0
    assert cost(table, grid_shard(), profile).phases["row_stats"] > 0
    assert cost(table, row_wise(), profile).phases["row_stats"] == 0


def test_wrong_plans_are_refused(table, profile):
    machine = Topology(world_size=2, hardware=profile)
    with pytest.raises(ValueError, match="'t'"):
        evaluate({}, [table], machine, batch_size=8)
    with pytest.raises(ValueError, match=r"ranks 3.*3.*\[0.*2"):
        evaluate(by_hand(table, table_wise(rank=3)), [table], machine, batch_size=8)


tables_strategy = st.lists(
    st.tuples(
        st.integers(1, 10**5),
        st.sampled_from([4, 10, 32, 64, 100, 128]),
        st.floats(0.0, 60.0),
        st.sampled_from(list(OptimizerKind)),
        st.booleans(),
    ),
    min_size=1,
    max_size=7,
)
types_strategy = st.sampled_from(
    [None, ["row_wise", "table_wise"], ["data_parallel", "column_wise", "table_wise"]]
)


@settings(max_examples=25, deadline=None)
@given(
    drawn=tables_strategy,
    machine=st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 3), (8, 4)]),
    allowed=types_strategy,
    memory=st.sampled_from([1 << 24, 1 << 27, 1 << 33]),
    replicate=st.booleans(),
    on_cpu=st.booleans(),
)
def test_every_plan_is_one_and_costs_what_was_claimed(
    profile, cpu_profile, drawn, machine, allowed, memory, replicate, on_cpu
):
    tables = [
        Table(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=columns,
            pooling_factors=(pooling,),
            optimizer=kind,
            pooled=pooled,
        )
        for i, (rows, columns, pooling, kind, pooled) in enumerate(drawn)
    ]
    world, local = machine
    sizes = (1, 2) if replicate and world % 2 == 0 else (1,)
    topology = Topology(
        world_size=world,
        local_world_size=local,
        hardware=cpu_profile if on_cpu else profile,
        hbm_cap=memory,
        replicate=sizes,
    )
    constraints = {"t0": ParameterConstraints(sharding_types=allowed)}
    found = optimize(tables, topology, batch_size=16, constraints=constraints, effort=Effort(1.0, 3e6, 0.0))
    if found is None:
        assert memory < 1 << 33
        return
    plan = to_plan(found.placements, tables, found.types_T, "cuda")
    sizes_by_name = {table.name: TableSize(table.num_embeddings, table.embedding_dim) for table in tables}
    verify_plan(ShardingPlan(plan), {"": sizes_by_name}, world_size=world // found.replicas)
    again = evaluate(plan, tables, topology, batch_size=16, replicas=found.replicas)
    assert again.seconds == pytest.approx(found.estimate.seconds, rel=1e-12)
    assert again.fits
    assert 0 <= found.lower_bound <= found.estimate.seconds
    assert allowed is None or found.types_T[0].value in allowed
    for table in tables:
        widths = [shard.shard_sizes[1] for shard in plan[""][table.name].shards]
        assert all(width >= min(32, table.embedding_dim) for width in widths)


def test_rows_are_cut_where_the_sizes_say():
    table = Table(name="t", num_embeddings=10, embedding_dim=32)
    problem = build_problem(CostModel([table], Topology(world_size=3), batch_size=8), {})
    candidate = problem.layouts_C.index(Layout(Scope.RANKS, (32,), 3))
    group = problem.pieces(candidate).start
    placement = TablePlacement(candidate, np.full(3, group), np.array([2, 0, 1]), np.array([1.5, 0.3, 1.2]))
    placements = whole_row_placements(problem, [placement], [table])
    assert placements.rank_N.tolist() == [0, 1, 2]
    assert placements.row_start_N.tolist() == [0, 1, 5]
    assert placements.row_end_N.tolist() == [1, 5, 10]
    tiny = TablePlacement(candidate, np.full(3, group), np.array([0, 1, 2]), np.array([0.001, 0.001, 2.998]))
    assert whole_row_placements(problem, [tiny], [table]).row_end_N.tolist() == [1, 2, 10]


def test_a_plan_and_its_arrays_are_the_same(small_plan):
    inputs = small_plan.required_inputs()
    placements = from_plan(small_plan, inputs.tables)
    types = [small_plan.plan[""][table.name].sharding_type for table in inputs.tables]
    assert to_plan(placements, inputs.tables, types, "cuda") == small_plan.plan
    with pytest.raises(ValueError, match="'t0'"):
        from_plan(ShardingPlan(), inputs.tables)


@pytest.mark.parametrize(
    ("layout", "name"),
    [
        (Layout(Scope.EVERYWHERE, (64,), 1), ShardingType.DATA_PARALLEL),
        (Layout(Scope.RANKS, (64,), 1), ShardingType.TABLE_WISE),
        (Layout(Scope.RANKS, (32, 32), 1), ShardingType.COLUMN_WISE),
        (Layout(Scope.RANKS, (64,), 2), ShardingType.ROW_WISE),
        (Layout(Scope.RANKS, (32, 32), 2), ShardingType.GRID_SHARD),
        (Layout(Scope.NODES, (64,), 1), ShardingType.TABLE_ROW_WISE),
        (Layout(Scope.NODES, (64,), 2), ShardingType.ROW_WISE),
        (Layout(Scope.NODES, (32, 32), 1), ShardingType.GRID_SHARD),
        (Layout(Scope.ONE_NODE, (32, 32), 1), ShardingType.TABLE_COLUMN_WISE),
    ],
)
def test_layouts_have_names(layout, name):
    assert sharding_type(layout, None) is name


def test_a_name_keeps_to_the_constraints():
    only = ParameterConstraints(sharding_types=["table_row_wise"])
    assert sharding_type(Layout(Scope.RANKS, (64,), 2), only) is ShardingType.TABLE_ROW_WISE
    only = ParameterConstraints(sharding_types=["column_wise", "data_parallel"])
    assert sharding_type(Layout(Scope.RANKS, (64,), 1), only) is ShardingType.COLUMN_WISE
