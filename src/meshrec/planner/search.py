"""Better and better plans: starts from relaxations, then repeated small disturbances of the best plan."""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.bound import Box
from meshrec.planner.construct import candidates_by_type, construct, fitting_plan, table_order
from meshrec.planner.local_search import exchange, reinsert
from meshrec.planner.polish import polish
from meshrec.planner.problem import Problem
from meshrec.planner.relaxation import FEW_CANDIDATES, MOST_CANDIDATES
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools, Ints

_EXPONENTS = (8, 16, 32, 64)
_KICK_EXPONENT = 64
_WORSE = 1.002
"""A disturbed plan that is this much slower than the best may still be the next one to disturb."""
_PATIENCE = 40
"""Disturbances in a row without a better plan before the search returns to the best one."""
_MOVES_PER_PIECE, _MOVES_PER_PIECE_OF_MANY, _MOVES_PER_PIECE_OF_VERY_MANY = 4000, 12_000, 8000
_LEAST_MOVES = 300_000
_MOST_FIRSTS = 2
"""Plans that later attempts start from in turn, beside the best."""
_WORK_PER_MOVE = 5
_CLOSE = 1.02
"""Plans that are this much slower than the best are worth exact sizes."""
_HOTS, _HOTS_OF_MANY, _HOTS_OF_VERY_MANY = (0.01, 0.2, 0.03, 0.1), (0.003, 0.0015), (0.001, 0.0005)
"""Temperatures to start from, in turn at first: which one serves best depends on the tables. Few kinds of
tables go together in few ways, and short hot attempts find them; many kinds need patience."""
_COLD, _SHORTER, _SETTLING_EXPONENT = 0.001, 8, 32
"""The temperature at which a plan settles; how much shorter attempts are that do, and with which exponent:
where ranks hold few pieces, it is the slowest one that counts from the start."""
_PLACE_SHARE, _PLACE_SHARE_OF_MANY, _PLACE_SHARE_OF_VERY_MANY = 1.0, 0.05, 0.01
"""The most of the annealing's work that places tables anew. With many ranks one such move costs as much as
hundreds of exchanges, and it is these that pack many kinds of tables."""
_SEVERAL_SHARE, _SEVERAL_SHARE_OF_VERY_MANY, _MANY_RANKS = 0.25, 0.3, 32
"""The part of the annealing's moves that change several pieces at once, where ranks hold several: of few
candidates on more ranks than these, or of very many candidates. Elsewhere they lead to worse plans."""
_EXPONENT, _LATE_EXPONENT = 4, 64
_STAGES = ((16.0, 0.003, _EXPONENT), (4.0, 0.003, 32))
"""Where candidates are very many, how a plan begins: how many times its seconds the largest phase counts for,
the temperature, and the exponent. That phase is of whole columns, of which a rank holds some number; plans
that begin with one too many keep to that. Later attempts are with the true seconds and `_LATE_EXPONENT`."""


class Effort(NamedTuple):
    """When to stop: seconds of wall clock, work, and the gap (a fraction) that is good enough.

    Work is counted in array elements touched, with a surcharge per operation: about 10 ns each.
    """

    time_limit: float
    max_work: float
    gap: float


