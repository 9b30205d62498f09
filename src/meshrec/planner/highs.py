"""A thin layer over HiGHS: linear programs as arrays, one thread, so that results repeat."""

from typing import NamedTuple

import highspy
import numpy as np

from meshrec.planner.types import Floats, Ints

INFINITY = 1e30
_WORK_PER_SOLVE, _WORK_PER_ITERATION = 400, 15
"""Per row and column to the power of 0.7, as sparse as larger programs are."""
_LEAST_ITERATIONS = 2000
"""More iterations than this and twice the rows and columns are a sign of trouble."""

_SETTLED = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)
"""What is known for sure (no program here is unbounded)."""


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


class ProgramRows:
    """Rows of a linear program, as they come."""

    def __init__(self, num_columns: int) -> None:
        self._num_columns = num_columns
        self._num_rows = 0
        self._triplets: list[tuple[Ints, Ints, Floats]] = []
        self._limits: list[tuple[Floats, Floats]] = []

    def add(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        """One row."""
        self.add_each(np.zeros(len(columns), np.int64), columns, values, np.array([lower]), np.array([upper]))

    def add_each(
        self, rows: Ints, columns: Ints, values: Floats | float, lower: Floats, upper: Floats
    ) -> None:
        """As many rows as `lower` and `upper` have entries; `rows` counts from the first of them."""
        values = np.broadcast_to(np.asarray(values, np.float64), rows.shape)
        some = values != 0
        self._triplets.append((rows[some] + self._num_rows, columns[some], values[some]))
        self._limits.append((lower, upper))
        self._num_rows += len(lower)

    def by_rows(self) -> tuple[Floats, Floats, Ints, Ints, Floats]:
        """Lower and upper limits, and the matrix by rows: starts, columns, values."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self._triplets, strict=True))
        lower, upper = (np.concatenate(part) for part in zip(*self._limits, strict=True))
        order = np.argsort(rows, kind="stable")
        start = np.searchsorted(rows[order], np.arange(len(lower)))
        return lower, upper, start.astype(np.int32), columns[order].astype(np.int32), values[order]

    def program(self, cost: Floats, lower: Floats, upper: Floats) -> LinearProgram:
        """The program: minimise `cost`."""
        rows, columns, values = (np.concatenate(part) for part in zip(*self._triplets, strict=True))
        row_lower, row_upper = (np.concatenate(part) for part in zip(*self._limits, strict=True))
        # Several pieces of a candidate may share an element.
        place, inverse = np.unique(columns * self._num_rows + rows, return_inverse=True)
        columns, rows = np.divmod(place, self._num_rows)
        values = np.bincount(inverse, values, len(place)).astype(np.float64)
        matrix = sparse_matrix(rows, columns, values, num_rows=self._num_rows, num_columns=self._num_columns)
        return LinearProgram(cost, lower, upper, matrix, row_lower, row_upper)


class _SilentHighs(highspy.Highs):
    """HiGHS that says nothing, also not its name while it is made, as version 1.16 does."""

    def enableCallbacks(self) -> None:
        """What its constructor ends with, and what speaks there."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class Solver:
    """One linear program whose bounds and cost may change; each solve starts from the last basis.

    `devex`: whether to choose rows by rough weights, not by steepest edges, which takes
    more iterations, but a fifth less time where rows are ten thousand.

    Attributes:
        work: what the solutions cost, by rows, columns and iterations of the simplex method; see `Effort`.
    """

    def __init__(self, program: LinearProgram, *, devex: bool = False) -> None:
        self.work = 0
        self._count = len(program.cost) + program.matrix.num_rows
        self._size = self._count**0.7
        self._last_row = program.matrix.num_rows - 1
        self._highs = _SilentHighs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("threads", 1),
            ("random_seed", 0),
            ("presolve", "choose"),
            ("simplex_scale_strategy", 2),
            ("simplex_dual_edge_weight_strategy", 1 if devex else -1),
            ("simplex_iteration_limit", _LEAST_ITERATIONS + 2 * self._count),
        ):
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

    def add_rows(self, rows: ProgramRows) -> None:
        """Adds rows; what is known of the last solution stays."""
        lower, upper, start, column, value = rows.by_rows()
        self._highs.addRows(len(lower), lower, upper, len(value), start, column, value)

    def set_bounds(self, lower: Floats, upper: Floats) -> None:
        """Replaces the bounds of all variables."""
        self._highs.changeColsBounds(len(lower), np.arange(len(lower), dtype=np.int32), lower, upper)

    def set_cost(self, cost: Floats) -> None:
        """Replaces the cost of all variables."""
        self._highs.changeColsCost(len(cost), np.arange(len(cost), dtype=np.int32), cost)

    def set_last_row(self, upper: float) -> None:
        """Replaces the upper limit of the program's last row."""
        self.set_added_row(-1, upper)

    def set_added_row(self, index: int, upper: float) -> None:
        """Replaces the upper limit of one of the rows that were added."""
        self._highs.changeRowBounds(self._last_row + 1 + index, -INFINITY, min(upper, INFINITY))

    def solve(self) -> Optimum | None:
        """The optimum; None where there is no feasible point. Where neither is proven (HiGHS may fail on
        numbers that are hard to tell apart), zeros that are known to cost `-INFINITY`."""
        self._run()
        if self._status not in _SETTLED:
            self._highs.clearSolver()
            self._highs.setOptionValue("presolve", "on")
            self._run()
        if self._status == highspy.HighsModelStatus.kOptimal:
            solution = self._highs.getSolution()
            x, reduced_costs = np.array(solution.col_value), np.array(solution.col_dual)
            objective = self._highs.getInfo().objective_function_value
            return Optimum(objective, x, reduced_costs)
        if self._status in _SETTLED:
            return None
        none = np.zeros(self._highs.getNumCol())
        return Optimum(-INFINITY, none, none)

    @property
    def _status(self) -> highspy.HighsModelStatus:
        return self._highs.getModelStatus()

    def _run(self) -> None:
        self._highs.run()
        iterations = max(int(self._highs.getInfo().simplex_iteration_count), 0)
        self.work += int(self._size * (_WORK_PER_SOLVE + _WORK_PER_ITERATION * iterations))


def solve_lp(program: LinearProgram) -> Optimum | None:
    """The optimum of one linear program; None where there is none, or none was found."""
    optimum = Solver(program).solve()
    return None if optimum is None or optimum.objective == -INFINITY else optimum
