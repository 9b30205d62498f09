import numpy as np
import pytest

from meshrec.planner.enumerators import build_problem, column_widths, layouts
from meshrec.planner.estimators import CostModel
from meshrec.planner.problem import Scope
from meshrec.planner.types import ParameterConstraints, Table, Topology


def table(rows=1000, columns=128, name="t"):
    return Table(name=name, num_embeddings=rows, embedding_dim=columns)


def names(kinds, num_ranks=4, node_size=4, **attributes):
    found = layouts(table(**attributes), ParameterConstraints(sharding_types=kinds), num_ranks, node_size)
    return [(layout.scope, layout.widths, layout.row_parts) for layout in found]


@pytest.mark.parametrize(("columns", "parts"), [(128, 3), (64, 2), (100, 3), (10, 3), (6, 4), (7, 2)])
def test_widths_cover_the_columns(columns, parts):
    widths = column_widths(columns, parts)
    assert sum(widths) == columns
    assert len(widths) == parts
    assert min(widths) > 0


def test_columns_split_down_to_the_least_partition():
    wide = names(["column_wise"])
    assert [len(widths) for _, widths, _ in wide] == [2, 3, 4]
    assert names(["column_wise"], columns=32) == []
    finer = layouts(
        table(columns=32), ParameterConstraints(min_partition=8, sharding_types=["column_wise"]), 8, 8
    )
    assert [len(layout.widths) for layout in finer] == [2, 3, 4]


def test_each_type_gives_its_layouts():
    assert names(["table_wise"]) == [(Scope.RANKS, (128,), 1)]
    assert names(["data_parallel"]) == [(Scope.EVERYWHERE, (128,), 1)]
    assert [parts for _, _, parts in names(["row_wise"])] == [2, 3, 4]
    assert names(["row_wise"], rows=3)[-1] == (Scope.RANKS, (128,), 3)
    assert names(["table_row_wise"], num_ranks=8) == [(Scope.NODES, (128,), 1)]
    assert names(["table_row_wise"]) == [(Scope.RANKS, (128,), 4)]
    assert {scope for scope, _, _ in names(["table_column_wise"], num_ranks=8)} == {Scope.ONE_NODE}
    assert (Scope.NODES, (64, 64), 1) in names(["grid_shard"], num_ranks=8)
    assert (Scope.RANKS, (64, 64), 2) in names(["grid_shard"])
    assert (Scope.NODES, (128,), 2) in names(["row_wise"], num_ranks=8)


def test_one_rank_holds_whole_tables():
    assert names(["table_wise", "data_parallel"], num_ranks=1, node_size=1) == [(Scope.RANKS, (128,), 1)]
    assert names(["row_wise"], num_ranks=1, node_size=1) == [(Scope.RANKS, (128,), 1)]
    assert names(["data_parallel"], num_ranks=1, node_size=1) == [(Scope.EVERYWHERE, (128,), 1)]


def test_identical_tables_are_one_type(profile):
    model = CostModel(
        [table(name="a"), table(name="b"), table(rows=5, name="c")], Topology(world_size=2), batch_size=8
    )
    assert build_problem(model, {}).type_T.tolist() == [0, 0, 1]
    constrained = build_problem(model, {"b": ParameterConstraints(sharding_types=["table_wise"])})
    assert constrained.type_T.tolist() == [0, 1, 2]


def test_every_candidate_does_the_whole_table(profile):
    """The mean over ranks grows with the number of parts by their fixed costs only, and never shrinks."""
    model = CostModel([table()], Topology(world_size=4, hardware=profile), batch_size=100)
    problem = build_problem(model, {"t": ParameterConstraints(sharding_types=["table_wise", "row_wise"])})
    mean_C = problem.mean_load_CK().sum(axis=1)
    assert (np.diff(mean_C) > 0).all()
    variable_P = (problem.load_PK - problem.fixed_PK).sum(axis=1) * problem.count_P
    np.testing.assert_allclose(variable_P[1:], variable_P[1])


def test_output_and_gradient_are_one_phase_of_the_search(profile):
    problem = build_problem(CostModel([table()], Topology(world_size=4, hardware=profile), batch_size=8), {})
    assert problem.merge_FK.sum(axis=1).max() == 1
    assert sorted(problem.merge_FK.sum(axis=0)) == [1, 1, 1, 1, 2]


def test_constraints_without_a_candidate_say_so(profile):
    model = CostModel([table(columns=16)], Topology(world_size=4), batch_size=8)
    with pytest.raises(ValueError, match=r"'t'.*\['column_wise'\].*min_partition.*32"):
        build_problem(model, {"t": ParameterConstraints(sharding_types=["column_wise"])})
    with pytest.raises(ValueError, match=r"rank 9.*\[0.*4"):
        build_problem(model, {"t": ParameterConstraints(ranks=[9])})
