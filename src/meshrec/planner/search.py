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
"""Work of computing one rank's load in the compiled loop, in array elements."""
WORK_PER_SECOND = 1e8
"""Work per second, as `Effort` counts it; it limits attempts to the time left."""


class Effort(NamedTuple):
    """Limits of a search: seconds of wall clock, work, and the gap (a fraction) that is good enough.

    Work is counted in array elements touched, with a surcharge per operation: about 10 ns each.
    """

    time_limit: float
    max_work: float
    gap: float


class Manner(NamedTuple):
    """Settings of the annealing. The best ones depend on the pieces per rank, and only attempts can tell.

    Attributes:
        hot: initial temperature, in mean loads of a rank.
        place_share: maximum share of the work that places whole tables anew. The rest moves one piece or
            exchanges two.
        exponent: initial exponent of the norm over ranks.
    """

    hot: float
    place_share: float
    exponent: int


MANNERS = (Manner(0.03, 1.0, 8), Manner(0.005, 0.1, 8), Manner(0.002, 0.05, 32))
"""Manners to try.

Few large pieces need new splits and much disorder; many small ones need patience. Where each rank is full
with one or two pieces, only the slowest rank counts from the start.
"""

SETTLED = Manner(0.001, 1.0, 32)
"""Manner for a plan that is good already."""


class Start(NamedTuple):
    """A plan to anneal, with the annealer that knows its candidates."""

    parts_T: list[Parts]
    annealer: Annealer


class Search:
    """The best plan so far, and the means to improve it.

    Attributes:
        seconds, parts_T: the best plan; ``parts_T`` is empty before the first.
        work: the work done so far.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, deadline: float) -> None:
        self.problem = problem
        self.work = 0
        self.seconds = np.inf
        self.parts_T: list[Parts] = []
        self._allowed_C = allowed_C
        self._deadline = deadline
        self._seed = 0

    def add_start(self, box: Box, admitted_C: Bools) -> Start | None:
        """Make a plan from a box's relaxation, to be annealed with the candidates `admitted_C`.

        Returns None if it does not fit into memory, or if there is no annealer.
        """
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = construct(self.problem, box.share_C, candidates_Y)
        return None if state is None else self._started(state, admitted_C)

    def add_fitting(self, seconds: float) -> Start | None:
        """Make a start from a plan that spreads memory, annealed for up to `seconds` until it fits."""
        by_memory = fitting_plan(self.problem, self._allowed_C, seconds)
        return None if by_memory is None else self._started(self._state_of(by_memory.plan), self._allowed_C)

    def best_start(self) -> Start | None:
        """Return the best plan as a start, to be annealed with all candidates."""
        if not self.parts_T or not Annealer.serves(self.problem):
            return None
        return Start(self.parts_T, Annealer(self.problem, candidates_by_type(self.problem, self._allowed_C)))

    def _started(self, state: State, admitted_C: Bools) -> Start | None:
        self._keep(state)
        if not Annealer.serves(self.problem):
            return None
        return Start(state.plan, Annealer(self.problem, candidates_by_type(self.problem, admitted_C)))

    def attempt(self, start: Start, manner: Manner, max_work: float) -> float:
        """Anneal a start, keep the plan if it is the best, and return its seconds."""
        self._seed += 1
        seconds = max(0.0, self._deadline - time.perf_counter())
        parts_T, work = start.annealer.improve(
            start.parts_T,
            max_work=int(min(max_work, WORK_PER_SECOND * seconds) / _WORK_PER_RANK),
            seconds=seconds,
            hot=manner.hot,
            place_share=manner.place_share,
            exponent=manner.exponent,
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
        state.work = 0
        if state.seconds < self.seconds * (1 - 1e-12) and state.fits():
            self.seconds, self.parts_T = state.seconds, state.plan
