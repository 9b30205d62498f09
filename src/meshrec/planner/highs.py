"""A thin layer over HiGHS: linear programs as arrays, one thread, so that results repeat."""

from typing import NamedTuple

import highspy
import numpy as np

from meshrec.planner.types import Floats, Ints

INFINITY = 1e30


class Matrix(NamedTuple):
    """A sparse matrix by columns (CSC)."""

    start: Ints
    row: Ints
    value: Floats
    num_rows: int


class LinearProgram(NamedTuple):
    """min cost x, row_lower <= A x <= row_upper, lower <= x <= upper."""

    cost: Floats
    lower: Floats
    upper: Floats
    matrix: Matrix
    row_lower: Floats
    row_upper: Floats


class Optimum(NamedTuple):
    """An optimal solution: objective, x, and the reduced costs."""

    objective: float
    x: Floats
    reduced_costs: Floats


def sparse_matrix(rows: Ints, columns: Ints, values: Floats, *, num_rows: int, num_columns: int) -> Matrix:
    """A matrix from triplets (each position at most once)."""
    order = np.lexsort((rows, columns))
    start = np.searchsorted(columns[order], np.arange(num_columns + 1))
    return Matrix(start.astype(np.int32), rows[order].astype(np.int32), values[order], num_rows)


class Solver:
    """One linear program whose bounds may change; each solve starts from the last basis."""

    def __init__(self, program: LinearProgram) -> None:
        self._highs = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
            self._highs.setOptionValue(option, value)
        model = highspy.HighsLp()
        model.num_col_ = len(program.cost)
        model.num_row_ = program.matrix.num_rows
        model.col_cost_, model.col_lower_, model.col_upper_ = program.cost, program.lower, program.upper
        model.row_lower_, model.row_upper_ = program.row_lower, program.row_upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kColwise
        model.a_matrix_.start_ = program.matrix.start
        model.a_matrix_.index_ = program.matrix.row
        model.a_matrix_.value_ = program.matrix.value
        self._highs.passModel(model)

    def set_bounds(self, lower: Floats, upper: Floats) -> None:
        """Replaces the bounds of all variables."""
        self._highs.changeColsBounds(len(lower), np.arange(len(lower), dtype=np.int32), lower, upper)

    def set_cost(self, cost: Floats) -> None:
        """Replaces the cost of all variables."""
        self._highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def solve(self) -> Optimum | None:
        """The optimum, or None where there is no feasible point (or no proven optimum)."""
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return None
        solution = self._highs.getSolution()
        return Optimum(
            self._highs.getInfo().objective_function_value,
            np.array(solution.col_value),
            np.array(solution.col_dual),
        )


def solve_lp(program: LinearProgram) -> Optimum | None:
    """Solves one linear program."""
    return Solver(program).solve()
