import numpy as np
import pytest

from meshrec.plan.sharding_plan import ShardingPlan, ShardingType
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.placements import from_plan, sharding_type, to_placements, to_plan
from meshrec.planner.problem import Layout, Scope
from meshrec.planner.state import Parts
from meshrec.planner.types import ParameterConstraints, Table, Topology


def test_rows_are_cut_where_the_sizes_say():
    table = Table(name="t", num_embeddings=10, embedding_dim=32)
    problem = build_problem(CostModel([table], Topology(world_size=3), batch_size=8), {})
    candidate = problem.layouts_C.index(Layout(Scope.RANKS, (32,), 3))
    group = problem.pieces(candidate).start
    parts = Parts(candidate, np.full(3, group), np.array([2, 0, 1]), np.array([1.5, 0.3, 1.2]))
    placements = to_placements(problem, [parts], [table])
    assert placements.rank_N.tolist() == [0, 1, 2]
    assert placements.row_start_N.tolist() == [0, 1, 5]
    assert placements.row_end_N.tolist() == [1, 5, 10]
    tiny = Parts(candidate, np.full(3, group), np.array([0, 1, 2]), np.array([0.001, 0.001, 2.998]))
    assert to_placements(problem, [tiny], [table]).row_end_N.tolist() == [1, 2, 10]


def test_a_plan_and_its_arrays_are_the_same(small_plan):
    inputs = small_plan.required_inputs()
    placements = from_plan(small_plan, inputs.tables)
    types = [small_plan.plan[""][table.name].sharding_type for table in inputs.tables]
    assert to_plan(placements, inputs.tables, types, "cuda") == small_plan.plan
    with pytest.raises(ValueError, match="the plan does not place table 't0' of module ''"):
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
