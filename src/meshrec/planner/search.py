"""Better and better plans of one way: starts from relaxations, then annealing from any of them."""

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.bound import Box
from meshrec.planner.construct import (
    candidates_by_type,
    construct,
    exchange,
    fitting_plan,
    reinsert,
    table_order,
)
from meshrec.planner.polish import polish
from meshrec.planner.problem import Problem
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools, Ints

_EXPONENTS = (8, 16, 32, 64)
"""Of the norm over ranks where no compiled kernels anneal: the maximum counts more and more."""
_LOCAL_WORK = 10_000_000
"""There, the most that exchanges take at each exponent: a tenth of a second."""
_WORK_PER_RANK = 2
"""The work of computing one rank's load in the compiled loop, in array elements."""
_CLOSE = 1.02
"""A plan that is this much slower than the best is worth exact sizes: these gain about as much."""


WORK_PER_SECOND = 1e8
"""What `Effort` says of work: it makes attempts as long as the time allows."""


class Effort(NamedTuple):
    """When to stop: seconds of wall clock, work, and the gap (a fraction) that is good enough.

    Work is counted in array elements touched, with a surcharge per operation: about 10 ns each.
    """

    time_limit: float
    max_work: float
    gap: float


class Manner(NamedTuple):
    """How to anneal. Which manner serves best depends on how many pieces a rank holds: attempts tell.

    `hot`: the temperature to begin with, in mean loads of a rank. `place_share`: the most of the work that
    places whole tables anew; the rest moves one piece or exchanges two. `exponent`: of the norm over ranks at
    first.
    """

    hot: float
    place_share: float
    exponent: int


MANNERS = (Manner(0.03, 1.0, 8), Manner(0.005, 0.1, 8), Manner(0.002, 0.05, 32))
"""Few large pieces want new splits and much disorder; many small ones patience. Where each rank is full with
one or two pieces, it is the slowest rank that counts from the start."""
_SETTLED = Manner(0.001, 1.0, 32)
"""From a plan that is good already."""
_SEVERAL_SHARE = 0.15
"""Of moves that change several pieces at once: only these help where all ranks are full in one phase, and
they lead nowhere elsewhere."""


class Start(NamedTuple):
    """A plan to anneal, and with which candidates."""

    parts_T: list[Parts]
    annealer: Annealer


class Search:
    """The best plan so far, and what makes it better.

    Attributes:
        seconds, parts_T: the best plan; no parts before the first.
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
        """A plan made of a box's relaxation, to be annealed with the candidates `admitted_C`; None where it
        does not fit into memory, or nothing anneals."""
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        return self._begin(construct(self.problem, box.share_C, candidates_Y), candidates_Y)

    def add_fitting(self, seconds: float) -> Start | None:
        """The same from a plan that spreads memory, annealed for so many seconds until it fits."""
        return self._begin(self._fitting(seconds), candidates_by_type(self.problem, self._allowed_C))

    def _begin(self, state: State | None, candidates_Y: list[Ints]) -> Start | None:
        if state is None:
            return None
        self._keep(state)
        if not Annealer.serves(self.problem):
            self._search_locally(state, candidates_Y)
            return None
        parts_T = [parts for parts in state.parts_T if parts is not None]
        return Start(parts_T, Annealer(self.problem, candidates_Y))

    def attempt(self, start: Start, manner: Manner, max_work: float) -> float:
        """Anneals a start, and keeps the plan if it is the best; its seconds."""
        self._seed += 1
        seconds = max(0.0, self._deadline - time.perf_counter())
        max_work = min(max_work, WORK_PER_SECOND * seconds)
        parts_T, work = start.annealer.improve(
            start.parts_T,
            max_work=int(max_work / _WORK_PER_RANK),
            seconds=seconds,
            hot=manner.hot,
            seed=self._seed,
            place_share=manner.place_share,
            several_share=_SEVERAL_SHARE,
            exponent=manner.exponent,
        )
        self.work += _WORK_PER_RANK * work
        state = self.state_of(parts_T)
        if state.seconds < self.seconds * _CLOSE and not self._is_late and not polish(state):
            polish(state, rows_only=True)
        self._keep(state)
        return state.seconds

    def settle(self, max_work: float) -> None:
        """Anneals the best plan at a low temperature, with all candidates."""
        everything = candidates_by_type(self.problem, self._allowed_C)
        self.attempt(Start(self.parts_T, Annealer(self.problem, everything)), _SETTLED, max_work)

    def state_of(self, parts_T: Sequence[Parts]) -> State:
        """The state of a plan."""
        state = State(self.problem, np.ones(self.problem.load_PK.shape[1]))
        for table, parts in enumerate(parts_T):
            state.add(table, parts)
        state.set_exponent(_EXPONENTS[-1])
        return state

    @property
    def _is_late(self) -> bool:
        return time.perf_counter() >= self._deadline

    def _search_locally(self, state: State, candidates_Y: list[Ints]) -> None:
        for exponent in _EXPONENTS:
            state.set_exponent(exponent)
            exchange(state, _LOCAL_WORK)
            choice_T = np.array([parts.candidate for parts in state.parts_T if parts is not None])
            for table in table_order(self.problem, choice_T):
                if self._is_late:
                    break
                reinsert(state, int(table), candidates_Y[self.problem.type_T[table]])
            self._keep(state)
        if not self._is_late and polish(state):
            self._keep(state)

    def _fitting(self, seconds: float) -> State | None:
        by_memory = fitting_plan(self.problem, self._allowed_C, seconds)
        if by_memory is None:
            return None
        return self.state_of([parts for parts in by_memory.parts_T if parts is not None])

    def _keep(self, state: State) -> None:
        self.work += state.work
        state.work = 0
        if state.seconds < self.seconds * (1 - 1e-12) and state.fits():
            self.seconds = state.seconds
            self.parts_T = [parts for parts in state.parts_T if parts is not None]
