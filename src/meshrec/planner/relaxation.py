"""Relaxation of the planning problem in a box lower <= T <= upper of the slowest ranks' loads T.

T_k is at least the mean load, which is linear in the number of tables per candidate. Cuts add constraints on
whole pieces (see `cuts`). A type of identical tables has a variable per candidate, and ranks need no
variables, so the program is small for any cluster. Candidates with a piece above `upper` are excluded.
"""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.cuts import Cut, LargestPieces, Rounding
from meshrec.planner.highs import INFINITY, Optimum, ProgramRows, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats

_MARGIN = 1e-6
"""Optimum tolerance."""
_USED = 1e-7
_LEAST_GAIN, _MOST_CUTS = 1e-4, 3000
"""Minimum gain for another round of cuts, and maximum cut count; beyond that, programs grow too large.
"""


class Box(NamedTuple):
    """Relaxation optimum: no plan in the box costs less than `bound`.

    Attributes:
        bound: optimum.
        share_C: tables per candidate before cuts, because plans start better from there.
        slowest_K: T at the optimum, each phase's time on the slowest rank.
        cut_at_K: values at which to split T to bring the relaxation closer to a plan; T where no split is
            needed.
        lower_K: lower limits on T in this box.
        upper_K: upper limits on T in this box.
        admitted_C: candidates which plans in the box can use within the cutoff.
    """

    bound: float
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats
    lower_K: Floats
    upper_K: Floats
    admitted_C: Bools


class Relaxation:
    """The relaxation's linear program and cuts.

    T is at least the mean load per phase, and the largest piece used by any table. Loads are in units of
    `scale` seconds. No cuts are added after `deadline`, a ``time.perf_counter`` time.
    """

    def __init__(self, problem: Problem, scale: float, deadline: float = INFINITY) -> None:
        self._deadline = deadline
        self._largest_CK = problem.largest_load_CK() / scale
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        num_phases = problem.load_PK.shape[1]
        self._cost = np.concatenate((problem.common_C / scale, np.ones(num_phases)))
        self._rows = _rows(problem, scale)
        self._solver = Solver(self._cost, self._rows)
        self._rounding = Rounding(problem, scale)
        self._largest = LargestPieces(problem, scale)
        self._cuts: list[Cut] = []
        self._earlier_work = 0

    @property
    def work(self) -> int:
        """Work in all solves; see `Effort`."""
        return self._earlier_work + self._solver.work

    def solve(
        self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float, rounds: int
    ) -> Box | None:
        """Return the optimum over plans in a box, or None if there are none within the cutoff.

        Args:
            lower_K: lower limits on T.
            upper_K: upper limits on T.
            admitted_C: allowed candidates.
            cutoff: maximum cost.
            rounds: maximum cut rounds.
        """
        if len(self._cuts) > _MOST_CUTS:
            self._earlier_work += self._solver.work
            # Start over without cuts, because the program has grown too large.
            self._solver, self._cuts = Solver(self._cost, self._rows), []
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
            before, optimum = optimum.objective, self._solver.solve()
            if optimum is not None and optimum.objective < before * (1 + _LEAST_GAIN):
                break
        if optimum is None or first is None or optimum.objective > cutoff + _MARGIN:
            return None
        share_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        # Reduced-cost fixing: using an unused candidate for a whole table raises the objective by at least
        # its reduced cost (Nemhauser & Wolsey, Integer and Combinatorial Optimization,
        # 1988, II.5.2).
        reduced_C = optimum.reduced_costs[: len(share_C)]
        return Box(
            optimum.objective,
            first.x[: len(share_C)],
            slowest_K,
            self._cut_at(share_C, slowest_K),
            lower_K,
            upper_K,
            admitted_C & (optimum.objective + reduced_C <= cutoff + _MARGIN),
        )

    def _add_cuts(self, optimum: Optimum, lower_K: Floats, upper_K: Floats, admitted_C: Bools) -> bool:
        share_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        share_C = np.where(admitted_C, share_C, 0.0)
        cuts = self._rounding.violated(share_C, upper_K, admitted_C)
        cuts += self._largest.violated(share_C, slowest_K, lower_K, admitted_C)
        if cuts:
            rows = ProgramRows()
            for cut in cuts:
                columns = np.append(cut.candidate_N, len(share_C) + cut.phase)
                rows.add(columns, np.append(cut.value_N, cut.slope), -INFINITY, cut.limit)
            self._solver.add_rows(rows)
        self._cuts += cuts
        return bool(cuts)

    def _cut_at(self, share_C: Floats, slowest_K: Floats) -> Floats:
        """Return the median used piece size for pieces larger than T."""
        cut_at_K = slowest_K.copy()
        for phase in range(len(slowest_K)):
            sizes = np.unique(self._largest_CK[share_C > _USED, phase])
            above = sizes[sizes > slowest_K[phase] + 1e-6]
            if len(above):
                cut_at_K[phase] = above[len(above) // 2]
        return cut_at_K


def _rows(problem: Problem, scale: float) -> ProgramRows:
    """Build the program rows: tables per type, mean loads, memory.

    Variables: tables per candidate [C], and T [K].
    """
    num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
    candidate, phase = np.arange(num_candidates), np.arange(num_phases)
    tables_Y = np.bincount(problem.type_T).astype(np.float64)
    rows = ProgramRows()
    rows.add_many(problem.type_C, candidate, 1.0, tables_Y, tables_Y)
    mean_CK = problem.mean_load_CK() / scale
    rows.add_many(
        np.append(np.tile(phase, num_candidates), phase),
        np.append(np.repeat(candidate, num_phases), num_candidates + phase),
        np.append(mean_CK.ravel(), -np.ones(num_phases)),
        np.full(num_phases, -INFINITY),
        np.zeros(num_phases),
    )
    rows.add(candidate, problem.mean_bytes_C() / problem.memory_cap, -INFINITY, 1.0)
    return rows
