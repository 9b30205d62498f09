"""Linear programs in row form, solved with HiGHS in a single thread, so that results are reproducible."""

from typing import NamedTuple

import highspy
import numpy as np

from meshrec.planner.types import Floats, Ints

# HiGHS treats bounds of at least 1e20 (its option infinite_bound) as infinite.
INFINITY = 1e30
# Work (see `Effort`) per solve and per simplex iteration, as multiples of (rows + columns) ** 0.7. The
# exponent is below 1 because larger programs are sparser.
_WORK_PER_SOLVE, _WORK_PER_ITERATION = 400, 15
# Iteration limit, in addition to twice the row and column count. A program that needs more iterations is in
# numerical trouble.
_LEAST_ITERATIONS = 2000

# Statuses with a definite result. No program here is unbounded, so kUnboundedOrInfeasible means infeasible.
_SETTLED = (
    highspy.HighsModelStatus.kOptimal,
    highspy.HighsModelStatus.kInfeasible,
    highspy.HighsModelStatus.kUnboundedOrInfeasible,
)


class Optimum(NamedTuple):
    """Optimal solution: objective value, variables x, and the reduced cost per variable."""

    objective: float
    x: Floats
    reduced_costs: Floats


class ProgramRows:
    """Constraint rows ``lower <= coefficients @ x <= upper`` of a linear program, added one by one."""

    def __init__(self) -> None:
        # Rows so far. Below, for every call that adds rows, the nonzero entries and the limits.
        self._num_rows = 0
        self._triplets: list[tuple[Ints, Ints, Floats]] = []
        self._limits: list[tuple[Floats, Floats]] = []

    def add(self, columns: Ints, values: Floats, lower: float, upper: float) -> None:
        """Add a constraint row.

        Args:
            columns: indices of the variables in this constraint.
            values: coefficient per entry of `columns`.
            lower: lower limit on the weighted sum.
            upper: upper limit on the weighted sum.
        """
        self.add_many(np.zeros(len(columns), np.int64), columns, values, np.array([lower]), np.array([upper]))

    def add_many(
        self, rows: Ints, columns: Ints, values: Floats | float, lower: Floats, upper: Floats
    ) -> None:
        """Add several constraint rows, one per entry of `lower` and `upper`.

        Args:
            rows: row index per coefficient, counted from the first added row.
            values: coefficients; a scalar applies to all. Zeros are dropped.
        """
        values = np.broadcast_to(np.asarray(values, np.float64), rows.shape)
        some = values != 0
        self._triplets.append((rows[some] + self._num_rows, columns[some], values[some]))
        self._limits.append((lower, upper))
        self._num_rows += len(lower)

    def by_rows(self) -> tuple[Floats, Floats, Ints, Ints, Floats]:
        """Return all rows in compressed sparse row form.

        Returns:
            Tuple (lower, upper, start, column, value). The first two have the limits per row, and ``start``
            has the index of every row's first coefficient. The last two have the column and the value per
            coefficient.
        """
        rows, columns, values = (np.concatenate(part) for part in zip(*self._triplets, strict=True))
        lower, upper = (np.concatenate(part) for part in zip(*self._limits, strict=True))
        order = np.argsort(rows, kind="stable")
        start = np.searchsorted(rows[order], np.arange(len(lower)))
        return lower, upper, start.astype(np.int32), columns[order].astype(np.int32), values[order]


class _SilentHighs(highspy.Highs):
    """HiGHS without output, including the banner printed on construction by version 1.16."""

    def enableCallbacks(self) -> None:
        """Disable output, then enable callbacks. The constructor ends with this call, and would print."""
        self.setOptionValue("output_flag", False)
        super().enableCallbacks()  # type: ignore[no-untyped-call]


class Solver:
    """Linear program: minimize ``cost @ x`` for variables x >= 0, subject to constraint rows.

    Variable bounds may change and rows may be added between solves. Every solve starts from the last basis,
    the vertex of the previous solution.

    Attributes:
        work: work in all solves, estimated from rows, columns and simplex iterations; see `Effort`.
    """

    def __init__(self, cost: Floats, rows: ProgramRows) -> None:
        self.work = 0
        lower, upper, start, column, value = rows.by_rows()
        self._count = len(cost) + len(lower)
        # Unit of work per solve, see _WORK_PER_SOLVE. Added cuts are not counted.
        self._size = self._count**0.7
        self._num_rows = len(lower)
        self._highs = _SilentHighs()  # type: ignore[no-untyped-call]
        for option, setting in (
            # One thread and a fixed seed: equal inputs give equal plans.
            ("threads", 1),
            ("random_seed", 0),
            ("presolve", "choose"),
            ("simplex_scale_strategy", 2),
            ("simplex_iteration_limit", _LEAST_ITERATIONS + 2 * self._count),
        ):
            self._highs.setOptionValue(option, setting)
        model = highspy.HighsLp()
        model.num_col_, model.num_row_ = len(cost), len(lower)
        model.col_cost_, model.col_lower_ = cost, np.zeros(len(cost))
        model.col_upper_ = np.full(len(cost), INFINITY)
        model.row_lower_, model.row_upper_ = lower, upper
        model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        model.a_matrix_.start_ = np.append(start, len(column)).astype(np.int32)
        model.a_matrix_.index_ = column
        model.a_matrix_.value_ = value
        self._highs.passModel(model)

    def add_rows(self, rows: ProgramRows) -> None:
        """Add constraint rows, keeping the last basis."""
        lower, upper, start, column, value = rows.by_rows()
        self._highs.addRows(len(lower), lower, upper, len(value), start, column, value)

    def set_bounds(self, lower: Floats, upper: Floats) -> None:
        """Replace the lower and upper bounds of all variables."""
        self._highs.changeColsBounds(len(lower), np.arange(len(lower), dtype=np.int32), lower, upper)

    def set_added_row(self, index: int, upper: float) -> None:
        """Replace the upper limit of a row that was added after construction.

        Args:
            upper: new upper limit; infinity disables the row.
        """
        self._highs.changeRowBounds(self._num_rows + index, -INFINITY, min(upper, INFINITY))

    def solve(self) -> Optimum | None:
        """Solve the program.

        Returns:
            The optimum, or None if the program is infeasible. HiGHS may prove neither if values are
            numerically close. Then the variables are zeros, and the objective is `-INFINITY`, which is a
            valid lower bound.
        """
        self._run()
        if self._status not in _SETTLED:
            # Drops the basis, to solve again from scratch with presolve.
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
        # Neither optimal nor infeasible: the caller gets a bound that is certainly valid.
        none = np.zeros(self._highs.getNumCol())
        return Optimum(-INFINITY, none, none)

    @property
    def _status(self) -> highspy.HighsModelStatus:
        """Outcome of the last solve, such as optimal or infeasible."""
        return self._highs.getModelStatus()

    def _run(self) -> None:
        """Run HiGHS once, and add the estimated work to `work`."""
        self._highs.run()
        iterations = max(int(self._highs.getInfo().simplex_iteration_count), 0)
        self.work += int(self._size * (_WORK_PER_SOLVE + _WORK_PER_ITERATION * iterations))
