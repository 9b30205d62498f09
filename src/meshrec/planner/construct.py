"""Initial plans: round the relaxation's candidates, then place the largest pieces first."""

import time

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.problem import Problem
from meshrec.planner.state import State
from meshrec.planner.types import Bools, Floats, Ints

_NO_CAP = 1e30
_PARTS, _THRIFTY = (0.25, 0.5, 0.75, 1.0, 0.1), 1.02
"""Maximum piece sizes for memory-balanced plans, as fractions of the cap, and the allowed factor over a
table's minimum memory. Small pieces fill ranks evenly; large pieces need less memory in total.
"""
_BALANCE_WORK, _BALANCE_HOT = 2_000_000, 0.03
_FITTING_SECONDS = 1.0
_NEAR, _ATTEMPTS = 1.5, 3
"""Maximum multiple of the cap at which moving pieces still helps, and the number of attempts (each twice as
long).
"""


def candidates_by_type(problem: Problem, allowed_C: Bools) -> list[Ints]:
    """Return the allowed candidates per type, or all candidates of a type if none is allowed."""
    by_type = []
    for candidates in _split_by_type(problem):
        allowed = candidates[allowed_C[candidates]]
        by_type.append(allowed if len(allowed) else candidates)
    return by_type


def _split_by_type(problem: Problem) -> list[Ints]:
    """Return the candidate indices per table type, ascending."""
    candidates = np.arange(len(problem.type_C))
    return np.split(candidates, np.searchsorted(problem.type_C, np.arange(1, int(problem.type_C.max()) + 1)))


def round_choice(problem: Problem, share_C: Floats) -> Ints:
    """Select a candidate per table by rounding the relaxation.

    The relaxation gives a fractional number of tables per candidate. Round down, then increment the largest
    fractions until every table has a candidate.
    """
    choice_T = np.zeros(len(problem.type_T), np.int64)
    for kind, candidates in enumerate(_split_by_type(problem)):
        tables = np.flatnonzero(problem.type_T == kind)
        # The tolerance of the linear program may put an integer slightly below.
        counts = np.floor(share_C[candidates] + 1e-6).astype(int)
        fraction = share_C[candidates] - counts
        for index in np.argsort(-fraction, kind="stable")[: max(len(tables) - counts.sum(), 0)]:
            counts[index] += 1
        # An unsolved relaxation has zero shares.
        counts[int(np.argmax(share_C[candidates]))] += max(len(tables) - counts.sum(), 0)
        choice_T[tables] = np.repeat(candidates, counts)[: len(tables)]
    return choice_T


def table_order(problem: Problem, choice_T: Ints) -> Ints:
    """Return tables by their largest piece, descending."""
    size_C = problem.largest_load_CK().sum(axis=1)
    return np.argsort(-size_C[choice_T], kind="stable")


def construct(problem: Problem, share_C: Floats, candidates_Y: list[Ints]) -> State | None:
    """Place every table as the relaxation suggests, largest first.

    A table which does not fit that way is placed with another candidate.

    Args:
        problem: planning problem.
        share_C: tables per candidate in the relaxation, fractional.
        candidates_Y: candidates per type.

    Returns:
        The plan; None if memory does not suffice.
    """
    choice_T = round_choice(problem, share_C)
    state = State(problem, share_C @ problem.mean_load_CK())
    for table in table_order(problem, choice_T):
        rounded, alternatives = choice_T[table : table + 1], candidates_Y[problem.type_T[table]]
        if not assign_table(state, int(table), rounded) and not assign_table(state, int(table), alternatives):
            return None
    return state


def assign_table(state: State, table: int, candidates: Ints) -> bool:
    """Place a table with the cheapest candidate on the cheapest ranks.

    Args:
        state: plan under construction; changed in place.
        table: table index.
        candidates: candidate indices to try.

    Returns:
        Whether a candidate fits.
    """
    weight_K = state.weights()
    attempts = [state.cheapest_placement(table, int(candidate), weight_K) for candidate in candidates]
    feasible = [placed for placed in attempts if placed is not None]
    if feasible:
        state.add(table, min(feasible, key=lambda placed: placed.objective).parts)
    return bool(feasible)


def fitting_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State | None:
    """Return a memory-balanced plan which fits, regardless of speed; None if none is known. See
    `most_even_plan`.

    Args:
        problem: planning problem.
        allowed_C: allowed candidates; None: all.
        seconds: annealing time limit.
    """
    state = most_even_plan(problem, allowed_C, seconds)
    return state if state.seconds <= problem.memory_cap else None


def most_even_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State:
    """Return the first plan which fits, or else the one with the smallest maximum memory per rank.

    Loads of the returned state are bytes. If no constructed plan fits, they are annealed.

    Args:
        problem: planning problem.
        allowed_C: allowed candidates; None: all.
        seconds: annealing time limit.
    """
    deadline = time.perf_counter() + seconds
    in_bytes = problem._replace(
        memory_cap=_NO_CAP,
        common_C=problem.common_bytes_C,
        load_PK=problem.bytes_P[:, None],
        fixed_PK=problem.fixed_bytes_P[:, None],
    )
    fits_C = problem.can_fit_C() if allowed_C is None else allowed_C & problem.can_fit_C()
    starts: list[tuple[State, list[Ints]]] = []
    for some_C in (*(_thrifty(problem, fits_C, part) for part in _PARTS), fits_C):
        candidates_Y = candidates_by_type(problem, some_C)
        state = _spread(in_bytes, candidates_Y, problem.memory_cap)
        if state.seconds <= problem.memory_cap:
            return state
        starts.append((state, candidates_Y))
    starts.sort(key=lambda start: start[0].seconds)
    best = starts[0][0]
    for start, candidates_Y in starts:
        state = _annealed(start, candidates_Y, problem.memory_cap, deadline)
        best = min(best, state, key=lambda state: state.seconds)
        if best.seconds <= problem.memory_cap:
            break
    return best


def _thrifty(problem: Problem, fits_C: Bools, part: float) -> Bools:
    """Mask candidates with small pieces and close to minimum memory for their type.

    Small pieces have at most ``part`` of the cap. A type without such candidates uses the smallest candidate.
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
        assign_table(state, int(table), candidates_Y[in_bytes.type_T[table]])
    return state


def _annealed(state: State, candidates_Y: list[Ints], cap: float, deadline: float) -> State:
    """Anneal a plan slightly above the cap, to spread memory more evenly."""
    for seed in range(_ATTEMPTS):
        seconds = deadline - time.perf_counter()
        if not cap < state.seconds < _NEAR * cap or seconds <= 0 or not Annealer.supports(state.problem):
            break
        parts_T, _ = Annealer(state.problem, candidates_Y).improve(
            state.plan, max_work=_BALANCE_WORK << seed, seconds=seconds, hot=_BALANCE_HOT, seed=seed
        )
        state = State(state.problem)
        for table, parts in enumerate(parts_T):
            state.add(table, parts)
    return state
