"""The solver: a first plan in a moment, then a better bound and better plans until the work is done.

Half of the work goes to plans, half to the bound. Effort is counted in work, so the result depends only on
the input and the effort, unless the clock runs out first.

Plans are annealed from several starts in several manners, and it is unknown beforehand which of them suit an
input. All get a short attempt, the best few a longer one, the better half of these one twice as long, and so
on (successive halving: Karnin, Koren & Somekh, Almost Optimal Exploration in Multi-Armed Bandits, 2013). The
next round begins with longer attempts, and with the best plan and the boxes of the bound as additional
starts.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import MANNERS, SETTLED, WORK_PER_SECOND, Effort, Manner, Search, Start
from meshrec.planner.state import Parts
from meshrec.planner.types import Bools

_FINALISTS, _ROUND = 4, 1 / 64
"""Number of attempts that continue after the first short ones, and their initial share of the work on plans.

The share doubles in each round.
"""
_FIRST_WORK = 0.25
"""Share of the work on plans after which no more first attempts begin."""
_WORK_PER_TABLE = 2e4
"""Work per table of the shortest attempts: about as much as setting one up."""
_SQUEEZES = (1.1, 1.4, np.inf)
"""Limits on the largest pieces of starting plans, as multiples of a relaxation's T.

Larger pieces leave the other ranks idle. The final T is unknown.
"""
_OF_OTHER_WAYS = 2
"""Number of starts that are tried again with other sets of collectives: the best starts of one set are nearly
the best of any.
"""
_FITTING_SECONDS = 5.0
"""Seconds to look for a first plan that fits. It may exceed the time limit, because the search would fail
without one.
"""


class Way(NamedTuple):
    """A set of collectives: the candidates that need no others, and the latencies of these collectives."""

    allowed_C: Bools
    fixed_seconds: float


class Solution(NamedTuple):
    """The best plan found (no parts: none), and the bound that no plan can beat. Both include latencies."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    work: int
    num_boxes: int


def solve(problem: Problem, ways: Sequence[Way], effort: Effort, *, cutoff: float = np.inf) -> Solution:
    """Return the best plan found for one of the `ways`.

    If no plan fits into memory, the solution has no parts; if that is proven, the bound is infinite. `cutoff`
    is the seconds of a plan that is already known: the search ends when it is proven that no plan is faster.
    """
    contest = _Contest(problem, ways, effort, cutoff, time.perf_counter() + effort.time_limit)
    while contest.step():
        pass
    return contest.solution()


class _Entrant:
    """A way, with its search for plans and its bound.

    The bound is computed when it is first needed. Until then `floor` applies: seconds that no plan of any way
    can beat.
    """

    def __init__(self, problem: Problem, way: Way, deadline: float, floor: float) -> None:
        self.fixed_seconds = way.fixed_seconds
        self.allowed_C = way.allowed_C & problem.can_fit_C()
        self.search = Search(problem, self.allowed_C, deadline)
        self.first_work = 0
        self._problem, self._floor = problem, floor
        self._bound: LowerBound | None = None
        self._deadline, self._longest = deadline, 0.0
        self._tried: set[bytes] = set()
        self.is_done = False

    @property
    def seconds(self) -> float:
        """Seconds of the best plan, with latencies."""
        return self.search.seconds + self.fixed_seconds

    @property
    def value(self) -> float:
        """The bound, with latencies."""
        return (self._floor if self._bound is None else self._bound.value) + self.fixed_seconds

    @property
    def bound(self) -> LowerBound:
        """The bound, without latencies."""
        if self._bound is None:
            self._bound = LowerBound(self._problem, self.allowed_C, self._deadline)
            self.first_work = self._bound.work
        return self._bound

    @property
    def bound_work(self) -> int:
        """Work on the bound after its first box."""
        return 0 if self._bound is None else self._bound.work - self.first_work

    @property
    def num_boxes(self) -> int:
        """Number of relaxations solved."""
        return 0 if self._bound is None else self._bound.num_solves

    @property
    def has_time(self) -> bool:
        """Whether a step as long as the bound's longest one would end in time."""
        return time.perf_counter() + self._longest <= self._deadline

    def start(self, factor: float) -> Start | None:
        """Make a plan from the relaxation, with pieces of at most `factor` times its T; None if there is
        none.
        """
        for leaves_room in (False, True):
            box = self.bound.squeezed(factor, leaves_room=leaves_room)
            start = None if box is None else self.search.add_start(box, box.admitted_C)
            if start is not None:
                return start
        return None if self.search.parts_T else self.search.add_fitting(0.0)

    def start_from_memory(self) -> Start | None:
        """Make a plan that spreads memory, with a longer search."""
        return self.search.add_fitting(_FITTING_SECONDS)

    def new_arms(self, manner: Manner) -> "list[_Arm]":
        """Return new starts of the search: the bound's best box, if its splits are new, and the best plan."""
        box = None if self._bound is None else self._bound.best_box
        key = b"" if box is None else np.rint(box.share_C).astype(np.int32).tobytes()
        start = None
        if box is not None and key not in self._tried:
            self._tried.add(key)
            start = self.search.add_start(box, box.admitted_C)
        found = [] if start is None else [_Arm(self, start, manner, np.inf)]
        best = self.search.best_start()
        return found if best is None else [*found, _Arm(self, best, SETTLED, np.inf)]

    def improve(self, known: float) -> None:
        """Take one step of the bound. A plan of `known` seconds (with latencies) is known."""
        started = time.perf_counter()
        is_begun = self._bound is not None
        bound = self.bound
        self.is_done = is_begun and not bound.branch(known - self.fixed_seconds)
        self._longest = max(self._longest, time.perf_counter() - started)


