import highspy
import numpy as np
import pytest

from meshrec.planner.highs import INFINITY, ProgramRows, Solver


@pytest.fixture
def solver():
    """max x + y with x + 2y <= 4, x <= 3."""
    rows = ProgramRows()
    rows.add(np.array([0, 1]), np.array([1.0, 2.0]), -INFINITY, 4.0)
    found = Solver(np.array([-1.0, -1.0]), rows)
    found.set_bounds(np.zeros(2), np.array([3.0, INFINITY]))
    return found


def test_optimum(solver):
    optimum = solver.solve()
    assert optimum.objective == pytest.approx(-3.5)
    np.testing.assert_allclose(optimum.x, [3.0, 0.5])
    assert solver.work > 0


def test_bounds_can_change(solver):
    solver.set_bounds(np.zeros(2), np.array([1.0, INFINITY]))
    assert solver.solve().objective == pytest.approx(-2.5)
    solver.set_bounds(np.array([5.0, 0.0]), np.array([6.0, INFINITY]))
    assert solver.solve() is None


def test_rows_can_be_added_and_set_aside(solver):
    rows = ProgramRows()
    rows.add(np.array([1, 0]), np.array([1.0, 1.0]), -INFINITY, 2.0)
    solver.add_rows(rows)
    assert solver.solve().objective == pytest.approx(-2.0)
    solver.set_added_row(0, INFINITY)
    assert solver.solve().objective == pytest.approx(-3.5)


def test_rows_count_from_the_first_of_each_call():
    rows = ProgramRows()
    rows.add_many(np.arange(2), np.arange(2), 1.0, np.array([2.0, 3.0]), np.array([9.0, 9.0]))
    rows.add(np.array([0, 1]), np.array([1.0, 1.0]), 6.0, 9.0)
    assert Solver(np.array([1.0, 2.0]), rows).solve().x.tolist() == [3.0, 3.0]


def test_what_is_not_settled_is_not_infeasible(solver, monkeypatch):
    """A bound must not take a failure for a proof."""
    monkeypatch.setattr(Solver, "_status", highspy.HighsModelStatus.kUnknown)
    optimum = solver.solve()
    assert optimum.objective == -INFINITY
    np.testing.assert_array_equal(optimum.x, 0.0)
