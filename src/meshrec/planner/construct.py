"""A first plan: the relaxation's choice of candidates, rounded, and the largest pieces placed first."""

import time
from typing import NamedTuple

import numpy as np

from meshrec.planner.anneal import Annealer
from meshrec.planner.polish import polish
from meshrec.planner.problem import Problem, Scope
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools, Floats, Ints

_NO_CAP = 1e30
_PARTS, _THRIFTY = (0.25, 0.5, 0.75, 1.0, 0.1), 1.02
"""Of the cap: the largest pieces of plans that spread memory. Small ones fill ranks evenly, large ones take
less memory in all; how much more than the least a table may take."""
_BALANCE_EXPONENT, _BALANCE_WORK, _BALANCE_HOT = 64, 2_000_000, 0.03
_FITTING_SECONDS = 1.0
_NEAR, _ATTEMPTS = 1.5, 3
"""Of the cap: where a first plan takes more, moving its pieces does not help. Else each attempt is twice as
long as the one before."""


def candidates_by_type(problem: Problem, allowed_C: Bools) -> list[Ints]:
    """The allowed candidates of each type; all of them where none is allowed."""
    found = []
    for candidates in _of_each_type(problem):
        some = candidates[allowed_C[candidates]]
        found.append(some if len(some) else candidates)
    return found


def _of_each_type(problem: Problem) -> list[Ints]:
    candidates = np.arange(len(problem.type_C))
    return np.split(candidates, np.searchsorted(problem.type_C, np.arange(1, int(problem.type_C.max()) + 1)))


