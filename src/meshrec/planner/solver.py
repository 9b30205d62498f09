"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Anytime and deterministic: effort is counted in work, so the result depends on the input and on `max_work`
alone, unless the clock runs out first.
"""

import itertools
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import Box, LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import FEW_CANDIDATES, MOST_CANDIDATES
from meshrec.planner.search import Effort, Search
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_SEARCH = ((500, 0.25), (MOST_CANDIDATES, 0.35), (np.inf, 0.1))
"""Up to how many candidates, which part of the work goes to better plans, once there is one: more where they
are many, for there the first plans are far from the best; less again where the first one takes long."""
_STARTS = 32
"""The most boxes that wait to be started from."""
_GAPS = (
    *(0.2, 0.1, 0.08, 0.06, 0.05, 0.04, 0.03, 0.025, 0.022, 0.02, 0.018, 0.016, 0.0145, 0.013, 0.0115, 0.01),
    *(0.007, 0.005, 0.003, 0.002, 0.001),
)
"""Goals of the bound, one after the other: how far below the best known plan."""
_SAFELY = 0.99
_NEAR, _NEXT, _NEXT_WHEN_NEAR = 0.035, 0.8, 0.9
"""A goal is a part of the gap before it; a larger one from where goals become dear."""
_STEPS = ((MOST_CANDIDATES, 0.3), (np.inf, 0.57))
"""Where candidates are many, up to how many: which part of the way to the best known plan a goal is. A first
box narrowed to what a near goal leaves proves it; one of a far goal takes long and proves little. Where they
are very many boxes are split rather than narrowed, and the best of them rise as fast for a far goal."""
_LEAST_SECONDS = 1e-12
_EARLY_WORK, _EARLY = 3e7, 0.1
"""The most work, and part of all work, that goes to better plans before the bound."""
_ALIKE_STARTS = 16
"""How many more plans begin with pieces that are alike, unless the first one is far from those known."""
_CLOSE = 1.05
_FEW_TABLES = 5
"""On a rank: then it matters which pieces fit beside each other, and plans begin with small ones, too."""


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
        self.is_large = len(way.allowed_C) > MOST_CANDIDATES
        self.bound: LowerBound | None = None
        self._proven, self._num_proven = -np.inf, 0
        self._deadline, self._longest = deadline, 0.0
        self._work = 0
        self._num_solves = 0
        self.starts: deque[tuple[Box, Bools]] = deque(maxlen=_STARTS)
        self._tried: set[bytes] = set()
        self.is_done = False

    @property
    def seconds(self) -> float:
        """The best plan's, with latencies."""
        return self.search.seconds + self.way.fixed_seconds

    @property
    def value(self) -> float:
        """The bound, with latencies."""
        return max(self._coarse.value + self.way.fixed_seconds, self._proven, self._reached)

    @property
    def _reached(self) -> float:
        return -np.inf if self.bound is None else self.bound.value + self.way.fixed_seconds

    @property
    def num_boxes(self) -> int:
        """Relaxations solved."""
        return self._coarse.num_solves + self._num_solves + (self.bound.num_solves if self.bound else 0)

    @property
    def work(self) -> int:
        """The work on the bound."""
        return self._work + (0 if self.bound is None else self.bound.work)

    @property
    def has_time(self) -> bool:
        """Whether a step as long as the bound's longest one ends in time."""
        return time.perf_counter() + self._longest <= self._deadline

    def start(self, known: float) -> None:
        """First plans, where there can be any: with pieces of all sizes, and with equal or small ones."""
        if self.root is not None and not self.is_large:
            self.search.start_from(self.root, self.way.allowed_C)
        num_tables, num_ranks = len(self._problem.type_T), self._problem.num_ranks
        alike = self._coarse.one_size() if num_tables <= num_ranks else None
        if alike is not None:
            self.search.start_from(alike, alike.admitted_C, short_attempts=1)
            if self.seconds <= _CLOSE * known:
                self.search.start_from(alike, alike.admitted_C, short_attempts=_ALIKE_STARTS)
        elif self.is_large or num_tables <= _FEW_TABLES * num_ranks:
            squeezed = self._coarse.squeezed()
            if squeezed is not None:
                self.search.start_from(squeezed, squeezed.admitted_C)
        if self.root is not None and self.is_large and not self.search.parts_T:
            self.search.start_from(self.root, self.way.allowed_C)

    def improve(self, known: float) -> bool:
        """One step towards the first goal below a plan of `known` seconds (with latencies) that is not proven
        yet; False where there is none."""
        started = time.perf_counter()
        is_worth_more = self._improve(known, self._deadline - started)
        self._longest = max(self._longest, time.perf_counter() - started)
        return is_worth_more

    def _improve(self, known: float, seconds: float) -> bool:
        if self.bound is not None:
            self._note_start(self.bound)
            if self.bound.branch(seconds):
                return True
            if not self.bound.is_proven:
                return False
            self._proven = max(self._proven, self._reached)
            self._num_proven += 1
            self._work, self._num_solves = self.work, self._num_solves + self.bound.num_solves
            self.bound = None
        if self.value >= known:
            return False
        num_candidates = len(self.way.allowed_C)
        if num_candidates > FEW_CANDIDATES:
            step = next(part for most, part in _STEPS if num_candidates <= most)
            goal = self.value + step / (1 + self._num_proven) * (known - self.value)
        else:
            gap = 1 - self.value / known
            gap *= _NEXT if gap > _NEAR else _NEXT_WHEN_NEAR
            goal = known * (1 - _SAFELY * next((least for least in _GAPS if least <= gap), 0.0))
        fixed = self.way.fixed_seconds
        scale = max(known - fixed, _LEAST_SECONDS)
        goal = max(goal - fixed, _LEAST_SECONDS)
        self.bound = LowerBound(self._problem, self.way.allowed_C, scale, goal, deadline=self._deadline)
        return True

    def _note_start(self, bound: LowerBound) -> None:
        """Keeps the best box, where its splits are new, for a plan."""
        if self.is_large:
            return
        box = bound.best_box
        key = b"" if box is None else np.rint(box.share_C).astype(np.int32).tobytes()
        if box is not None and key not in self._tried:
            self._tried.add(key)
            self.starts.append((box, bound.allowed(box)))


