"""Relaxations of the planning problem within a box lower <= T <= upper of the slowest ranks' loads T.

T_k is at least the mean load, which is linear in how often each
candidate is chosen; cuts say more of whole pieces (`cuts`, `largest`). Types of identical tables are one
variable per candidate and ranks need no variable at all, so the program is small whatever the cluster.
Candidates with a piece above `upper` are out.
"""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.cuts import Cut, LargestPieces, Rounding
from meshrec.planner.highs import INFINITY, LinearProgram, Optimum, ProgramRows, Solver
from meshrec.planner.problem import Problem
from meshrec.planner.types import Bools, Floats, Ints

_MARGIN = 1e-6
"""What an optimum may be off by."""
_USED = 1e-7
_ROUNDS, _SHRUNK, _DROPPED = 6, 0.5, 0.7
"""Most attempts to narrow a box (one that leaves less than this part of it is worth another); the part of the
candidates that may be left where those that others dominate are dropped."""
_CUT_ROUNDS, _ROOT_CUT_ROUNDS, _LEAST_GAIN, _MOST_CUTS = 8, 3, 1e-4, 3000
"""Most attempts to cut a box's optimum off, and that of a root, which plans only begin with; what one has to
gain for another; the cuts that are kept at most: beyond, programs are larger with them than without."""


class Relaxed(NamedTuple):
    """A relaxation's optimum: no plan in the box costs less than `bound`.

    `share_C`: how many tables use each candidate (a root's: before cuts, for plans begin better with what
    they leave out). `slowest_K`: T. `cut_at_K`: where T has to be told apart, below or above, for the
    relaxation to be more like a plan; equal to T where there is nothing to tell.
    `lower_K`, `upper_K`: the part of the box that all plans in it that cost no more than the cutoff are in;
    `admitted_C`: the candidates that such plans can use, or what stands for them in every box within (see
    `dominated`).
    """

    bound: float
    share_C: Floats
    slowest_K: Floats
    cut_at_K: Floats
    lower_K: Floats
    upper_K: Floats
    admitted_C: Bools


