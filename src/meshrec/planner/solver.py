"""Solver: find a first plan quickly, then alternate between better plans and a better lower bound.

Half of the work goes to plans, half to the bound. Work is counted in array elements (see `Effort`), so the
result depends only on input and effort, unless the time limit ends the search.

Plans are improved by simulated annealing, from several initial plans ("starts") with several annealing
settings. It is unknown beforehand which combination suits an input. So all get a short attempt, the best few
a longer attempt, the better half of these twice as long, and so on (successive halving: Karnin, Koren &
Somekh, Almost Optimal Exploration in Multi-Armed Bandits, 2013). The next round starts with longer attempts,
and adds the best plan and the relaxed plans of the bound (`relaxation.Box`) as starts.

A plan without column splits or data-parallel tables saves the latency of some collectives. The problem is
therefore solved for several collective sets (`CollectiveSet`), each with its own candidates and bound.
"""

import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import LowerBound
from meshrec.planner.problem import Problem
from meshrec.planner.search import (
    ANNEALING_SETTINGS,
    SETTLED,
    WORK_PER_SECOND,
    AnnealingSettings,
    Effort,
    InitialPlan,
    Search,
)
from meshrec.planner.state import TablePlacement
from meshrec.planner.types import Bools

# Attempts that continue after the first short attempts, and the fraction of the plan work that each
# gets at first. The fraction doubles every round.
_FINALISTS, _ROUND = 4, 1 / 64
# No more first attempts start after this fraction of the plan work.
_FIRST_WORK = 0.25
# Fraction of the plan work to anneal a start until it fits into memory, and fraction after which none begins.
_SQUEEZE_WORK, _MOST_SQUEEZING = 1 / 6, 1 / 2
# Work per table of the shortest attempts: about the cost of setting up an attempt.
_WORK_PER_TABLE = 2e4
# Limits on the largest pieces of starting plans, as multiples of T, the slowest rank's time per phase. Ranks
# would wait for a piece that takes longer than T. The relaxation gives only a lower estimate of the final T,
# so several multiples are tried.
_PIECE_LIMITS = (1.1, 1.4, np.inf)
# Starts to try with other collective sets, too. The best starts for a set are nearly the best for
# any.
_RETRIED_STARTS = 2
# Time limit in the search for a first plan that fits into memory. It may exceed the user's time limit,
# because the search would fail without a plan.
_FITTING_SECONDS = 5.0


class CollectiveSet(NamedTuple):
    """Collectives which a plan may use.

    Attributes:
        allowed_C: mask of the candidates (ways to split a table) that need only these collectives.
        fixed_seconds: seconds which every plan takes for these collectives' latencies and kernel launches.
    """

    allowed_C: Bools
    fixed_seconds: float


class Solution(NamedTuple):
    """Best plan and lower bound.

    Attributes:
        placements_T: placement per table; empty if no plan was found.
        seconds: the plan's step time, with latencies.
        lower_bound: step time which no plan can beat, with latencies.
        work: work spent on plans and bound, in array elements; see `Effort`.
    """

    placements_T: list[TablePlacement]
    seconds: float
    lower_bound: float
    work: int


def solve(
    problem: Problem, collective_sets: Sequence[CollectiveSet], effort: Effort, *, cutoff: float = np.inf
) -> Solution:
    """Search for the fastest plan over all collective sets, and bound the step time from below.

    Args:
        cutoff: step time in seconds for a known plan. The search ends once no plan can be faster.

    Returns:
        The best plan and the bound. If no plan was found which fits into memory, the solution has no
        placements. If infeasibility is proven, the bound is infinite.
    """
    search = _HalvingSearch(problem, collective_sets, effort, cutoff, time.perf_counter() + effort.time_limit)
    while search.step():
        pass
    return search.solution()