@dataclass(eq=False)
class _Arm:
    """A start with a manner, and the seconds (with latencies) of its last attempt."""

    entrant: _Entrant
    start: Start
    manner: Manner
    factor: float
    """Factor of the largest pieces; see `_SQUEEZES`."""
    seconds: float = np.inf

    def attempt(self, work: float) -> None:
        """Make one more attempt."""
        self.seconds = self.entrant.search.attempt(self.start, self.manner, work) + self.entrant.fixed_seconds


class _Contest:
    """All ways together: the lowest bound is raised next, and ways that can beat the best plan get
    attempts.
    """

    def __init__(
        self, problem: Problem, ways: Sequence[Way], effort: Effort, cutoff: float, deadline: float
    ) -> None:
        widest, *others = sorted(ways, key=lambda way: -np.count_nonzero(way.allowed_C))
        self._entrants = [_Entrant(problem, widest, deadline, 0.0)]
        has_all = all((widest.allowed_C | ~way.allowed_C).all() for way in others)
        floor = self._entrants[0].bound.value if has_all else 0.0
        self._entrants += [_Entrant(problem, way, deadline, floor) for way in others]
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
        return sum(entrant.bound_work for entrant in self._entrants)

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
        """Do one piece of work. Return False if there is nothing left to do, or no time."""
        if self.known < np.inf and (self._is_proven or self._is_spent):
            return False
        entrant = min(self._entrants, key=lambda entrant: entrant.value)
        can_prove = self.known < np.inf and not entrant.is_done and entrant.has_time
        is_bounds_turn = self._bound_work <= self._search_work - self._first_work
        if can_prove and (is_bounds_turn or not self._has_attempts):
            entrant.improve(self.known)
            self._has_attempts = True  # new boxes may have new starts
            return True
        if self._has_attempts:
            self._has_attempts = next(self._attempts, False)
            return True
        return False

    def _rounds(self) -> Iterator[bool]:
        """Attempt better plans in the order of successive halving; yield True after each one, and False while
        there is nothing to attempt.
        """
        arms = yield from self._first_arms()
        self._first_work = float(self._search_work)
        work = self._plan_work * _ROUND
        while arms:
            arms = _best(arms, _FINALISTS)
            for entrant in self._entrants:
                if entrant.value < self.known:
                    arms += entrant.new_arms(arms[0].manner)
            if all(arm.entrant.value >= self.known for arm in arms):
                yield False  # until a bound has new starts
                continue
            yield from self._halving(arms, work)
            work *= 2

    def _halving(self, arms: list[_Arm], work: float) -> Iterator[bool]:
        """Run attempts of all arms, then of the better half for twice as long, and so on, until one is
        left.
        """
        while True:
            for arm in arms:
                if arm.entrant.value < self.known:
                    arm.attempt(max(work, self._least_work))
                    yield True
            if len(arms) == 1:
                return
            arms, work = _best(arms, (len(arms) + 1) // 2), 2 * work

    def _first_arms(self) -> Generator[bool, None, list[_Arm]]:
        """Return all starts of the way with the lowest bound in all manners, and the best of them for other
        ways.

        Other ways are included if they may be better than the best plan. Each has had its first attempt.
        """
        arms: list[_Arm] = []
        kinds: list[tuple[float, Sequence[Manner]]] = [(factor, MANNERS) for factor in _SQUEEZES]
        for entrant in sorted(self._entrants, key=lambda entrant: entrant.value):
            mine: list[_Arm] = []
            for factor, manners in kinds:
                is_late = self._is_spent or self._search_work >= _FIRST_WORK * self._plan_work
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
            best = _best(arms, _OF_OTHER_WAYS)
            kinds = [(arm.factor, (arm.manner,)) for arm in best] or kinds
        if self.known == np.inf:  # the way with most candidates spreads memory best
            entrant = max(self._entrants, key=lambda entrant: np.count_nonzero(entrant.allowed_C))
            start = entrant.start_from_memory()
            arms += [] if start is None else [_Arm(entrant, start, manner, np.inf) for manner in MANNERS]
        return arms

    def solution(self) -> Solution:
        """Return the best plan and the bound."""
        best = min(self._entrants, key=lambda entrant: entrant.seconds)
        bound = min(self.value, best.seconds)
        boxes = sum(entrant.num_boxes for entrant in self._entrants)
        return Solution(best.search.parts_T, best.seconds, bound, self._bound_work + self._search_work, boxes)


def _best(arms: list[_Arm], count: int) -> list[_Arm]:
    return sorted(arms, key=lambda arm: arm.seconds)[:count]
