"""A first plan: round the relaxation's choice of candidates, and place the largest pieces first."""

import time

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.problem import Problem
from meshrec.planner.state import State
from meshrec.planner.types import Bools, Floats, Ints

_NO_CAP = 1e30
_PARTS, _THRIFTY = (0.25, 0.5, 0.75, 1.0, 0.1), 1.02
"""Largest pieces of plans that spread memory, as shares of the cap, and the factor over a table's least
memory.

Small pieces fill ranks evenly; large ones take less memory in all.
"""
_BALANCE_WORK, _BALANCE_HOT = 2_000_000, 0.03
_FITTING_SECONDS = 1.0
_NEAR, _ATTEMPTS = 1.5, 3
"""The largest multiple of the cap at which moving pieces still helps, and the number of attempts, each twice
as long.
"""


def candidates_by_type(problem: Problem, allowed_C: Bools) -> list[Ints]:
    """Return the allowed candidates of each type, or all of them if none is allowed."""
    found = []
    for candidates in _of_each_type(problem):
        some = candidates[allowed_C[candidates]]
        found.append(some if len(some) else candidates)
    return found


def _of_each_type(problem: Problem) -> list[Ints]:
    candidates = np.arange(len(problem.type_C))
    return np.split(candidates, np.searchsorted(problem.type_C, np.arange(1, int(problem.type_C.max()) + 1)))


def round_choice(problem: Problem, share_C: Floats) -> Ints:
    """Return a candidate for each table.

    The relaxation gives each candidate a fractional number of tables. They are rounded down, and the largest
    fractions up until each table has a candidate.
    """
    choice_T = np.zeros(len(problem.type_T), np.int64)
    for kind, candidates in enumerate(_of_each_type(problem)):
        tables = np.flatnonzero(problem.type_T == kind)
        counts = np.floor(share_C[candidates] + 1e-6).astype(int)
        rest = share_C[candidates] - counts
        for index in np.argsort(-rest, kind="stable")[: max(len(tables) - counts.sum(), 0)]:
            counts[index] += 1
        # A relaxation that could not be solved has no shares.
        counts[int(np.argmax(share_C[candidates]))] += max(len(tables) - counts.sum(), 0)
        choice_T[tables] = np.repeat(candidates, counts)[: len(tables)]
    return choice_T


def table_order(problem: Problem, choice_T: Ints) -> Ints:
    """Return the tables by the size of their largest piece, largest first."""
    size_C = problem.largest_load_CK().sum(axis=1)
    return np.argsort(-size_C[choice_T], kind="stable")


def construct(problem: Problem, share_C: Floats, candidates_Y: list[Ints]) -> State | None:
    """Place every table as the relaxation's `share_C` says, the largest first.

    A table that does not fit that way is split in another way of `candidates_Y`. Returns None if the memory
    does not suffice.
    """
    choice_T = round_choice(problem, share_C)
    state = State(problem, share_C @ problem.mean_load_CK())
    for table in table_order(problem, choice_T):
        chosen, others = choice_T[table : table + 1], candidates_Y[problem.type_T[table]]
        if not place(state, int(table), chosen) and not place(state, int(table), others):
            return None
    return state


def place(state: State, table: int, candidates: Ints) -> bool:
    """Place a table with the cheapest of `candidates` at its cheapest places. Return whether one of them has
    room.
    """
    weight_K = state.weights()
    tried = [state.best_place(table, int(candidate), weight_K) for candidate in candidates]
    found = [placed for placed in tried if placed is not None]
    if found:
        state.add(table, min(found, key=lambda placed: placed.objective).parts)
    return bool(found)


def fitting_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State | None:
    """Return a plan that spreads memory, whatever its speed; None if none was found. See `most_even_plan`."""
    state = most_even_plan(problem, allowed_C, seconds)
    return state if state.seconds <= problem.memory_cap else None


def most_even_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State:
    """Return the first plan found that fits, or else the one whose fullest rank holds the least.

    The loads of the returned state are bytes. If none of the plans made at once fits, they are annealed for
    `seconds`.
    """
    deadline = time.perf_counter() + seconds
    in_bytes = problem._replace(
        memory_cap=_NO_CAP,
        common_C=problem.common_bytes_C,
        load_PK=problem.bytes_P[:, None],
        fixed_PK=problem.fixed_bytes_P[:, None],
    )
    fits_C = problem.can_fit_C() if allowed_C is None else allowed_C & problem.can_fit_C()
    found: list[tuple[State, list[Ints]]] = []
    for some_C in (*(_thrifty(problem, fits_C, part) for part in _PARTS), fits_C):
        candidates_Y = candidates_by_type(problem, some_C)
        state = _spread(in_bytes, candidates_Y, problem.memory_cap)
        if state.seconds <= problem.memory_cap:
            return state
        found.append((state, candidates_Y))
    found.sort(key=lambda each: each[0].seconds)
    best = found[0][0]
    for start, candidates_Y in found:
        state = _annealed(start, candidates_Y, problem.memory_cap, deadline)
        best = min(best, state, key=lambda state: state.seconds)
        if best.seconds <= problem.memory_cap:
            break
    return best


def _thrifty(problem: Problem, fits_C: Bools, part: float) -> Bools:
    """Return the candidates with small pieces and about the least memory of their type, as a mask.

    Small pieces are those of at most ``part`` of the cap. A type without such candidates uses its smallest.
    """
    piece_C, mean_C = problem.piece_bytes_C(), problem.mean_bytes_C()
    num_types = int(problem.type_C[-1]) + 1
    least_Y, thrifty_Y = np.full(num_types, np.inf), np.full(num_types, np.inf)
    np.minimum.at(least_Y, problem.type_C[fits_C], piece_C[fits_C])
    small_C = fits_C & (piece_C <= np.maximum(part * problem.memory_cap, least_Y[problem.type_C]))
    np.minimum.at(thrifty_Y, problem.type_C[small_C], mean_C[small_C])
    return np.asarray(small_C & (mean_C <= _THRIFTY * thrifty_Y[problem.type_C]))


def _spread(in_bytes: Problem, candidates_Y: list[Ints], cap: float) -> State:
    state = State(in_bytes, np.array([float(cap)]))
    size_C = in_bytes.largest_load_CK()[:, 0]
    for table in np.argsort([-size_C[candidates_Y[kind]].min() for kind in in_bytes.type_T], kind="stable"):
        place(state, int(table), candidates_Y[in_bytes.type_T[table]])
    return state


def _annealed(state: State, candidates_Y: list[Ints], cap: float, deadline: float) -> State:
    """Anneal a plan that is a little over the cap, so that its memory is spread more evenly."""
    for seed in range(_ATTEMPTS):
        seconds = deadline - time.perf_counter()
        if not cap < state.seconds < _NEAR * cap or seconds <= 0 or not Annealer.serves(state.problem):
            break
        parts_T, _ = Annealer(state.problem, candidates_Y).improve(
            state.plan, max_work=_BALANCE_WORK << seed, seconds=seconds, hot=_BALANCE_HOT, seed=seed
        )
        state = State(state.problem)
        for table, parts in enumerate(parts_T):
            state.add(table, parts)
    return state