class MeanRelaxation:
    """T is at least the mean load of each phase, and the largest piece of what a single table uses.

    `root`: whether one optimum is all that is wanted, to begin plans with. After `deadline`, of
    `time.perf_counter`, boxes are neither narrowed nor cut any further.
    """

    def __init__(
        self,
        problem: Problem,
        allowed_C: Bools,
        scale: float,
        *,
        root: bool = False,
        rounding: Rounding | None = None,
        deadline: float = INFINITY,
    ) -> None:
        self._work = 0
        self._deadline = deadline
        self._problem, self._scale = problem, scale
        self._largest_CK = problem.largest_load_CK() / scale
        self._tables_C = np.bincount(problem.type_T)[problem.type_C].astype(np.float64)
        self._num_phases = problem.load_PK.shape[1]
        self._cost = np.concatenate((problem.common_C / scale, np.ones(self._num_phases)))
        self._is_root = root
        self._rounds = 0 if root else _ROUNDS
        self._is_derived = rounding is not None
        self._linear = _program(problem, scale, self._cost)
        self._solver = Solver(self._linear, devex=self._is_derived)
        self._rounding = Rounding(problem, scale) if rounding is None else rounding
        self._largest = LargestPieces(problem, scale)
        self._cuts: list[Cut] = []
        self._undominated: _Undominated | None = None

    @property
    def work(self) -> int:
        """What the solutions have cost so far; see `Effort`."""
        return self._work + (0 if self._undominated is None else self._undominated.relaxation.work)

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() >= self._deadline

    def solve(self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float) -> Relaxed | None:
        """The optimum over plans of the candidates `admitted_C` with lower <= T <= upper that cost `cutoff`
        at most; None where there are none. The first box is narrowed, and others have to be within it."""
        if len(self._cuts) > _MOST_CUTS:
            self._solver, self._cuts = Solver(self._linear, devex=self._is_derived), []
        if self._undominated is not None and self._undominated.serves(lower_K, admitted_C):
            return self._undominated.solve(lower_K, upper_K, admitted_C, cutoff)
        before = self._solver.work
        relaxed = self._solve(lower_K, upper_K, admitted_C, cutoff)
        rounds, self._rounds = self._rounds, 0
        if rounds and not self._is_derived:
            relaxed = self._narrowed_often(relaxed, cutoff, 1)
            if relaxed is not None and not self._is_late:
                self._undominated = self._without_dominated(relaxed)
                if self._undominated is not None:
                    limits = (relaxed.lower_K, relaxed.upper_K, relaxed.admitted_C)
                    better = self._undominated.solve(*limits, cutoff)
                    relaxed = better and better._replace(bound=max(relaxed.bound, better.bound))
                    rounds = 0
        relaxed = self._narrowed_often(relaxed, cutoff, rounds)
        self._work += self._solver.work - before
        return relaxed

    def _narrowed_often(self, relaxed: Relaxed | None, cutoff: float, rounds: int) -> Relaxed | None:
        for _ in range(rounds):
            if relaxed is None or self._is_late:
                break
            before_K = _freedom(relaxed)
            wide = before_K > _MARGIN
            relaxed = self._solve(*self._narrowed(relaxed), cutoff)
            if relaxed is None or (_freedom(relaxed)[wide] / before_K[wide]).prod() > _SHRUNK:
                break
        return relaxed

    def _without_dominated(self, relaxed: Relaxed) -> "_Undominated | None":
        """The program of the candidates that are left in a box, and in all boxes within; None where most
        are."""
        stands_C = representatives(self._problem, relaxed.lower_K * self._scale, relaxed.admitted_C)
        keep_C = stands_C == np.arange(len(stands_C))
        if keep_C.sum() >= _DROPPED * relaxed.admitted_C.sum():
            return None
        problem = restricted(self._problem, keep_C)
        rounding = self._rounding.restricted(stands_C)
        everything = np.ones(int(keep_C.sum()), bool)
        relaxation = MeanRelaxation(
            problem, everything, self._scale, rounding=rounding, deadline=self._deadline
        )
        return _Undominated(relaxation, relaxed.lower_K, relaxed.admitted_C, keep_C)

    def _bounds(self, lower_K: Floats, upper_K: Floats, admitted_C: Bools) -> tuple[Floats, Floats]:
        most_C = np.where(admitted_C, self._tables_C, 0.0)
        return np.concatenate((0 * most_C, lower_K)), np.concatenate((most_C, upper_K))

    def _solve(self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float) -> Relaxed | None:
        admitted_C = (self._largest_CK <= upper_K * (1 + 1e-9)).all(axis=1) & admitted_C
        self._solver.set_bounds(*self._bounds(lower_K, upper_K, admitted_C))
        self._solver.set_cost(self._cost)
        self._solver.set_last_row(cutoff)
        self._set_cuts(lower_K, upper_K)
        optimum = first = self._solver.solve()
        for _ in range(_ROOT_CUT_ROUNDS if self._is_root else _CUT_ROUNDS):
            if optimum is None or self._is_late or not self._add_cuts(optimum, lower_K, upper_K, admitted_C):
                break
            before, optimum = optimum.objective, self._solver.solve()
            if optimum is not None and optimum.objective < before * (1 + _LEAST_GAIN):
                break
        if optimum is None:
            return None
        share_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        cut_at_K = self._cut_at(share_C, slowest_K)
        admitted_C &= self._within(optimum, cutoff)
        if self._is_root and first is not None:
            share_C = first.x[: len(self._tables_C)]
        limits = (lower_K, upper_K, admitted_C)
        return Relaxed(optimum.objective, share_C, slowest_K, cut_at_K, *limits)

    def _set_cuts(self, lower_K: Floats, upper_K: Floats) -> None:
        """Only cuts that hold in the box count."""
        for index, cut in enumerate(self._cuts):
            self._solver.set_added_row(index, cut.limit if cut.holds(lower_K, upper_K) else INFINITY)

    def _add_cuts(self, optimum: Optimum, lower_K: Floats, upper_K: Floats, admitted_C: Bools) -> bool:
        share_C, slowest_K = np.split(optimum.x, [len(self._tables_C)])
        share_C = np.where(admitted_C, share_C, 0.0)
        found = self._rounding.violated(share_C, upper_K, admitted_C)
        found += self._largest.violated(share_C, slowest_K, lower_K, admitted_C)
        if found:
            rows = ProgramRows(len(self._cost))
            for cut in found:
                columns = np.append(cut.candidate_N, len(share_C) + cut.phase)
                rows.add(columns, np.append(cut.value_N, cut.slope), -INFINITY, cut.limit)
            self._solver.add_rows(rows)
        self._cuts += found
        return bool(found)

    def _narrowed(self, relaxed: Relaxed) -> tuple[Floats, Floats, Bools]:
        """The least and the largest T, phase by phase, of the solutions within the limits that are set, and
        the candidates that are left."""
        lower_K, upper_K, admitted_C = relaxed.lower_K.copy(), relaxed.upper_K.copy(), relaxed.admitted_C
        for phase in np.flatnonzero(upper_K - lower_K > 10 * _MARGIN):
            if self._is_late:
                break
            cost = np.zeros(len(self._cost))
            for sign, limit_K in ((1.0, upper_K), (-1.0, -lower_K)):
                cost[len(self._tables_C) + phase] = sign
                self._solver.set_cost(cost)
                optimum = self._solver.solve()
                if optimum is None:
                    continue
                admitted_C = admitted_C & self._within(optimum, float(limit_K[phase]))
                if sign > 0:
                    lower_K[phase] = max(lower_K[phase], optimum.objective - _MARGIN)
                else:
                    upper_K[phase] = min(upper_K[phase], _MARGIN - optimum.objective)
        return lower_K, upper_K, admitted_C

    def _within(self, optimum: Optimum, most: float) -> Bools:
        """Reduced-cost fixing: the candidates [C] that a table can use while the objective is `most` or less.

        A whole table more of a candidate that the optimum does not use raises the objective by its reduced
        cost at least (Nemhauser & Wolsey, Integer and Combinatorial Optimization, 1988, II.5.2).
        """
        reduced_C = optimum.reduced_costs[: len(self._tables_C)]
        return np.asarray(optimum.objective + reduced_C <= most + _MARGIN)

    def _cut_at(self, share_C: Floats, slowest_K: Floats) -> Floats:
        """The median size of the pieces in use that are larger than T."""
        cut_at_K = slowest_K.copy()
        for phase in range(self._num_phases):
            sizes = np.unique(self._largest_CK[share_C > _USED, phase])
            above = sizes[sizes > slowest_K[phase] + 1e-6]
            if len(above):
                cut_at_K[phase] = above[len(above) // 2]
        return cut_at_K


class _Undominated(NamedTuple):
    """The relaxation of the candidates `keep_C`, which stand for `admitted_C` where T is above `floor`."""

    relaxation: MeanRelaxation
    floor_K: Floats
    admitted_C: Bools
    keep_C: Bools

    def serves(self, lower_K: Floats, admitted_C: Bools) -> bool:
        """Whether a box is one of those."""
        return bool((lower_K >= self.floor_K).all() and not (admitted_C & ~self.admitted_C).any())

    def solve(self, lower_K: Floats, upper_K: Floats, admitted_C: Bools, cutoff: float) -> Relaxed | None:
        """See `MeanRelaxation.solve`."""
        relaxed = self.relaxation.solve(lower_K, upper_K, admitted_C[self.keep_C], cutoff)
        if relaxed is None:
            return None
        share_C, admitted_C = np.zeros(len(self.keep_C)), np.zeros(len(self.keep_C), bool)
        share_C[self.keep_C], admitted_C[self.keep_C] = relaxed.share_C, relaxed.admitted_C
        return relaxed._replace(share_C=share_C, admitted_C=admitted_C)


def _freedom(relaxed: Relaxed) -> Floats:
    return relaxed.upper_K - relaxed.lower_K


def _program(problem: Problem, scale: float, cost: Floats) -> LinearProgram:
    """Variables: how many tables use each candidate [C], and T [K]. Rows: each type's tables, mean loads,
    memory, cost."""
    num_candidates, num_phases = len(problem.type_C), problem.load_PK.shape[1]
    candidate, phase = np.arange(num_candidates), np.arange(num_phases)
    tables_Y = np.bincount(problem.type_T).astype(np.float64)
    rows = ProgramRows(num_candidates + num_phases)
    rows.add_each(problem.type_C, candidate, 1.0, tables_Y, tables_Y)
    slowest = num_candidates + phase
    mean_CK = problem.mean_load_CK() / scale
    rows.add_each(
        np.append(np.tile(phase, num_candidates), phase),
        np.append(np.repeat(candidate, num_phases), slowest),
        np.append(mean_CK.ravel(), -np.ones(num_phases)),
        np.full(num_phases, -INFINITY),
        np.zeros(num_phases),
    )
    rows.add(candidate, problem.mean_bytes_C() / problem.memory_cap, -INFINITY, 1.0)
    rows.add(np.arange(len(cost)), cost, -INFINITY, INFINITY)
    return rows.program(cost, np.zeros(len(cost)), np.full(len(cost), INFINITY))


def representatives(problem: Problem, floor_K: Floats, admitted_C: Bools) -> Ints:
    """The candidate [C] that stands for each of those that are admitted, itself where none dominates it (the
    others: -1), where T is above `floor_K` seconds.

    A candidate that adds as much as another one of its type to every mean load, to what all ranks pay and to
    memory, and has pieces as large above the floor, is *dominated*: whatever rows on means and largest pieces
    hold with it hold with the other one in its place. Pieces below the floor are all alike, so that few ways
    to split a table are left of many.
    """
    above_CK = np.maximum(problem.largest_load_CK() - floor_K, 0.0)
    price_CN = np.column_stack(
        (problem.mean_load_CK(), above_CK, problem.common_C, problem.mean_bytes_C() / problem.memory_cap)
    )
    stands_C = np.full(len(problem.type_C), -1, np.int64)
    some = np.flatnonzero(admitted_C)
    # Who dominates costs less, or as much, in all.
    some = some[np.lexsort((price_CN[some].sum(axis=1), problem.type_C[some]))]
    for mine in np.split(some, np.flatnonzero(np.diff(problem.type_C[some])) + 1):
        price_MN = price_CN[mine]
        is_better = np.triu((price_MN[:, None] <= price_MN).all(axis=2))
        stands_C[mine] = mine[is_better.argmax(axis=0)]
    return stands_C


def restricted(problem: Problem, keep_C: Bools) -> Problem:
    """The problem of the candidates `keep_C` alone."""
    keep_P = keep_C[problem.candidate_P]
    place_C = np.cumsum(keep_C) - 1
    candidate_P = place_C[problem.candidate_P[keep_P]]
    by_candidate = {
        name: getattr(problem, name)[keep_C]
        for name in ("type_C", "common_C", "common_bytes_C", "sharded_C", "row_stats_C")
    }
    by_piece = {
        name: getattr(problem, name)[keep_P]
        for name in (
            *("count_P", "load_PK", "fixed_PK", "bytes_P", "fixed_bytes_P"),
            *("width_P", "rows_P"),
        )
    }
    return problem._replace(
        layouts_C=[layout for layout, keeps in zip(problem.layouts_C, keep_C, strict=True) if keeps],
        piece_start_C=np.searchsorted(candidate_P, np.arange(int(keep_C.sum()) + 1)),
        candidate_P=candidate_P,
        **by_candidate,
        **by_piece,
    )
