"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Anytime and deterministic: effort is counted in work, so the result depends on the input and on `max_work`
alone, unless the clock runs out first.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import Effort, Search
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_BRANCHES = 8
"""Branches between attempts at better plans."""
_STARTS = 4
"""Attempts between branches."""
_LEAST_SECONDS = 1e-12


class Way(NamedTuple):
    """A set of collectives: the candidates that need no other, and the latencies of these."""

    allowed_C: Bools
    fixed_seconds: float


class Solution(NamedTuple):
    """The best plan found (no parts: none), and what no plan can beat; both with latencies."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    work: int
    num_boxes: int


def solve(problem: Problem, ways: Sequence[Way], effort: Effort, *, cutoff: float = np.inf) -> Solution:
    """The best plan that goes one of the `ways`. Where none was found that fits into memory, it has no parts;
    where it is proven that there is none, the bound is infinite.

    `cutoff`: seconds of a plan that is known already: the search ends once it is proven that there is none
    faster.
    """
    deadline = time.perf_counter() + effort.time_limit
    contest = _Contest(problem, ways, effort, cutoff, deadline)
    contest.start()
    while contest.step():
        pass
    return contest.solution()


class _Entrant:
    """A way with its search for plans and its bound (none before it is worth one)."""

    def __init__(self, problem: Problem, way: Way, effort: Effort, deadline: float) -> None:
        self.way = way
        self.search = Search(problem, way.allowed_C, effort, deadline)
        scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
        self._coarse = LowerBound(problem, way.allowed_C, scale, coarse=True)
        self.root = self._coarse.best_box
        self._problem = problem
        self._bound: LowerBound | None = None
        self.tried: set[bytes] = set()
        self.is_done = False

    @property
    def seconds(self) -> float:
        """The best plan's, with latencies."""
        return self.search.seconds + self.way.fixed_seconds

    @property
    def value(self) -> float:
        """The bound, with latencies."""
        coarse = self._coarse.value + self.way.fixed_seconds
        return coarse if self._bound is None else max(coarse, self._bound.value + self.way.fixed_seconds)

    @property
    def num_boxes(self) -> int:
        """Relaxations solved."""
        return self._coarse.num_solves + (0 if self._bound is None else self._bound.num_solves)

    def bound(self, known: float) -> LowerBound:
        """The bound, told of a plan that takes `known` seconds with latencies."""
        seconds = max(known - self.way.fixed_seconds, _LEAST_SECONDS)
        if self._bound is None:
            self._bound = LowerBound(self._problem, self.way.allowed_C, seconds)
        self._bound.improve(seconds)
        return self._bound


class _Contest:
    """All ways, the one with the lowest bound next."""

    def __init__(
        self, problem: Problem, ways: Sequence[Way], effort: Effort, cutoff: float, deadline: float
    ) -> None:
        self._entrants = [_Entrant(problem, way, effort, deadline) for way in ways]
        self._effort = effort
        self._cutoff = cutoff
        self._deadline = deadline
        self._branch_work = 0

    @property
    def known(self) -> float:
        """Seconds of the best plan, with latencies."""
        return min(self._cutoff, *(entrant.seconds for entrant in self._entrants))

    @property
    def value(self) -> float:
        """Seconds that no plan can beat."""
        return min(entrant.value for entrant in self._entrants)

    @property
    def _work(self) -> int:
        return self._branch_work + sum(entrant.search.work for entrant in self._entrants)

    @property
    def _is_spent(self) -> bool:
        return self._work >= self._effort.max_work or time.perf_counter() >= self._deadline

    @property
    def _is_proven(self) -> bool:
        return self.known - self.value <= self._effort.gap * self.known

    def start(self) -> None:
        """A first plan of each way that can be better than the others'."""
        for entrant in sorted(self._entrants, key=lambda entrant: entrant.value):
            if (
                entrant.root is None
                or (entrant.value >= self.known)
                or (self._is_spent and self.known < np.inf)
            ):
                continue
            entrant.search.construct_from(entrant.root, entrant.way.allowed_C)
            if not self._is_spent:
                entrant.search.start_from(entrant.root, entrant.way.allowed_C)

    def step(self) -> bool:
        """One piece of work; False when there is nothing to do, or no time to do it."""
        if self.known == np.inf or self._is_proven or self._is_spent:
            return False
        entrant = min(self._entrants, key=lambda entrant: entrant.value)
        if not entrant.is_done:
            bound = entrant.bound(self.known)
            for _ in range(_BRANCHES):
                if self._is_proven or self._is_spent:
                    return False
                if not bound.branch():
                    entrant.is_done = True
                    break
                self._branch_work += bound.work
            if self._start_from_boxes(entrant, bound):
                return True
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        if best.search.parts_T:
            best.search.refine()
        return bool(best.search.parts_T) or not entrant.is_done

    def _start_from_boxes(self, entrant: _Entrant, bound: LowerBound) -> bool:
        """Plans with the splits of the lowest boxes, those that have not been tried; whether there were
        any."""
        num_starts = 0
        for box in bound.boxes(4 * _BRANCHES):
            key = np.rint(box.share_C).astype(np.int32).tobytes()
            if key not in entrant.tried and num_starts < _STARTS and not self._is_spent:
                entrant.tried.add(key)
                entrant.search.start_from(box, bound.allowed(box))
                num_starts += 1
        return num_starts > 0

    def solution(self) -> Solution:
        """The best plan and the bound."""
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        bound = min(self.value, best.seconds)
        boxes = sum(entrant.num_boxes for entrant in self._entrants)
        return Solution(best.search.parts_T, best.seconds, bound, self._work, boxes)