class _CollectiveSetSearch:
    """Plan search and lower bound for a collective set, which has the collectives that plans may use.

    The lower bound is computed on first use, because it is expensive. Until then, `floor` serves as the
    bound. No plan with any collective set takes fewer seconds than `floor`.

    Args:
        floor: lower bound without latencies, until the bound is computed.
    """

    def __init__(self, problem: Problem, collectives: CollectiveSet, deadline: float, floor: float) -> None:
        self.fixed_seconds = collectives.fixed_seconds
        self.allowed_C = collectives.allowed_C & problem.can_fit_C()
        self.search = Search(problem, self.allowed_C, deadline)
        # Work of the root box, which does not count as bound work: starts need it, too.
        self.root_work = 0
        self._problem, self._floor = problem, floor
        # Created by the first access to the property `bound`. Until then, `floor` is the lower bound.
        self._bound: LowerBound | None = None
        # Longest bound step so far in seconds, to predict whether another step ends before the deadline.
        self._deadline, self._longest = deadline, 0.0
        # Rounded shares for the boxes used as starts, to avoid repeated starts.
        self._tried: set[bytes] = set()
        # Set once no box can be split any more.
        self.is_exhausted = False

    @property
    def seconds(self) -> float:
        """Step time of the best plan so far, with latencies; infinite before the first plan."""
        return self.search.seconds + self.fixed_seconds

    @property
    def value(self) -> float:
        """Lower bound on the step time of plans with this collective set, with latencies."""
        return (self._floor if self._bound is None else self._bound.value) + self.fixed_seconds

    @property
    def bound(self) -> LowerBound:
        """Branch and bound for the lower bound, without latencies.

        Created on first access, which also solves the root box (the range that contains every plan).
        """
        if self._bound is None:
            self._bound = LowerBound(self._problem, self.allowed_C, self._deadline)
            self.root_work = self._bound.work
        return self._bound

    @property
    def bound_work(self) -> int:
        """Work spent on the bound after the root box was solved, in touched array elements."""
        return 0 if self._bound is None else self._bound.work - self.root_work

    @property
    def has_time(self) -> bool:
        """Whether another bound step is expected to end before the deadline.

        The step is expected to take as long as the longest step so far.
        """
        return time.perf_counter() + self._longest <= self._deadline

    def start(self, factor: float, squeeze_work: float) -> InitialPlan | None:
        """Construct an initial plan by rounding the relaxation.

        A piece may cost at most `factor` times T in every phase, where T is the slowest rank's load in the
        relaxation. If the plan does not fit into memory, it is annealed until it fits. If that fails, try
        again with smaller pieces.

        Args:
            squeeze_work: work limit of annealing until the plan fits.

        Returns:
            The initial plan, or None if no plan was constructed or annealing is not available.
        """
        # First without reserving memory for other tables, which excludes fewer candidates.
        for leaves_room in (False, True):
            box = self.bound.solve_small_pieces(factor, leaves_room=leaves_room)
            start = None if box is None else self.search.add_start(box, box.admitted_C, squeeze_work)
            if start is not None:
                return start
        return None

    def memory_balanced_start(self) -> InitialPlan | None:
        """Construct an initial plan that balances memory over ranks, regardless of speed.

        If the plan does not fit, it is annealed until it fits, for at most `_FITTING_SECONDS`. In contrast,
        `start` gives this annealing no time.

        Returns:
            The initial plan, or None if no plan fits or annealing is not available.
        """
        return self.search.add_fitting(_FITTING_SECONDS)

    def new_attempts(self, settings: AnnealingSettings) -> "list[_Attempt]":
        """Return attempts (pairs of a start and annealing settings) that have not run yet.

        The first start is rounded from the relaxation of the box with the lowest bound, and gets the given
        settings. It is left out if it was tried before. The second start is the best plan so far, with the
        settings `SETTLED`. It is left out if no plan was found.
        """
        box = None if self._bound is None else self._bound.best_box
        # Boxes with the same rounded shares count as the same start.
        key = b"" if box is None else np.rint(box.num_tables_C).astype(np.int32).tobytes()
        start = None
        if box is not None and key not in self._tried:
            self._tried.add(key)
            start = self.search.add_start(box, box.admitted_C)
        attempts = [] if start is None else [_Attempt(self, start, settings, np.inf)]
        best = self.search.best_start()
        # The best plan gets careful settings, which keep most of it.
        return attempts if best is None else [*attempts, _Attempt(self, best, SETTLED, np.inf)]

    def improve(self, best_seconds: float) -> None:
        """Raise the lower bound by a step: solve the root box if it was not solved yet, else split a box.

        Args:
            best_seconds: best plan's step time so far, with latencies. Boxes without faster plans are
                dropped.
        """
        started = time.perf_counter()
        # The first access to `bound` solves the root box, which is a step by itself.
        is_begun = self._bound is not None
        bound = self.bound
        self.is_exhausted = is_begun and not bound.branch(best_seconds - self.fixed_seconds)
        self._longest = max(self._longest, time.perf_counter() - started)


@dataclass(eq=False)
class _Attempt:
    """Annealing of one start with fixed settings. It may run several times, with more work each time."""

    set_search: _CollectiveSetSearch
    start: InitialPlan
    settings: AnnealingSettings
    factor: float
    """Limit on the pieces of the start; see `_PIECE_LIMITS`."""
    seconds: float = np.inf
    """Step time after the last run, with latencies; infinite before the first run."""

    def run(self, work: float) -> None:
        """Anneal the start again, with another seed, and record the step time in `seconds`."""
        self.seconds = (
            self.set_search.search.attempt(self.start, self.settings, work) + self.set_search.fixed_seconds
        )


