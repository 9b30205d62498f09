import numpy as np
import pytest

from meshrec.planner.bound import LowerBound
from meshrec.planner.enumerators import build_problem
from meshrec.planner.estimators import CostModel
from meshrec.planner.types import ParameterConstraints, Table, Topology


def problem_of(tables, profile, kinds, num_ranks=4):
    constraints = {table.name: ParameterConstraints(sharding_types=kinds) for table in tables}
    machine = Topology(world_size=num_ranks, hardware=profile)
    return build_problem(CostModel(tables, machine, batch_size=64), constraints)


def bound_of(problem):
    return LowerBound(problem, np.ones(len(problem.type_C), bool))


def test_one_whole_table_takes_its_own_time(profile):
    """The mean over ranks says a quarter; the largest piece says all of it."""
    problem = problem_of([Table(name="t", num_embeddings=1000, embedding_dim=32)], profile, ["table_wise"])
    exact = problem.load_PK[0].sum()
    bound = bound_of(problem)
    while bound.branch(2 * exact):
        pass
    assert bound.value == pytest.approx(exact, rel=5e-3)
    assert bound.value <= exact * (1 + 1e-6)


def test_five_equal_tables_on_four_ranks_take_two(profile):
    """The mean says 1.25 tables per rank; whole tables say two."""
    tables = [Table(name=f"t{i}", num_embeddings=1000, embedding_dim=32) for i in range(5)]
    problem = problem_of(tables, profile, ["table_wise"])
    exact = 2 * problem.load_PK[0].sum()
    bound = bound_of(problem)
    while bound.branch(1.5 * exact):
        pass
    assert bound.value == pytest.approx(exact, rel=2e-2)
    assert bound.value <= exact * (1 + 1e-6)


def test_where_nothing_is_faster_no_box_is_left(make_tables, profile):
    bound = bound_of(problem_of(make_tables(8), profile, ["table_wise", "row_wise"]))
    assert bound.branch(bound.value / 2)
    assert bound.value == np.inf
    assert not bound.branch(1.0)
    assert bound.best_box is None


def test_branching_only_raises_the_bound(make_tables, profile):
    problem = problem_of(make_tables(8), profile, ["table_wise", "row_wise", "column_wise"][:2])
    bound = bound_of(problem)
    values = [bound.value]
    while bound.branch(3 * values[0]) and len(values) < 50:
        values.append(bound.value)
    assert (np.diff(values) >= -1e-12).all()
    assert values[-1] > values[0]


def test_too_little_memory_is_proven(profile):
    problem = problem_of([Table(name="t", num_embeddings=1000, embedding_dim=32)], profile, ["table_wise"])
    bound = bound_of(problem._replace(memory_cap=10.0))
    assert bound.value == np.inf
    assert bound.solve_small_pieces(1.1) is None


@pytest.mark.parametrize("factor", [1.1, 1.5])
def test_squeezed_plans_have_no_pieces_far_above_t(make_tables, profile, factor):
    """A table that has no others keeps its smallest."""
    problem = problem_of(make_tables(12, 3), profile, ["table_wise", "column_wise", "row_wise"])
    bound = bound_of(problem)
    root, box = bound.best_box, bound.solve_small_pieces(factor)
    largest_CK = problem.largest_load_CK() / bound.scale
    excess_C = (largest_CK / np.maximum(root.slowest_K, 1e-4)).max(axis=1)
    small_C = excess_C <= factor * (1 + 1e-9)
    for kind in problem.type_T:
        mine = problem.type_C == kind
        allowed = small_C[mine] if small_C[mine].any() else excess_C[mine] <= excess_C[mine].min()
        np.testing.assert_array_equal(box.admitted_C[mine], allowed)
    assert not box.num_tables_C[~box.admitted_C].any()
    np.testing.assert_allclose(np.bincount(problem.type_C, box.num_tables_C), np.bincount(problem.type_T))
    assert not box.admitted_C.all()
    assert box.bound >= root.bound * (1 - 1e-9)


def test_squeezed_by_nothing_is_the_relaxation_itself(make_tables, profile):
    bound = bound_of(problem_of(make_tables(12, 3), profile, ["table_wise", "row_wise"]))
    assert bound.solve_small_pieces(np.inf) is bound.best_box
