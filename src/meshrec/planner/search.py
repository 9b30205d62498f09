"""Search for better plans: start from relaxations, then anneal."""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.construct import candidates_by_type, construct, fitting_plan
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import Box
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools

_WORK_PER_RANK = 2
"""Work of computing a rank's load in the compiled loop, in array elements."""
WORK_PER_SECOND = 1e8
"""Work per second, as counted by `Effort`; limits attempts to the remaining time."""


class Effort(NamedTuple):
    """Search limits: wall clock seconds, work, and sufficient gap (a fraction).

    Work counts touched array elements, with a surcharge per operation: about 10 ns each.
    """

    time_limit: float
    max_work: float
    gap: float


class AnnealingSettings(NamedTuple):
    """Annealing settings. The best ones depend on the pieces per rank, and only attempts can tell.

    Attributes:
        hot: initial temperature, in mean loads of a rank.
        placement_share: maximum fraction of work which re-places whole tables; other moves shift or swap
            pieces.
        exponent: initial exponent, for the norm over ranks.
    """

    hot: float
    placement_share: float
    exponent: int


ANNEALING_SETTINGS = (
    AnnealingSettings(0.03, 1.0, 8),
    AnnealingSettings(0.005, 0.1, 8),
    AnnealingSettings(0.002, 0.05, 32),
)
"""Settings to try, tuned on the planner benchmark.

Few large pieces need new splits and high temperature; many small pieces need patience. If every rank is full
with one or two pieces, only the slowest rank counts from the start.

Neither of the first two suffices alone, for `SETTLED` too. With a work limit of 1e8, the gap of the task
medium on 32 ranks is 7.0 % with all settings and 9.5 % with the first, and that of dlrm_dcnv2 on 64 ranks
12.3 % with all settings and 13.7 % with the second.
"""

SETTLED = AnnealingSettings(0.001, 1.0, 32)
"""Settings for an already good plan."""


class Start(NamedTuple):
    """Plan to anneal, and an annealer with the candidates."""

    parts_T: list[Parts]
    annealer: Annealer


class Search:
    """Best plan so far, and the means to improve it.

    Attributes:
        seconds: best plan's step time; infinite before the first.
        parts_T: best plan; empty before the first.
        work: work so far.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, deadline: float) -> None:
        self.problem = problem
        self.work = 0
        self.seconds = np.inf
        self.parts_T: list[Parts] = []
        self._allowed_C = allowed_C
        self._deadline = deadline
        # Counts attempts: each one anneals with another seed, and a repeated search uses the same sequence.
        self._seed = 0

    def add_start(self, box: Box, admitted_C: Bools) -> Start | None:
        """Construct a plan from a box's relaxation, to be annealed with the candidates `admitted_C`.

        Returns None if it does not fit into memory, or without annealer.
        """
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = construct(self.problem, box.share_C, candidates_Y)
        return None if state is None else self._started(state, admitted_C)

    def add_fitting(self, seconds: float) -> Start | None:
        """Construct a memory-balanced plan, annealed for up to `seconds` until it fits."""
        by_memory = fitting_plan(self.problem, self._allowed_C, seconds)
        return None if by_memory is None else self._started(self._state_of(by_memory.plan), self._allowed_C)

    def best_start(self) -> Start | None:
        """Return the best plan as a start, to be annealed with all candidates."""
        if not self.parts_T or not Annealer.supports(self.problem):
            return None
        return Start(self.parts_T, Annealer(self.problem, candidates_by_type(self.problem, self._allowed_C)))

    def _started(self, state: State, admitted_C: Bools) -> Start | None:
        self._keep(state)
        if not Annealer.supports(self.problem):
            return None
        return Start(state.plan, Annealer(self.problem, candidates_by_type(self.problem, admitted_C)))

    def attempt(self, start: Start, settings: AnnealingSettings, max_work: float) -> float:
        """Anneal a start, keep the plan if it is the best, and return the seconds.

        Args:
            start: plan to anneal.
            settings: annealing settings.
            max_work: work limit.
        """
        self._seed += 1
        seconds = max(0.0, self._deadline - time.perf_counter())
        parts_T, work = start.annealer.improve(
            start.parts_T,
            max_work=int(min(max_work, WORK_PER_SECOND * seconds) / _WORK_PER_RANK),
            seconds=seconds,
            hot=settings.hot,
            placement_share=settings.placement_share,
            exponent=settings.exponent,
            seed=self._seed,
        )
        self.work += _WORK_PER_RANK * work
        state = self._state_of(parts_T)
        self._keep(state)
        return state.seconds

    def _state_of(self, parts_T: list[Parts]) -> State:
        state = State(self.problem)
        for table, parts in enumerate(parts_T):
            state.add(table, parts)
        return state

    def _keep(self, state: State) -> None:
        self.work += state.work
        # Counted once, even if the state is kept again.
        state.work = 0
        if state.seconds < self.seconds * (1 - 1e-12) and state.fits():
            self.seconds, self.parts_T = state.seconds, state.plan