class _Contest:
    """All ways, the one with the lowest bound next."""

    def __init__(
        self, problem: Problem, ways: Sequence[Way], effort: Effort, cutoff: float, deadline: float
    ) -> None:
        self._entrants = [_Entrant(problem, way, effort, deadline) for way in ways]
        self._search = next(part for most, part in _SEARCH if len(problem.type_C) <= most)
        self._early_work = min(_EARLY_WORK, _EARLY * effort.max_work)
        self._effort = effort
        self._cutoff = cutoff
        self._deadline = deadline

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
        return self._bound_work + self._search_work

    @property
    def _bound_work(self) -> int:
        return sum(entrant.work for entrant in self._entrants)

    @property
    def _search_work(self) -> int:
        return sum(entrant.search.work for entrant in self._entrants)

    @property
    def _is_spent(self) -> bool:
        return self._work >= self._effort.max_work or time.perf_counter() >= self._deadline

    @property
    def _is_proven(self) -> bool:
        return self.known - self.value <= self._effort.gap * self.known

    def start(self) -> None:
        """A first plan of each way that can be better than the others'."""
        for entrant in sorted(self._entrants, key=lambda entrant: entrant.value):
            if entrant.root is None or entrant.value >= self.known:
                continue
            if self._is_spent and self.known < np.inf:
                break
            entrant.start(self.known)
            if entrant.is_large and entrant.search.parts_T:
                break
        self._explore(self._early_work)
        self._first_work = self._search_work

    def _explore(self, max_work: float) -> None:
        """Many short attempts at better plans, half of them of the best way, half of those not far behind: a
        good plan early makes all goals of the bound better."""
        end = self._search_work + max_work
        for turn in itertools.count():
            close = [e for e in self._entrants if e.search.parts_T and e.seconds < _CLOSE * self.known]
            if not close or self._search_work >= end or self._is_spent or self._is_proven:
                break
            best = min(close, key=lambda entrant: entrant.seconds)
            least_tried = min(close, key=lambda entrant: entrant.search.work)
            (least_tried if turn % 2 else best).search.refine()

    def step(self) -> bool:
        """One piece of work; False when there is nothing to do, or no time to do it."""
        if self.known == np.inf or self._is_proven or self._is_spent:
            return False
        entrant = min(self._entrants, key=lambda entrant: entrant.value)
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        is_bounds_turn = self._bound_work * self._search <= (1 - self._search) * self._late_work
        can_search = bool(entrant.starts) or bool(best.search.parts_T)
        if (is_bounds_turn or not can_search) and not entrant.is_done and entrant.has_time:
            entrant.is_done = not entrant.improve(self.known)
            return True
        if entrant.starts:
            entrant.search.start_from(*entrant.starts.pop())
        elif can_search:
            best.search.refine()
        return can_search

    @property
    def _late_work(self) -> int:
        """The work on better plans after the first ones, and a little more, so that the bound is first."""
        return self._search_work - self._first_work + 1

    def solution(self) -> Solution:
        """The best plan and the bound."""
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        bound = min(self.value, best.seconds)
        boxes = sum(entrant.num_boxes for entrant in self._entrants)
        return Solution(best.search.parts_T, best.seconds, bound, self._work, boxes)
