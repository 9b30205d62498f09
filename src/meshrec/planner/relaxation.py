"""Linear relaxation of the planning problem, whose optimum is a lower bound on the step time.

The variables are the table count per candidate (`num_tables_C`, fractional) and T_k, the slowest rank's load
in phase k. The program minimizes the sum of T_k plus common costs. T_k is at least the mean load, which is
linear in `num_tables_C`. Cutting planes add constraints on whole pieces (see ``cuts.py``). A type of
identical tables has a variable per candidate, and ranks need no variables, so the program is small for any
cluster.

The program is solved in a box, lower <= T <= upper, where candidates with a piece above `upper` are excluded.
Branch and bound over boxes is in ``bound.py``.
"""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.cuts import Cut, LargestPieces, Rounding
from meshrec.planner.highs import INFINITY, Optimum, ProgramRows, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

# Tolerance when the optimum is compared with the cutoff.
_MARGIN = 1e-6
# Number of tables per candidate above which the relaxation uses the candidate.
_USED = 1e-7
# Minimum relative gain in the objective for another round of cuts, and the number of cuts above which all
# are removed. Every cut makes the program larger, and so slower to solve.
_LEAST_GAIN, _MOST_CUTS = 1e-4, 3000


class Box(NamedTuple):
    """Range of T, the slowest rank's load per phase, and the relaxation's optimum within this range.

    Loads are in units of `Relaxation`'s scale.

    Attributes:
        bound: objective of the optimum. No plan with T in this box has a shorter step time.
        num_tables_C: tables per candidate, fractional, in the optimum before cutting planes ("cuts") are
            added. Rounding this optimum gives better plans than rounding the optimum after cuts.
        slowest_K: T in the optimum.
        cut_at_K: value of T at which to split the box, so that the relaxation comes closer to a plan. Equal
            to `slowest_K` in phases where no split is needed.
        lower_K: lower limits on T in this box.
        upper_K: upper limits on T in this box.
        admitted_C: whether a candidate (a way to split a table) may be part of a plan in this box that is
            within the cutoff.
    """

    bound: float
    num_tables_C: Floats
    slowest_K: Floats
    cut_at_K: Floats
    lower_K: Floats
    upper_K: Floats
    admitted_C: Bools


