"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Half of the work goes to plans, half to the bound. Effort is counted in work, so the result depends on the
input and on the effort alone, unless the clock runs out first.

Plans are annealed from several starts in several manners, and nobody knows beforehand which of them suit an
input. So all get a short attempt, the better half of them one that is twice as long, and so on, until one is
left (successive halving: Karnin, Koren & Somekh, Almost Optimal Exploration in Multi-Armed Bandits, 2013).
Then the next round begins, with what the best plan and the bound's boxes have to offer.
"""

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import Box, LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import MANNERS, WORK_PER_SECOND, Effort, Manner, Search, Start
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_ROUND = 0.125
"""The part of the work on plans that the first round of attempts takes; each next one takes twice as much."""
_WORK_PER_TABLE = 2e4
"""Of the shortest attempts: about what it takes to set one up."""
_SQUEEZES = (1.1, 1.4, np.inf)
"""Of a relaxation's T: the largest pieces that plans begin with. What is larger leaves the other ranks idle;
what T may be in the end is not known."""
_ALIKE = 0.0
"""In place of such a factor, where ranks hold few pieces: all are alike."""
_OF_OTHER_WAYS = 2
"""The starts and manners that are tried with other sets of collectives: what is best with one is nearly so
with another."""
_STARTS = 2
"""The boxes of the bound that a round of attempts begins with: those it has come to last."""
_STEP = 0.25
"""The part of the way to the best known plan that each goal of the bound is. A near goal leaves little room,
and narrow boxes are proven soon; but each goal begins anew."""
_LEAST_SECONDS = 1e-12
_FITTING_SECONDS = 5.0
"""To look for any plan that fits, also where the time is up: without one there is no answer."""


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
    contest = _Contest(problem, ways, effort, cutoff, time.perf_counter() + effort.time_limit)
    while contest.step():
        pass
    return contest.solution()


class _Entrant:
    """A way with its search for plans and its bound (none before it is worth one)."""

    def __init__(self, problem: Problem, way: Way, deadline: float) -> None:
        self.fixed_seconds = way.fixed_seconds
        self._allowed_C = way.allowed_C & problem.can_fit_C()
        self.search = Search(problem, self._allowed_C, deadline)
        scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
        has_all = len(np.unique(problem.type_C[self._allowed_C])) == int(problem.type_C[-1]) + 1
        self._coarse = LowerBound(problem, self._allowed_C, scale, coarse=True) if has_all else None
        self._problem = problem
        self._bound: LowerBound | None = None
        self._proven = np.inf if self._coarse is None else self._coarse.value + way.fixed_seconds
        self._work = self._num_solves = 0
        self._deadline, self._longest = deadline, 0.0
        self._boxes: deque[tuple[Box, Bools]] = deque(maxlen=_STARTS)
        self._tried: set[bytes] = set()
        self.is_done = False

    @property
    def seconds(self) -> float:
        """The best plan's, with latencies."""
        return self.search.seconds + self.fixed_seconds

    @property
    def value(self) -> float:
        """The bound, with latencies."""
        reached = -np.inf if self._bound is None else self._bound.value + self.fixed_seconds
        return max(self._proven, reached)

    @property
    def num_candidates(self) -> int:
        """Of the way."""
        return int(np.count_nonzero(self._allowed_C))

    @property
    def num_boxes(self) -> int:
        """Relaxations solved."""
        bounds = [bound for bound in (self._coarse, self._bound) if bound is not None]
        return self._num_solves + sum(bound.num_solves for bound in bounds)

    @property
    def work(self) -> int:
        """The work on the bound."""
        return self._work + (0 if self._bound is None else self._bound.work)

    @property
    def coarse_work(self) -> int:
        """The work on relaxations that plans begin with."""
        return 0 if self._coarse is None else self._coarse.work

    @property
    def has_time(self) -> bool:
        """Whether a step as long as the bound's longest one ends in time."""
        return time.perf_counter() + self._longest <= self._deadline

    def start(self, factor: float) -> Start | None:
        """A plan from the relaxation, with pieces of `factor` times its T at most (0: all alike); None where
        there is none."""
        assert self._coarse is not None
        if not factor:
            box = self._coarse.one_size()
            return None if box is None else self.search.add_start(box, box.admitted_C)
        for leaves_room in (False, True):
            box = self._coarse.squeezed(factor, leaves_room=leaves_room)
            start = None if box is None else self.search.add_start(box, box.admitted_C)
            if start is not None:
                return start
        return None if self.search.parts_T else self.search.add_fitting(0.0)

    def start_from_memory(self) -> Start | None:
        """A plan that spreads memory, looked for with patience."""
        return self.search.add_fitting(_FITTING_SECONDS)

    def start_from_boxes(self) -> list[Start]:
        """Plans from boxes that the bound has come to since."""
        found = [self.search.add_start(*box) for box in self._boxes]
        self._boxes.clear()
        return [start for start in found if start is not None]

    def improve(self, known: float) -> bool:
        """One step towards the first goal below a plan of `known` seconds (with latencies) that is not proven
        yet; False where there is none."""
        started = time.perf_counter()
        is_worth_more = self._improve(known)
        self._longest = max(self._longest, time.perf_counter() - started)
        return is_worth_more

    def _improve(self, known: float) -> bool:
        if self._bound is not None:
            self._note_box(self._bound)
            if self._bound.branch():
                return True
            if not self._bound.is_proven:
                return False
            self._proven = self.value
            self._work, self._num_solves = self.work, self._num_solves + self._bound.num_solves
            self._bound = None
        if self.value >= known:
            return False
        fixed = self.fixed_seconds
        goal = max(self.value + _STEP * (known - self.value) - fixed, _LEAST_SECONDS)
        scale = max(known - fixed, _LEAST_SECONDS)
        self._bound = LowerBound(self._problem, self._allowed_C, scale, goal, deadline=self._deadline)
        return True

    def _note_box(self, bound: LowerBound) -> None:
        """Keeps the best box, where its splits are new, for a plan."""
        box = bound.best_box
        key = b"" if box is None else np.rint(box.share_C).astype(np.int32).tobytes()
        if box is not None and key not in self._tried:
            self._tried.add(key)
            self._boxes.append((box, bound.allowed(box)))