class Search:
    """The best plan so far, and what makes it better.

    Attributes:
        seconds, parts_T: the best plan; no parts before the first.
        work: the work done so far.
    """

    def __init__(
        self, problem: Problem, allowed_C: Bools, effort: Effort, deadline: float | None = None
    ) -> None:
        self.problem = problem
        self.effort = effort
        self.work = 0
        self.seconds = np.inf
        self.parts_T: list[Parts] = []
        self._allowed_C = allowed_C
        self._candidates_Y = candidates_by_type(problem, allowed_C)
        self._deadline = time.perf_counter() + effort.time_limit if deadline is None else deadline
        self._annealer = Annealer(problem, self._candidates_Y) if Annealer.serves(problem) else None
        self._seed = 0
        few = len(problem.type_C) <= FEW_CANDIDATES
        self._hots = _HOTS if few else _HOTS_OF_MANY
        self._moves_per_piece = _MOVES_PER_PIECE if few else _MOVES_PER_PIECE_OF_MANY
        self._place_share = _PLACE_SHARE if few else _PLACE_SHARE_OF_MANY
        self._exponent = _EXPONENT
        self._has_stages = len(problem.type_C) > MOST_CANDIDATES
        holds_several = few and problem.num_ranks > _MANY_RANKS and len(problem.type_T) > problem.num_ranks
        self._several_share = _SEVERAL_SHARE if holds_several else 0.0
        if self._has_stages:
            self._hots = _HOTS_OF_VERY_MANY
            self._moves_per_piece = _MOVES_PER_PIECE_OF_VERY_MANY
            self._place_share = _PLACE_SHARE_OF_VERY_MANY
            self._several_share = _SEVERAL_SHARE_OF_VERY_MANY
        self._firsts: list[list[Parts]] = []
        self._seconds_by_hot: dict[float, float] = {}
        self._random = np.random.default_rng(0)
        self._current: State | None = None
        self._failures = 0

    @property
    def is_spent(self) -> bool:
        """Whether the work or the time is used up."""
        return self.work >= self.effort.max_work or time.perf_counter() >= self._deadline

    def start_from(self, box: Box, admitted_C: Bools, *, short_attempts: int = 0) -> None:
        """A plan from a box's relaxation, improved with the candidates that the box admits: in one long
        attempt, or in some short ones that settle, each at a low temperature once more."""
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = self.construct_from(box, admitted_C)
        if state is None or self.is_spent:
            return
        if self._annealer is not None:
            parts_T = [parts for parts in state.parts_T if parts is not None]
            if self._has_stages:
                self._anneal_in_stages(box, parts_T, candidates_Y)
                return
            if len(self._firsts) < _MOST_FIRSTS:
                self._firsts.append(parts_T)
            annealer = Annealer(self.problem, candidates_Y)
            if not short_attempts:
                self._anneal(annealer, parts_T, self._next_hot())
            for _ in range(short_attempts):
                if self.is_spent:
                    break
                state = self._anneal(annealer, parts_T, self._next_hot(), settles=True)
                found_T = [parts for parts in state.parts_T if parts is not None]
                self._anneal(annealer, found_T, _COLD, settles=True)
            return
        for exponent in _EXPONENTS:
            if self.is_spent:
                break
            state.set_exponent(exponent)
            self._exchange(state)
            self._reinsert_all(state, candidates_Y)
        self._settle(state)

    def construct_from(self, box: Box, admitted_C: Bools) -> State | None:
        """A plan from a box's relaxation, as it comes; None where it does not fit into memory."""
        candidates_Y = candidates_by_type(self.problem, admitted_C)
        state = construct(self.problem, box.share_C, candidates_Y) or self._fitting()
        if state is not None:
            self._keep(state)
        return state

    def refine(self) -> None:
        """Another attempt at a plan that is better than the best."""
        if self._annealer is None:
            self.disturb()
            return
        starts = (*self._firsts, self.parts_T)
        self._anneal(self._annealer, starts[self._seed // len(self._hots) % len(starts)], self._next_hot())

    def _anneal_in_stages(self, box: Box, parts_T: list[Parts], candidates_Y: list[Ints]) -> None:
        """See `_STAGES`."""
        load_PK, fixed_PK = self.problem.load_PK, self.problem.fixed_PK
        for factor, hot, self._exponent in _STAGES:
            factor_K = np.ones(len(box.slowest_K))
            factor_K[box.slowest_K.argmax()] = factor
            problem = self.problem._replace(load_PK=load_PK * factor_K, fixed_PK=fixed_PK * factor_K)
            self._annealer = Annealer(problem, candidates_Y)
            state = self._anneal(self._annealer, parts_T, hot)
            parts_T = [parts for parts in state.parts_T if parts is not None]
            if self.is_spent:
                break
        self._annealer, self._exponent = Annealer(self.problem, candidates_Y), _LATE_EXPONENT

    def _next_hot(self) -> float:
        """In turn; then every other time the temperature that has led to the best plan."""
        hots, seconds_by_hot = self._hots, self._seconds_by_hot
        if len(seconds_by_hot) < len(hots):
            return hots[self._seed % len(hots)]
        turn, again = divmod(self._seed, 2)
        return min(seconds_by_hot, key=lambda hot: seconds_by_hot[hot]) if again else hots[turn % len(hots)]

    def _anneal(
        self, annealer: Annealer, parts_T: list[Parts], hot: float, *, settles: bool = False
    ) -> State:
        """Improves a plan, then its sizes exactly; returns it, and keeps it if it is the best."""
        pieces = sum(len(parts.rank_N) for parts in parts_T)
        left = max(0.0, self.effort.max_work - self.work) / _WORK_PER_MOVE
        moves = max(_LEAST_MOVES, self._moves_per_piece * pieces)
        moves = min(moves // _SHORTER if settles else moves, int(left))
        seconds = max(0.0, self._deadline - time.perf_counter())
        self._seed += 1
        found, work = annealer.improve(
            parts_T,
            max_work=moves,
            seconds=seconds,
            hot=hot,
            seed=self._seed,
            place_share=self._place_share,
            several_share=self._several_share,
            exponent=_SETTLING_EXPONENT if settles else self._exponent,
        )
        self.work += _WORK_PER_MOVE * work
        state = self._state_of(found)
        is_worth_it = (settles or state.seconds < self.seconds * _CLOSE) and not self.is_spent
        if is_worth_it and not polish(state) and self._has_stages:
            polish(state, rows_only=True)
        self._seconds_by_hot[hot] = min(state.seconds, self._seconds_by_hot.get(hot, np.inf))
        self._keep(state)
        return state

    def disturb(self) -> None:
        """Places a few tables of the slowest ranks anew, lets everything settle, keeps what is better."""
        state = self._current
        if state is None or self._failures >= _PATIENCE:
            state = self._restored()
        before = [parts for parts in state.parts_T if parts is not None]
        tables = self._some_tables(state)
        for table in tables:
            state.remove(int(table))
        for table in tables:
            reinsert(state, int(table), self._candidates_Y[self.problem.type_T[table]])
        if any(parts is None for parts in state.parts_T):
            self._current = None
            self._spend(state)
            return
        self._exchange(state)
        if state.seconds < self.seconds * 1.05:
            self._settle(state)
        accepted = state.seconds < self.seconds * _WORSE and state.fits()
        self._current = state if accepted else None
        if not accepted:
            self._failures += 1
            self._current = self._state_of(before) if self._failures < _PATIENCE else None
        self._spend(state)

    def _settle(self, state: State) -> None:
        for _ in range(3):
            if self.is_spent or not polish(state):
                break
            state.set_exponent(_KICK_EXPONENT)
            self._exchange(state)
        self._keep(state)

    def _some_tables(self, state: State) -> Ints:
        """A few tables: from the slowest rank of some phase, and from anywhere."""
        phase = int(self._random.integers(state.num_phases))
        rank = int(state.load_RK[:, phase].argmax())
        here = [
            table for table, parts in enumerate(state.parts_T) if parts is not None and rank in parts.rank_N
        ]
        count = int(self._random.integers(1, 4))
        picked = self._random.choice(here, min(count, len(here)), replace=False) if here else np.zeros(0)
        others = self._random.choice(len(state.parts_T), min(count, len(state.parts_T)), replace=False)
        chosen = np.unique(np.concatenate((picked, others)).astype(np.int64))
        return np.asarray(self._random.permutation(chosen), np.int64)

    def _exchange(self, state: State) -> None:
        exchange(state, int(self.effort.max_work / 10))
        self._keep(state)

    def _reinsert_all(self, state: State, candidates_Y: list[Ints]) -> None:
        choice_T = np.array([parts.candidate for parts in state.parts_T if parts is not None])
        for table in table_order(self.problem, choice_T):
            if self.is_spent:
                break
            reinsert(state, int(table), candidates_Y[self.problem.type_T[table]])
            self._spend(state)
        self._keep(state)

    def _fitting(self) -> State | None:
        by_memory = fitting_plan(self.problem, self._allowed_C) if not self.parts_T else None
        if by_memory is None:
            return None
        return self._state_of([parts for parts in by_memory.parts_T if parts is not None])

    def _restored(self) -> State:
        self._failures = 0
        return self._state_of(self.parts_T)

    def _state_of(self, parts_T: list[Parts]) -> State:
        state = State(self.problem, np.ones(self.problem.load_PK.shape[1]))
        for table, parts in enumerate(parts_T):
            state.add(table, parts)
        state.set_exponent(_KICK_EXPONENT)
        return state

    def _keep(self, state: State) -> None:
        self._spend(state)
        if state.seconds < self.seconds * (1 - 1e-12) and state.fits():
            self.seconds = state.seconds
            self.parts_T = [parts for parts in state.parts_T if parts is not None]
            self._failures = 0

    def _spend(self, state: State) -> None:
        self.work += state.work
        state.work = 0
