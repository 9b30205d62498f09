"""Search for better plans by simulated annealing from several initial plans ("starts")."""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.construct import (
    WORK_PER_RANK,
    candidates_by_type,
    construct,
    fitting_plan,
    squeezed_plan,
)
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import Box
from meshrec.planner.state import State, TablePlacement
from meshrec.planner.types import Bools

WORK_PER_SECOND = 1e8
"""Work per second, as counted by `Effort`; limits attempts to the remaining time."""


class Effort(NamedTuple):
    """Limits of a search, which ends at the first limit it reaches.

    Attributes:
        time_limit: seconds of wall clock time.
        max_work: work in touched array elements, with a surcharge per operation. An element takes about 10
            ns. Unlike seconds, work does not depend on the machine, so equal inputs give equal plans.
        gap: sufficient distance between the best plan and the lower bound, as a fraction of the step time.
    """

    time_limit: float
    max_work: float
    gap: float


class AnnealingSettings(NamedTuple):
    """Settings of a simulated annealing run. Which are best depends on the input, so several are tried.

    Attributes:
        start_temperature: initial temperature, as a fraction of a rank's mean load.
        placement_share: maximum fraction of the work for moves which place a whole table again; other moves
            shift one piece or swap two.
        exponent: initial exponent q in the norm over ranks, see ``state.py``.
    """

    start_temperature: float
    placement_share: float
    exponent: int


ANNEALING_SETTINGS = (
    AnnealingSettings(0.03, 1.0, 8),
    AnnealingSettings(0.005, 0.1, 8),
    AnnealingSettings(0.002, 0.05, 32),
)
"""Settings to try, tuned on the planner benchmark.

Plans with few large pieces need new splits and a high temperature. Plans with many small pieces need a slower
descent. If every rank holds only one or two pieces, a high exponent makes only the slowest rank count.

Neither of the first two settings suffices alone. With a work limit of 1e8, the gap for the task "medium" on
32 ranks is 7.0 % with all settings and 9.5 % with the first. For "dlrm_dcnv2" on 64 ranks, it is 12.3 % with
all settings and 13.7 % with the second.
"""

SETTLED = AnnealingSettings(0.001, 1.0, 32)
"""Settings for an already good plan: a low temperature, which does not destroy it."""


class InitialPlan(NamedTuple):
    """Plan from which annealing starts, and the annealer, which knows the candidates it may use."""

    placements_T: list[TablePlacement]
    annealer: Annealer


class Search:
    """Plan search in a set of allowed candidates: constructs and anneals plans, and keeps the best.

    Attributes:
        seconds: best plan's step time, without latencies; infinite before the first plan.
        placements_T: placement per table in the best plan; empty before the first plan.
        work: work so far, see `Effort`.
    """

    def __init__(self, problem: Problem, allowed_C: Bools, deadline: float) -> None:
        self.problem = problem
        self.work = 0
        self.seconds = np.inf
        self.placements_T: list[TablePlacement] = []
        # For the best plan, which may use every allowed candidate.
        self._allowed_C = allowed_C
        self._deadline = deadline
        # Counts attempts: each one anneals with another seed, and a repeated search uses the same sequence.
        self._seed = 0

    def add_start(self, box: Box, admitted_C: Bools, squeeze_work: float = 0.0) -> InitialPlan | None:
        """Construct a plan by rounding the relaxation's optimum in a box, and keep it if it is the best.

        Args:
            admitted_C: mask of the candidates (ways to split a table) which the plan and its annealing may
                use.
            squeeze_work: work limit of `squeezed_plan`, if the plan does not fit into memory.

        Returns:
            The plan as a start, or None if it does not fit into memory or annealing is not available.
        """
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = construct(self.problem, box.num_tables_C, candidates_Y)
        if state is None and squeeze_work:
            state, work = squeezed_plan(
                self.problem, box.num_tables_C, candidates_Y, squeeze_work, self._deadline
            )
            self.work += work
        return None if state is None else self._started(state, admitted_C)

    def add_fitting(self, seconds: float) -> InitialPlan | None:
        """Construct a plan that balances memory over ranks, and keep it if it is the best.

        If the plan does not fit, it is annealed until it fits, for at most `seconds`.

        Returns:
            The initial plan, or None if no plan fits or annealing is not available.
        """
        # Its loads are bytes, so the plan is placed again below, with loads in seconds.
        by_memory = fitting_plan(self.problem, self._allowed_C, seconds)
        if by_memory is None:
            return None
        return self._started(State.of(self.problem, by_memory.plan), self._allowed_C)

    def best_start(self) -> InitialPlan | None:
        """Return the best plan as an initial plan whose annealing may use all allowed candidates.

        The result is None before the first plan, or if annealing is not available.
        """
        if not self.placements_T or not Annealer.supports(self.problem):
            return None
        return InitialPlan(
            self.placements_T, Annealer(self.problem, candidates_by_type(self.problem, self._allowed_C))
        )

    def _started(self, state: State, admitted_C: Bools) -> InitialPlan | None:
        """Keep a plan if it is the best, and return the plan as a start.

        The result is None if annealing is not available. The plan is kept anyway.
        """
        self._record_if_best(state)
        if not Annealer.supports(self.problem):
            return None
        return InitialPlan(state.plan, Annealer(self.problem, candidates_by_type(self.problem, admitted_C)))

    def attempt(self, start: InitialPlan, settings: AnnealingSettings, max_work: float) -> float:
        """Anneal a start, and keep the resulting plan if it is the best so far.

        Args:
            start: plan to anneal.
            settings: annealing settings.
            max_work: work limit, see `Effort`.

        Returns:
            Step time of the resulting plan in seconds, without latencies.
        """
        # Every attempt uses another seed, so that repeating a start explores other plans.
        self._seed += 1
        seconds = max(0.0, self._deadline - time.perf_counter())
        placements_T, work = start.annealer.improve(
            start.placements_T,
            max_work=int(min(max_work, WORK_PER_SECOND * seconds) / WORK_PER_RANK),
            seconds=seconds,
            start_temperature=settings.start_temperature,
            placement_share=settings.placement_share,
            exponent=settings.exponent,
            seed=self._seed,
        )
        self.work += WORK_PER_RANK * work
        state = State.of(self.problem, placements_T)
        self._record_if_best(state)
        return state.seconds

    def _record_if_best(self, state: State) -> None:
        """Add the state's work to the total, and store the plan if it fits and is faster than the best."""
        self.work += state.work
        # Counted once, even if the state is kept again.
        state.work = 0
        # The factor keeps the first of several equal plans, despite rounding.
        if state.seconds < self.seconds * (1 - 1e-12) and state.fits():
            self.seconds, self.placements_T = state.seconds, state.plan