@dataclass(eq=False)
class _Arm:
    """What an attempt begins with, how, and the seconds that its last one reached (with latencies)."""

    entrant: _Entrant
    start: Start
    manner: Manner
    factor: float
    """See `_SQUEEZES`."""
    seconds: float = np.inf

    def attempt(self, work: float) -> None:
        """One more attempt."""
        self.seconds = self.entrant.search.attempt(self.start, self.manner, work) + self.entrant.fixed_seconds


class _Contest:
    """All ways: the bound of the lowest next, attempts at plans of all that can beat the best."""

    def __init__(
        self, problem: Problem, ways: Sequence[Way], effort: Effort, cutoff: float, deadline: float
    ) -> None:
        self._problem = problem
        self._entrants = [_Entrant(problem, way, deadline) for way in ways]
        self._effort, self._cutoff, self._deadline = effort, cutoff, deadline
        self._plan_work = min(effort.max_work, WORK_PER_SECOND * effort.time_limit) / 2
        self._least_work = _WORK_PER_TABLE * len(problem.type_T)
        self._attempts = self._rounds()
        self._has_attempts = True
        self._first_work = np.inf

    @property
    def known(self) -> float:
        """Seconds of the best plan, with latencies."""
        return min(self._cutoff, *(entrant.seconds for entrant in self._entrants))

    @property
    def value(self) -> float:
        """Seconds that no plan can beat."""
        return min(entrant.value for entrant in self._entrants)

    @property
    def _bound_work(self) -> int:
        return sum(entrant.work for entrant in self._entrants)

    @property
    def _search_work(self) -> int:
        return sum(entrant.search.work for entrant in self._entrants)

    @property
    def _is_spent(self) -> bool:
        work = self._bound_work + self._search_work
        return work >= self._effort.max_work or time.perf_counter() >= self._deadline

    @property
    def _is_proven(self) -> bool:
        return self.known - self.value <= self._effort.gap * self.known

    def step(self) -> bool:
        """One piece of work; False when there is nothing to do, or no time to do it."""
        if self.known < np.inf and (self._is_proven or self._is_spent):
            return False
        entrant = min(self._entrants, key=lambda entrant: entrant.value)
        can_prove = self.known < np.inf and not entrant.is_done and entrant.has_time
        is_bounds_turn = self._bound_work <= self._search_work - self._first_work
        if can_prove and (is_bounds_turn or not self._has_attempts):
            entrant.is_done = not entrant.improve(self.known)
            return True
        if self._has_attempts:
            self._has_attempts = next(self._attempts, False)
            return True
        return False

    def _rounds(self) -> Iterator[bool]:
        """Attempts at better plans, one after the other; see above."""
        arms = yield from self._first_arms()
        self._first_work = float(self._search_work)
        work = _ROUND * self._plan_work
        while arms:
            arms = _better_half(arms)
            yield from self._halving(arms, work)
            best = min(self._entrants, key=lambda entrant: entrant.seconds)
            best.search.settle(work / 4)
            yield True
            for entrant in self._entrants:
                if entrant.value < self.known:
                    starts = entrant.start_from_boxes()
                    arms += [_Arm(entrant, start, arms[0].manner, np.inf) for start in starts]
            work *= 2

    def _first_arms(self) -> Generator[bool, None, list[_Arm]]:
        """All starts of the way with the lowest bound in all manners, and the best of these of the other ways
        that may be better than the best plan; each has had its first attempt."""
        arms: list[_Arm] = []
        has_few = len(self._problem.type_T) <= self._problem.num_ranks
        factors = (*_SQUEEZES, _ALIKE) if has_few else _SQUEEZES
        kinds: list[tuple[float, Sequence[Manner]]] = [(factor, MANNERS) for factor in factors]
        for entrant in sorted(self._entrants, key=lambda entrant: entrant.value):
            mine: list[_Arm] = []
            for factor, manners in kinds:
                begun = self._search_work + sum(entrant.coarse_work for entrant in self._entrants)
                is_late = self._is_spent or begun >= 2 * _ROUND * self._plan_work
                if entrant.value >= self.known or (is_late and self.known < np.inf):
                    break
                start = entrant.start(factor)
                for manner in manners:
                    if start is None:
                        break
                    mine.append(_Arm(entrant, start, manner, factor))
                    mine[-1].attempt(self._least_work)
                    yield True
            arms += mine
            best = _better_half(arms)[:_OF_OTHER_WAYS]
            kinds = [(arm.factor, (arm.manner,)) for arm in best] or kinds
        if self.known == np.inf:  # the way with most candidates spreads memory best
            entrant = max(self._entrants, key=lambda entrant: entrant.num_candidates)
            start = entrant.start_from_memory()
            arms += [] if start is None else [_Arm(entrant, start, manner, np.inf) for manner in MANNERS]
        return arms

    def _halving(self, arms: list[_Arm], max_work: float) -> Iterator[bool]:
        """Attempts of all arms, then longer ones of the better half, and so on, until one is left."""
        work = max_work / (1 + (len(arms) - 1).bit_length())
        while True:
            for arm in arms:
                if arm.entrant.value < self.known:
                    arm.attempt(max(work / len(arms), self._least_work))
                    yield True
            if len(arms) == 1:
                return
            arms = _better_half(arms)

    def solution(self) -> Solution:
        """The best plan and the bound."""
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        bound = min(self.value, best.seconds)
        boxes = sum(entrant.num_boxes for entrant in self._entrants)
        return Solution(best.search.parts_T, best.seconds, bound, self._bound_work + self._search_work, boxes)


def _better_half(arms: list[_Arm]) -> list[_Arm]:
    return sorted(arms, key=lambda arm: arm.seconds)[: (len(arms) + 1) // 2]