class _HalvingSearch:
    """Search over all collective sets, by successive halving of attempts.

    An attempt anneals an initial plan with some settings. Successive halving repeats the better half of the
    attempts with more work. The search alternates between attempts and steps that raise the lower bound. A
    bound step raises the bound of the set with the lowest bound, which is the bound of the whole problem.
    Attempts run only for sets which can still beat the best plan.
    """

    def __init__(
        self,
        problem: Problem,
        collective_sets: Sequence[CollectiveSet],
        effort: Effort,
        cutoff: float,
        deadline: float,
    ) -> None:
        # The set with the most candidates comes first, because the bound may then hold for all sets.
        widest, *remaining = sorted(
            collective_sets, key=lambda collectives: -np.count_nonzero(collectives.allowed_C)
        )
        self._set_searches = [_CollectiveSetSearch(problem, widest, deadline, 0.0)]
        # If the widest set allows every candidate, its bound holds for the plans of all sets.
        has_all = all((widest.allowed_C | ~collectives.allowed_C).all() for collectives in remaining)
        floor = self._set_searches[0].bound.value if has_all else 0.0
        self._set_searches += [
            _CollectiveSetSearch(problem, collectives, deadline, floor) for collectives in remaining
        ]
        self._effort, self._cutoff, self._deadline = effort, cutoff, deadline
        # Half of the work is for plans, see the module docstring. The time limit counts as work, too.
        self._plan_work = min(effort.max_work, WORK_PER_SECOND * effort.time_limit) / 2
        self._least_work = _WORK_PER_TABLE * len(problem.type_T)
        # Generator that runs one attempt per next(), so that `step` can interleave bound steps.
        self._attempts = self._rounds()
        # False while the generator waits for new starts. A bound step sets it again.
        self._has_attempts = True
        # Search work in the first attempts; infinite until they end, so that the bound has a turn only
        # afterwards.
        self._first_attempts_work = np.inf

    @property
    def best_seconds(self) -> float:
        """Step time of the best plan so far, with latencies, or the cutoff if that is lower."""
        return min(self._cutoff, *(set_search.seconds for set_search in self._set_searches))

    @property
    def value(self) -> float:
        """Lower bound on the step time of all plans, with latencies."""
        return min(set_search.value for set_search in self._set_searches)

    @property
    def _bound_work(self) -> int:
        """Work spent on the lower bounds of all collective sets."""
        return sum(set_search.bound_work for set_search in self._set_searches)

    @property
    def _search_work(self) -> int:
        """Work spent on plans in all collective sets."""
        return sum(set_search.search.work for set_search in self._set_searches)

    @property
    def _is_spent(self) -> bool:
        """Whether the work limit or the deadline is reached."""
        work = self._bound_work + self._search_work
        return work >= self._effort.max_work or time.perf_counter() >= self._deadline

    def step(self) -> bool:
        """Run one bound step or one attempt. Return False if the search is finished or out of time."""
        is_proven = self.best_seconds - self.value <= self._effort.gap * self.best_seconds
        if self.best_seconds < np.inf and (is_proven or self._is_spent):
            return False
        set_search = min(self._set_searches, key=lambda set_search: set_search.value)
        can_prove = self.best_seconds < np.inf and not set_search.is_exhausted and set_search.has_time
        # Whichever of the two has done less work continues.
        is_bounds_turn = self._bound_work <= self._search_work - self._first_attempts_work
        if can_prove and (is_bounds_turn or not self._has_attempts):
            set_search.improve(self.best_seconds)
            self._has_attempts = True  # new boxes may have new starts
            return True
        if self._has_attempts:
            self._has_attempts = next(self._attempts, False)
            return True
        return False

    def _rounds(self) -> Iterator[bool]:
        """Run the first attempts, then rounds of successive halving with more and more work.

        Yields:
            True after every attempt. False if no attempt can beat the best plan. The caller must then raise
            the bound before the next attempt, so that there are new starts.
        """
        attempts = yield from self._first_attempts()
        self._first_attempts_work = float(self._search_work)
        work = self._plan_work * _ROUND
        while attempts:
            # Between rounds, only the most promising attempts are kept.
            attempts = _best(attempts, _FINALISTS)
            for set_search in self._set_searches:
                if set_search.value < self.best_seconds:
                    attempts += set_search.new_attempts(attempts[0].settings)
            # No attempt can win: the collective sets are proven to be slower.
            if all(attempt.set_search.value >= self.best_seconds for attempt in attempts):
                yield False  # until a bound has new starts
                continue
            yield from self._halving(attempts, work)
            work *= 2

    def _halving(self, attempts: list[_Attempt], work: float) -> Iterator[bool]:
        """Run all attempts, then the better half with twice the work, and so on, until one is left.

        Yields:
            True after every attempt.
        """
        while True:
            for attempt in attempts:
                # Otherwise no plan in the set can be faster than the best known plan.
                if attempt.set_search.value < self.best_seconds:
                    attempt.run(max(work, self._least_work))
                    yield True
            if len(attempts) == 1:
                return
            attempts, work = _best(attempts, (len(attempts) + 1) // 2), 2 * work

    def _first_attempts(self) -> Generator[bool, None, list[_Attempt]]:
        """Run short attempts, to find the starts and settings which suit the input.

        The collective set with the lowest bound gets an attempt for every pair of a start and annealing
        settings. Other sets get only the best pairs so far. Sets that cannot beat the best plan are skipped.

        Yields:
            True after every attempt.

        Returns:
            All attempts. If no plan was found, they include attempts from a plan that balances memory, which
            have not run yet.
        """
        attempts: list[_Attempt] = []
        kinds: list[tuple[float, Sequence[AnnealingSettings]]] = [
            (factor, ANNEALING_SETTINGS) for factor in _PIECE_LIMITS
        ]
        # Where memory is tight, no start of the first set fits. Then all sets anneal starts until one fits.
        for is_tight in (False, True):
            for set_search in self._by_root_bound():
                mine = yield from self._attempts_of(set_search, kinds, is_tight=is_tight)
                if not mine and not is_tight and self.best_seconds == np.inf:
                    break
                attempts += mine
                best = _best(attempts, _RETRIED_STARTS)
                kinds = [(attempt.factor, (attempt.settings,)) for attempt in best] or kinds
            if self.best_seconds < np.inf:
                break
        # Nothing fits so far: spend more time on a plan that balances memory.
        if self.best_seconds == np.inf:  # the set with most candidates spreads memory best
            set_search = max(
                self._set_searches, key=lambda set_search: np.count_nonzero(set_search.allowed_C)
            )
            start = set_search.memory_balanced_start()
            attempts += (
                []
                if start is None
                else [_Attempt(set_search, start, settings, np.inf) for settings in ANNEALING_SETTINGS]
            )
        return attempts

    def _attempts_of(
        self,
        set_search: _CollectiveSetSearch,
        kinds: list[tuple[float, Sequence[AnnealingSettings]]],
        *,
        is_tight: bool,
    ) -> Generator[bool, None, list[_Attempt]]:
        """Run short attempts for a collective set, and return them.

        Args:
            kinds: limits on the pieces of a start, see `_PIECE_LIMITS`, each with the settings to try.
            is_tight: whether starts are annealed until they fit into memory.

        Yields:
            True after every attempt.
        """
        attempts: list[_Attempt] = []
        for factor, all_settings in kinds:
            # Once a plan fits, the first attempts end with their share of the work; until then they continue.
            is_late = self._is_spent or self._search_work >= _FIRST_WORK * self._plan_work
            if set_search.value >= self.best_seconds or (is_late and self.best_seconds < np.inf):
                break
            may_squeeze = is_tight and self._search_work < _MOST_SQUEEZING * self._plan_work
            start = set_search.start(factor, _SQUEEZE_WORK * self._plan_work if may_squeeze else 0.0)
            for settings in all_settings:
                if start is None:
                    break
                attempts.append(_Attempt(set_search, start, settings, factor))
                attempts[-1].run(self._least_work)
                yield True
        return attempts

    def _by_root_bound(self) -> Iterator[_CollectiveSetSearch]:
        """Yield the searches by the bounds of their root boxes, lowest first, and solve these boxes."""
        remaining = list(self._set_searches)
        while remaining:
            first = min(remaining, key=lambda set_search: set_search.value)
            floor = first.value
            # The root box may raise the value above that of another set.
            if first.bound.value + first.fixed_seconds <= floor:
                remaining.remove(first)
                yield first

    def solution(self) -> Solution:
        """Return the best plan and the lower bound so far."""
        best = min(self._set_searches, key=lambda set_search: set_search.seconds)
        # A plan within the tolerance of the bound may be slightly below it.
        bound = min(self.value, best.seconds)
        return Solution(best.search.placements_T, best.seconds, bound, self._bound_work + self._search_work)


def _best(attempts: list[_Attempt], count: int) -> list[_Attempt]:
    """Return the `count` attempts with the fastest plans, fastest first."""
    return sorted(attempts, key=lambda attempt: attempt.seconds)[:count]
