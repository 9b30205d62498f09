"""The solver: a first plan in a moment, then better plans and a better bound until the work is done.

Anytime and deterministic: effort is counted in touched array elements, so the result depends on the input
and on `max_work` alone, unless the clock runs out first.
"""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.bound import Box, LowerBound
from meshrec.planner.construct import candidates_by_type, construct, table_order
from meshrec.planner.local_search import exchange, reinsert
from meshrec.planner.polish import polish
from meshrec.planner.problem import Problem
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools

_EXPONENTS = (8, 16, 32, 64)


class Effort(NamedTuple):
    """When to stop: seconds of wall clock, touched array elements, and the gap (a fraction) that is good
    enough."""

    time_limit: float
    max_work: float
    gap: float


class Solution(NamedTuple):
    """The best plan found, and what no plan can beat; both without latencies."""

    parts_T: list[Parts]
    seconds: float
    lower_bound: float
    work: int
    num_boxes: int


class _Search:
    def __init__(self, problem: Problem, allowed_C: Bools, effort: Effort, fixed_seconds: float) -> None:
        self.problem = problem
        self.allowed_C = allowed_C
        self.effort = effort
        self.fixed_seconds = fixed_seconds
        self.deadline = time.perf_counter() + effort.time_limit
        self.work = 0
        self.best: State | None = None
        self.best_parts: list[Parts] = []
        self.seconds = np.inf

    def is_over(self, lower_bound: float) -> bool:
        if self.work >= self.effort.max_work or time.perf_counter() >= self.deadline:
            return True
        return self.seconds - lower_bound <= self.effort.gap * (self.seconds + self.fixed_seconds)

    def improve(self, box: Box, admitted_C: Bools) -> None:
        """A plan from a box's relaxation, improved."""
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = construct(self.problem, box.share_C, candidates_Y) or self._fitting()
        if state is None:
            return
        self._keep(state)
        choice_T = np.array([parts.candidate for parts in state.parts_T if parts is not None])
        order = table_order(self.problem, choice_T)
        budget = int(self.effort.max_work / 20)
        for exponent in _EXPONENTS:
            state.set_exponent(exponent)
            exchange(state, budget)
            self._keep(state)
            end = state.work + budget
            for table in order:
                if state.work >= end or time.perf_counter() >= self.deadline:
                    break
                reinsert(state, int(table), candidates_Y[self.problem.type_T[table]])
            self._keep(state)
        for _ in range(3):
            if not polish(state):
                break
            self._keep(state)
            state.set_exponent(_EXPONENTS[-1])
            exchange(state, budget)
            self._keep(state)
        self.work += state.work

    def _fitting(self) -> State | None:
        by_memory = fitting_plan(self.problem, self.allowed_C) if self.seconds == np.inf else None
        if by_memory is None:
            return None
        state = State(self.problem, np.ones(self.problem.load_PK.shape[1]))
        for table, parts in enumerate(by_memory.parts_T):
            assert parts is not None
            state.add(table, parts)
        state.set_exponent(_EXPONENTS[0])
        return state

    def _keep(self, state: State) -> None:
        if state.seconds < self.seconds and state.fits():
            self.seconds = state.seconds
            self.best_parts = [parts for parts in state.parts_T if parts is not None]


def fitting_plan(problem: Problem, allowed_C: Bools | None = None) -> State | None:
    """A plan that spreads memory, whatever its speed (the state's loads are bytes); None where none was
    found."""
    in_bytes = problem._replace(
        common_C=problem.common_bytes_C,
        load_PK=problem.bytes_P[:, None],
        fixed_PK=problem.fixed_bytes_P[:, None],
    )
    allowed_C = np.ones(len(problem.type_C), bool) if allowed_C is None else allowed_C
    candidates_Y = candidates_by_type(problem, allowed_C)
    state = State(in_bytes, np.array([1 / max(float(problem.memory_cap), 1.0)]))
    size_C = in_bytes.mean_bytes_C()
    for table in np.argsort([-size_C[candidates_Y[kind]].min() for kind in problem.type_T], kind="stable"):
        reinsert(state, int(table), candidates_Y[problem.type_T[table]])
        if state.parts_T[table] is None:
            return None
    state.set_exponent(_EXPONENTS[-1])
    exchange(state, 10_000_000)
    return state


def solve(problem: Problem, allowed_C: Bools, effort: Effort, fixed_seconds: float) -> Solution | None:
    """The best plan that uses `allowed_C`; None where no plan was found that fits into memory.

    `fixed_seconds`: latencies, which count in the gap.
    """
    search = _Search(problem, allowed_C, effort, fixed_seconds)
    scale = float(problem.mean_load_CK().sum() + problem.common_C.max(initial=0.0)) or 1.0
    root = LowerBound(problem, allowed_C, scale)
    box = root.best_box
    if box is None:
        return None
    search.improve(box, allowed_C)
    if not search.best_parts:
        return None
    bound = LowerBound(problem, allowed_C, search.seconds)
    bound_value = bound.value
    while not search.is_over(bound.value):
        for _ in range(200):
            search.work += 200 * len(problem.type_C)
            if bound.value >= search.seconds or not bound.branch():
                break
        bound_value = max(bound_value, min(bound.value, search.seconds))
        box = bound.best_box
        if box is None or bound.value >= search.seconds:
            break
        search.improve(box, bound.allowed(box))
        bound.close_best()
    bound_value = max(bound_value, min(bound.value, search.seconds))
    return Solution(
        search.best_parts,
        search.seconds,
        max(bound_value, min(bound.value, search.seconds)),
        search.work,
        bound.num_solves,
    )
