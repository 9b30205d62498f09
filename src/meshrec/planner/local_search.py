"""Moves that lower the smooth objective: place a table anew, move a piece, exchange two pieces."""

from typing import NamedTuple

import numpy as np

from meshrec.planner.problem import Scope
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools, Floats, Ints

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


class _Pieces(NamedTuple):
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


def _movable(state: State) -> _Pieces:
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
        return _Pieces(none, none, none, np.zeros((0, state.num_phases)), np.zeros(0))
    return _Pieces(
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
    pieces: _Pieces,
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
    state: State, pieces: _Pieces, holds_TR: Bools, piece: int, other: int | None, target: int
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


def _write_back(state: State, pieces: _Pieces) -> None:
    bounds = np.flatnonzero(np.diff(pieces.table_N)) + 1
    for index_N in np.split(np.arange(len(pieces.table_N)), bounds):
        table = int(pieces.table_N[index_N[0]])
        parts = state.parts_T[table]
        assert parts is not None
        state.parts_T[table] = Parts(
            parts.candidate, parts.group_N, pieces.rank_N[index_N].copy(), parts.amount_N
        )
