import highspy
import numpy as np
import pytest

from meshrec.planner.highs import INFINITY, LinearProgram, ProgramRows, Solver, solve_lp, sparse_matrix


@pytest.fixture
def program():
    """max x + y with x + 2y <= 4, x <= 3."""
    matrix = sparse_matrix(
        np.array([0, 0]), np.array([1, 0]), np.array([2.0, 1.0]), num_rows=1, num_columns=2
    )
    return LinearProgram(
        cost=np.array([-1.0, -1.0]),
        lower=np.zeros(2),
        upper=np.array([3.0, INFINITY]),
        matrix=matrix,
        row_lower=np.array([-INFINITY]),
        row_upper=np.array([4.0]),
    )


def test_optimum(program):
    optimum = solve_lp(program)
    assert optimum.objective == pytest.approx(-3.5)
    np.testing.assert_allclose(optimum.x, [3.0, 0.5])


def test_bounds_can_change(program):
    solver = Solver(program)
    assert solver.solve().objective == pytest.approx(-3.5)
    solver.set_bounds(np.zeros(2), np.array([1.0, INFINITY]))
    assert solver.solve().objective == pytest.approx(-2.5)
    solver.set_bounds(np.array([5.0, 0.0]), np.array([6.0, INFINITY]))
    assert solver.solve() is None


def test_limits_can_change(program):
    solver = Solver(program)
    before = solver.work
    solver.set_last_row(2.0)
    assert solver.solve().objective == pytest.approx(-2.0)
    assert solver.work > before


def test_rows_add_up_what_shares_a_place():
    rows = ProgramRows(2)
    rows.add_each(np.array([0, 0, 1]), np.array([0, 0, 1]), 1.0, np.array([2.0, 3.0]), np.array([9.0, 9.0]))
    rows.add(np.array([0, 1]), np.array([1.0, 1.0]), -INFINITY, 9.0)
    program = rows.program(np.ones(2), np.zeros(2), np.full(2, INFINITY))
    np.testing.assert_allclose(solve_lp(program).x, [1.0, 3.0])


@pytest.mark.parametrize("options", [{}, {"devex": True}])
def test_rows_can_be_added(program, options):
    solver = Solver(program, **options)
    assert solver.solve().objective == pytest.approx(-3.5)
    rows = ProgramRows(2)
    rows.add(np.array([1, 0]), np.array([1.0, 1.0]), -INFINITY, 2.0)
    solver.add_rows(rows)
    assert solver.solve().objective == pytest.approx(-2.0)


def test_what_is_not_settled_is_not_infeasible(program, monkeypatch):
    """A bound must not take a failure for a proof."""
    monkeypatch.setattr(Solver, "_status", highspy.HighsModelStatus.kUnknown)
    optimum = Solver(program).solve()
    assert optimum.objective == -INFINITY
    np.testing.assert_array_equal(optimum.x, 0.0)
    assert solve_lp(program) is None
