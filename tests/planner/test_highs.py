import numpy as np
import pytest

from meshrec.planner.highs import INFINITY, LinearProgram, Solver, solve_lp, sparse_matrix


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