def round_choice(problem: Problem, share_C: Floats) -> Ints:
    """A candidate for each table: the relaxation's numbers of tables per candidate, the largest fractions
    rounded up.
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
    """Tables by the size of their largest piece, largest first."""
    size_C = problem.largest_load_CK().sum(axis=1)
    return np.argsort(-size_C[choice_T], kind="stable")


def construct(problem: Problem, share_C: Floats, candidates_Y: list[Ints]) -> State | None:
    """Places every table as the relaxation's `share_C` says, the largest first; one that finds no place in
    another way of `candidates_Y`. None where the memory does not suffice."""
    target_K = share_C @ problem.mean_load_CK()
    choice_T = round_choice(problem, share_C)
    state = State(problem, 1 / np.maximum(target_K, 1e-3 * problem.load_PK.max(axis=0, initial=0) + 1e-30))
    for table in table_order(problem, choice_T):
        reinsert(state, int(table), choice_T[table : table + 1])
        if state.parts_T[table] is None:
            reinsert(state, int(table), candidates_Y[problem.type_T[table]])
        if state.parts_T[table] is None:
            return None
    return state


def fitting_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State | None:
    """A plan that spreads memory, whatever its speed (the state's loads are bytes); None where none was
    found: `most_even_plan`."""
    state = most_even_plan(problem, allowed_C, seconds)
    return state if state.seconds <= problem.memory_cap else None


def most_even_plan(
    problem: Problem, allowed_C: Bools | None = None, seconds: float = _FITTING_SECONDS
) -> State:
    """The first plan found that fits, else the one whose fullest rank has the least (loads are bytes).

    What has not enough room in any of the plans made at once is annealed for so many `seconds`.
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
    for state, candidates_Y in found:
        _anneal_spread(state, candidates_Y, problem.memory_cap, deadline)
        if state.seconds <= problem.memory_cap:
            return state
    return min((state for state, _ in found), key=lambda state: state.seconds)


def _thrifty(problem: Problem, fits_C: Bools, part: float) -> Bools:
    """Which candidates take about as little memory as any of their type whose pieces are small.

    Small are pieces of at most ``part`` of the cap; where a type has none, its smallest.
    """
    piece_C, mean_C = problem.piece_bytes_C(), problem.mean_bytes_C()
    num_types = int(problem.type_C[-1]) + 1
    least_Y, thrifty_Y = np.full(num_types, np.inf), np.full(num_types, np.inf)
    np.minimum.at(least_Y, problem.type_C[fits_C], piece_C[fits_C])
    small_C = fits_C & (piece_C <= np.maximum(part * problem.memory_cap, least_Y[problem.type_C]))
    np.minimum.at(thrifty_Y, problem.type_C[small_C], mean_C[small_C])
    return np.asarray(small_C & (mean_C <= _THRIFTY * thrifty_Y[problem.type_C]))


def _spread(in_bytes: Problem, candidates_Y: list[Ints], cap: float) -> State:
    state = State(in_bytes, np.array([1 / max(float(cap), 1.0)]))
    size_C = in_bytes.largest_load_CK()[:, 0]
    for table in np.argsort([-size_C[candidates_Y[kind]].min() for kind in in_bytes.type_T], kind="stable"):
        reinsert(state, int(table), candidates_Y[in_bytes.type_T[table]])
    state.set_exponent(_BALANCE_EXPONENT)
    exchange(state, 5 * _BALANCE_WORK)
    return state


def _anneal_spread(state: State, candidates_Y: list[Ints], cap: float, deadline: float) -> None:
    """Anneals a plan that is a little over the cap, so that its memory is spread more evenly."""
    for seed in range(_ATTEMPTS):
        seconds = deadline - time.perf_counter()
        if not cap < state.seconds < _NEAR * cap or seconds <= 0 or not Annealer.serves(state.problem):
            break
        parts_T, _ = Annealer(state.problem, candidates_Y).improve(
            [parts for parts in state.parts_T if parts is not None],
            max_work=_BALANCE_WORK << seed,
            seconds=seconds,
            hot=_BALANCE_HOT,
            seed=seed,
        )
        for table, parts in enumerate(parts_T):
            state.remove(table)
            state.add(table, parts)
        polish(state)


_TOLERANCE = 1e-9


def reinsert(state: State, table: int, candidates: Ints) -> bool:
    """Places a table as well as any of `candidates` allows; whether that changed anything.

    A table that has no place yet must find one: ValueError-free callers check `parts_T` afterwards.
    """
    before = state.smooth
    old = state.remove(table) if state.parts_T[table] is not None else None
    weight_K = state.weights()
    best = None
    for candidate in candidates:
        placed = state.best_place(table, int(candidate), weight_K)
        if placed is not None and (best is None or placed.objective < best.objective):
            best = placed
    if old is not None and (best is None or best.objective >= before * (1 - _TOLERANCE)):
        state.add(table, old)
        return False
    if best is not None:
        state.add(table, best.parts)
    return best is not None


class _MovablePieces(NamedTuple):
    """Pieces that may move one by one."""

    table_N: Ints
    slot_N: Ints
    rank_N: Ints
    load_NK: Floats
    bytes_N: Floats


def exchange(state: State, max_work: int) -> None:
    """Moves and exchanges pieces, the most loaded rank's first, until nothing helps or the work is done."""
    pieces = _movable(state)
    if not len(pieces.table_N):
        return
    holds_TR = np.zeros((len(state.parts_T), state.problem.num_ranks), bool)
    holds_TR[pieces.table_N, pieces.rank_N] = True
    allowed_TR = _allowed(state)
    stuck_R = np.zeros(state.problem.num_ranks, bool)
    end = state.work + max_work
    while state.work < end:
        weight_K = state.weights()
        pressure_R = state.power_RK @ weight_K
        pressure_R[stuck_R] = -1.0
        rank = int(pressure_R.argmax())
        if pressure_R[rank] < 0:
            break
        here = np.flatnonzero(pieces.rank_N == rank)
        move = _best_move(state, pieces, here, rank, weight_K, holds_TR, allowed_TR) if len(here) else None
        if move is None:
            stuck_R[rank] = True
            continue
        piece, other, target = move
        _apply(state, pieces, holds_TR, piece, other, target)
        stuck_R[[rank, target]] = False
    _write_back(state, pieces)


def _movable(state: State) -> _MovablePieces:
    tables, slots, ranks, loads, sizes = [], [], [], [], []
    for table, parts in enumerate(state.parts_T):
        if parts is None or state.problem.layouts_C[parts.candidate].scope is not Scope.RANKS:
            continue
        count = len(parts.rank_N)
        tables.append(np.full(count, table))
        slots.append(np.arange(count))
        ranks.append(parts.rank_N)
        loads.append(state.loads(parts))
        sizes.append(state.sizes(parts))
    if not tables:
        none = np.zeros(0, np.int64)
        return _MovablePieces(none, none, none, np.zeros((0, state.num_phases)), np.zeros(0))
    return _MovablePieces(
        np.concatenate(tables),
        np.concatenate(slots),
        np.concatenate(ranks),
        np.concatenate(loads),
        np.concatenate(sizes),
    )


def _allowed(state: State) -> Bools | None:
    problem = state.problem
    if all(mask is None for mask in problem.ranks_Y):
        return None
    full = np.ones(problem.num_ranks, bool)
    masks_YR = np.stack([full if mask is None else mask for mask in problem.ranks_Y])
    allowed: Bools = masks_YR[problem.type_T]
    return allowed


def _best_move(
    state: State,
    pieces: _MovablePieces,
    here: Ints,
    rank: int,
    weight_K: Floats,
    holds_TR: Bools,
    allowed_TR: Bools | None,
) -> tuple[int, int | None, int] | None:
    """The best (piece of `rank`, piece it is exchanged with or None, target rank); None where nothing
    helps."""
    load_RK, power_RK = state.load_RK, state.power_RK
    room_R = state.problem.memory_cap - state.common_bytes - state.bytes_R
    load_AK, bytes_A, table_A = pieces.load_NK[here], pieces.bytes_N[here], pieces.table_N[here]
    state.work += 15_000 + 2 * len(here) * (len(load_RK) + 2 * len(pieces.rank_N)) * state.num_phases

    away_A = (state.power(load_RK[rank] - load_AK) - power_RK[rank]) @ weight_K
    there_AR = (state.power(load_RK + load_AK[:, None]) - power_RK) @ weight_K
    shift_AR = away_A[:, None] + there_AR
    blocked_AR = holds_TR[table_A] | (bytes_A[:, None] > room_R)
    if allowed_TR is not None:
        blocked_AR |= ~allowed_TR[table_A]
    shift_AR[blocked_AR] = np.inf

    rank_N = pieces.rank_N
    gain_ANK = pieces.load_NK - load_AK[:, None]
    swap_AN = (state.power(load_RK[rank] + gain_ANK) - power_RK[rank]) @ weight_K
    swap_AN += (state.power(load_RK[rank_N] - gain_ANK) - power_RK[rank_N]) @ weight_K
    grown_AN = pieces.bytes_N - bytes_A[:, None]
    blocked_AN = holds_TR[table_A][:, rank_N] | holds_TR[pieces.table_N, rank] | (rank_N == rank)
    blocked_AN |= (grown_AN > room_R[rank]) | (-grown_AN > room_R[rank_N])
    if allowed_TR is not None:
        blocked_AN |= ~allowed_TR[table_A][:, rank_N] | ~allowed_TR[pieces.table_N, rank]
    swap_AN[blocked_AN] = np.inf

    shift, swap = int(shift_AR.argmin()), int(swap_AN.argmin())
    best = min(shift_AR.flat[shift], swap_AN.flat[swap])
    if not best < -_TOLERANCE * state.smooth:
        return None
    if shift_AR.flat[shift] <= swap_AN.flat[swap]:
        row, target = divmod(shift, shift_AR.shape[1])
        return int(here[row]), None, target
    row, other = divmod(swap, swap_AN.shape[1])
    return int(here[row]), other, int(rank_N[other])


def _apply(
    state: State, pieces: _MovablePieces, holds_TR: Bools, piece: int, other: int | None, target: int
) -> None:
    source = int(pieces.rank_N[piece])
    for moved, start, end in ((piece, source, target), (other, target, source)):
        if moved is None:
            continue
        state.load_RK[start] -= pieces.load_NK[moved]
        state.load_RK[end] += pieces.load_NK[moved]
        state.bytes_R[start] -= pieces.bytes_N[moved]
        state.bytes_R[end] += pieces.bytes_N[moved]
        holds_TR[pieces.table_N[moved], start] = False
        holds_TR[pieces.table_N[moved], end] = True
        pieces.rank_N[moved] = end
    state.refresh(np.array([source, target]))


def _write_back(state: State, pieces: _MovablePieces) -> None:
    bounds = np.flatnonzero(np.diff(pieces.table_N)) + 1
    for index_N in np.split(np.arange(len(pieces.table_N)), bounds):
        table = int(pieces.table_N[index_N[0]])
        parts = state.parts_T[table]
        assert parts is not None
        state.parts_T[table] = Parts(
            parts.candidate, parts.group_N, pieces.rank_N[index_N].copy(), parts.amount_N
        )