class Relaxation:
    """Linear relaxation of the planning problem, with the cutting planes found so far.

    Branch and bound solves it repeatedly, with different limits on the load in every phase (a `Box`).

    Args:
        scale: all loads are divided by this number of seconds.
        deadline: ``time.perf_counter`` time after which no cuts are added.
    """

    def __init__(self, problem: Problem, scale: float, deadline: float = INFINITY) -> None:
        self._deadline = deadline
        self._largest_CK = problem.largest_load_CK() / scale
        # Upper limits: a candidate can be used by all tables of its type.
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        num_phases = problem.load_PK.shape[1]
        # The objective: common seconds per table, and T_k per phase.
        self._cost = np.concatenate((problem.common_cost_C / scale, np.ones(num_phases)))
        self._rows = _constraints(problem, scale)
        # Replaced by a solver without cuts whenever these have become too many. `_earlier_work` keeps the
        # work of the replaced ones.
        self._solver = Solver(self._cost, self._rows)
        # Two families of cuts, see cuts.py.
        self._rounding = Rounding(problem, scale)
        self._largest = LargestPieces(problem, scale)
        # In the order in which they were added to the solver.
        self._cuts: list[Cut] = []
        # Work of solvers that were replaced because they had too many cuts.
        self._earlier_work = 0

    @property
    def work(self) -> int:
        """Work in all solves, in touched array elements; see `Effort`."""
        return self._earlier_work + self._solver.work

    def solve(
        self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float, rounds: int
    ) -> Box | None:
        """Solve the relaxation in a box, adding cutting planes as long as they raise the optimum.

        Args:
            cutoff: maximum step time, in units of the scale.
            rounds: maximum number of times that cuts are added.

        Returns:
            The box with its optimum, or None if no plan in the box is within the cutoff.
        """
        if len(self._cuts) > _MOST_CUTS:
            self._earlier_work += self._solver.work
            # Start over without cuts, because the program has grown too large.
            self._solver, self._cuts = Solver(self._cost, self._rows), []
        # A plan with a piece above the upper limit is not in this box.
        admitted_C = (self._largest_CK <= upper_K * (1 + 1e-9)).all(axis=1) & admitted_C
        most_C = np.where(admitted_C, self._tables_C, 0.0)
        self._solver.set_bounds(np.append(0 * most_C, lower_K), np.append(most_C, upper_K))
        for index, cut in enumerate(self._cuts):
            # Cuts are kept for later boxes, and disabled where they are not valid.
            self._solver.set_added_row(index, cut.limit if cut.holds(lower_K, upper_K) else INFINITY)
        # Plans start from the optimum before cuts; the bound uses the optimum after them.
        optimum = first = self._solver.solve()
        for _ in range(rounds):
            is_late = time.perf_counter() >= self._deadline
            if optimum is None or is_late or not self._add_cuts(optimum, lower_K, upper_K, admitted_C):
                break
            # Stop when a round of cuts gains little: every round makes the program larger for all later
            # boxes.
            before, optimum = optimum.objective, self._solver.solve()
            if optimum is not None and optimum.objective < before * (1 + _LEAST_GAIN):
                break
        if optimum is None or first is None or optimum.objective > cutoff + _MARGIN:
            return None
        num_tables_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        # Reduced-cost fixing: using an unused candidate for a whole table raises the objective by at least
        # its reduced cost (Nemhauser & Wolsey, Integer and Combinatorial Optimization,
        # 1988, II.5.2).
        reduced_C = optimum.reduced_costs[: len(num_tables_C)]
        return Box(
            optimum.objective,
            first.x[: len(num_tables_C)],
            slowest_K,
            self._cut_at(num_tables_C, slowest_K),
            lower_K,
            upper_K,
            admitted_C & (optimum.objective + reduced_C <= cutoff + _MARGIN),
        )

    def _add_cuts(self, optimum: Optimum, lower_K: Floats, upper_K: Floats, admitted_C: Bools) -> bool:
        """Add cutting planes which the optimum violates, and which are valid for all plans in the box.

        Returns:
            Whether any cutting plane was added.
        """
        num_tables_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        num_tables_C = np.where(admitted_C, num_tables_C, 0.0)
        cuts = self._rounding.violated(num_tables_C, upper_K, admitted_C)
        cuts += self._largest.violated(num_tables_C, slowest_K, lower_K, admitted_C)
        if cuts:
            rows = ProgramRows()
            for cut in cuts:
                # Variables of the linear program: first the tables per candidate, then T per phase.
                columns = np.append(cut.candidate_N, len(num_tables_C) + cut.phase)
                rows.add(columns, np.append(cut.value_N, cut.slope), -INFINITY, cut.limit)
            self._solver.add_rows(rows)
        self._cuts += cuts
        return bool(cuts)

    def _cut_at(self, num_tables_C: Floats, slowest_K: Floats) -> Floats:
        """Return for every phase the value of T, the slowest rank's load, at which to split the box [K].

        The relaxation may use candidates with pieces larger than T, which no plan can do. The result is then
        the median size of such pieces. Otherwise, the result is T.
        """
        cut_at_K = slowest_K.copy()
        for phase in range(len(slowest_K)):
            sizes = np.unique(self._largest_CK[num_tables_C > _USED, phase])
            # Loads are scaled, so this tolerance covers the linear program's rounding errors.
            above = sizes[sizes > slowest_K[phase] + 1e-6]
            if len(above):
                cut_at_K[phase] = above[len(above) // 2]
        return cut_at_K


def _constraints(problem: Problem, scale: float) -> ProgramRows:
    """Return the linear program's constraints, without cutting planes.

    The variables are the table count per candidate [C], followed by T, the slowest rank's load per phase [K].
    The constraints are: every table uses a candidate, T is at least the mean load, and the mean memory is
    within the cap.
    """
    num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
    candidate, phase = np.arange(num_candidates), np.arange(num_phases)
    tables_Y = np.bincount(problem.type_T).astype(np.float64)
    rows = ProgramRows()
    # Every table of a type uses exactly one candidate.
    rows.add_many(problem.type_C, candidate, 1.0, tables_Y, tables_Y)
    # T_k is at least the mean load in phase k. HiGHS takes coefficients up to 1e-9 for 0, so loads are
    # divided by `scale`, and bytes by the cap (findings/highs_drops_small_coefficients.sh). A dropped
    # coefficient relaxes its row.
    mean_CK = problem.mean_load_CK() / scale
    rows.add_many(
        np.append(np.tile(phase, num_candidates), phase),
        np.append(np.repeat(candidate, num_phases), num_candidates + phase),
        np.append(mean_CK.ravel(), -np.ones(num_phases)),
        np.full(num_phases, -INFINITY),
        np.zeros(num_phases),
    )
    # Only the mean memory is limited, because ranks have no variables. Whether each rank fits is checked when
    # plans are constructed.
    rows.add(candidate, problem.mean_bytes_C() / problem.memory_cap, -INFINITY, 1.0)
    return rows
