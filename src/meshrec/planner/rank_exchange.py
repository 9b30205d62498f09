"""Exchanges of pieces between ranks that know the best sizes of what varies.

Rows split over ranks may be cut anywhere (see `polish`), so it does not matter what a rank holds beside its
share, but how much room that leaves for it: with T given, a share may grow until some phase is full. Pieces
are exchanged while all split tables together have more room than they need; then T falls.

N ranks that take part, each with one piece to exchange; G groups of ranks that share a table's rows.
"""

from typing import NamedTuple

import numpy as np

from meshrec.planner.polish import polish
from meshrec.planner.problem import Scope
from meshrec.planner.state import Parts, State
from meshrec.planner.types import Bools, Floats, Ints

_MOST_ROUNDS, _MOST_EXCHANGES = 12, 60
_TABU = 12
"""Exchanges before a rank may take part in another one."""
_SHARPNESS = 300.0
"""Of the groups' room, relative to what they need: how much more the scarcest counts."""
_MOST_SCARCE = 100.0
_LEAST_SHARE, _MOST_SHARE, _LEAST_GAIN = 2e-3, 100.0, 1e-6
_MOST_RANKS, _WORK_PER_PAIR = 256, 4


def exchange_pieces(state: State) -> bool:
    """Exchanges pieces of a polished plan and polishes it, as long as it becomes faster; whether it did."""
    is_better = False
    for _ in range(_MOST_ROUNDS):
        before = state.seconds
        places = _places(state)
        if places is None:
            break
        state.work += _WORK_PER_PAIR * _MOST_EXCHANGES * len(places.rank_N) ** 2
        piece_N = _exchanged(state, places)
        if piece_N is None:
            break
        old = _move(state, places, piece_N)
        polish(state)
        if state.seconds >= before * (1 - _LEAST_GAIN) or not state.fits():
            for table, parts in old.items():
                state.remove(table)
                state.add(table, parts)
            break
        is_better = True
    return is_better


class _Places(NamedTuple):
    """Each rank's piece to exchange, and its share of a table's rows."""

    rank_N: Ints
    table_N: Ints
    index_N: Ints
    """The piece's index in its table's parts."""
    load_NK: Floats
    beside_NK: Floats
    """What the rank holds beside its piece and what varies of its share."""
    varying_NK: Floats
    group_N: Ints
    need_G: Floats
    lacks_NN: Bools
    """Whether a place's rank (second) holds nothing else of a piece's table (first)."""


def _places(state: State) -> _Places | None:
    """None where ranks have several shares, or too few of them a piece that may go elsewhere."""
    problem, num_ranks = state.problem, state.problem.num_ranks
    varying_RK, load_RK = np.zeros_like(state.load_RK), np.zeros_like(state.load_RK)
    beside_RK = state.load_RK.copy()
    amount_R, group_R = np.zeros(num_ranks), np.full(num_ranks, -1)
    table_R, index_R = np.full(num_ranks, -1), np.full(num_ranks, -1)
    holds_TR = np.zeros((len(state.parts_T), num_ranks), bool)
    num_groups = 0
    largest = int(state.load_RK.max(axis=0).argmax())
    for table, parts in enumerate(state.parts_T):
        assert parts is not None
        layout, rank_N = problem.layouts_C[parts.candidate], parts.rank_N
        holds_TR[table, rank_N] = True
        if layout.by_nodes or layout.row_parts > 1:
            if (group_R[rank_N] >= 0).any():
                return None
            length = layout.row_parts * (problem.node_size if layout.by_nodes else 1)
            group_R[rank_N] = num_groups + np.arange(len(rank_N)) // length
            num_groups += len(rank_N) // length
            amount_R[rank_N] = parts.amount_N
            varying_RK[rank_N] = problem.load_PK[parts.group_N] - problem.fixed_PK[parts.group_N]
        elif layout.scope is Scope.RANKS and problem.ranks_Y[problem.type_T[table]] is None:
            load_NK = state.loads(parts)
            larger = np.flatnonzero(load_NK[:, largest] > load_RK[rank_N, largest])
            load_RK[rank_N[larger]] = load_NK[larger]
            table_R[rank_N[larger]], index_R[rank_N[larger]] = table, larger
    rank_N = np.flatnonzero((group_R >= 0) & (table_R >= 0))
    if not 2 <= len(rank_N) <= _MOST_RANKS:
        return None
    beside_RK -= load_RK + amount_R[:, None] * varying_RK
    holds_TR[table_R[rank_N], rank_N] = False
    # Ranks without a piece to exchange keep their share as it is.
    need_G = np.bincount(group_R[rank_N], amount_R[rank_N], num_groups).astype(np.float64)
    return _Places(
        rank_N,
        table_R[rank_N],
        index_R[rank_N],
        load_RK[rank_N],
        beside_RK[rank_N],
        varying_RK[rank_N],
        group_R[rank_N],
        need_G,
        ~holds_TR[np.ix_(table_R[rank_N], rank_N)],
    )


def _exchanged(state: State, places: _Places) -> Ints | None:
    """Which piece each place gets, so that all groups have more room than they need; None: none found."""
    most_K = state.load_RK.max(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        part_NNK = (most_K - places.beside_NK - places.load_NK[:, None]) / places.varying_NK
    part_NNK[:, places.varying_NK <= 0] = np.inf
    # Of a piece (first) in a place.
    room_NN = np.clip(part_NNK.min(axis=2), -_MOST_SHARE, _MOST_SHARE)
    fits_NN = room_NN >= _LEAST_SHARE
    fits_NN &= (places.load_NK[:, None] + places.beside_NK <= most_K * (1 + 1e-9)).all(axis=2)
    fits_NN &= places.lacks_NN
    need_G = np.maximum(places.need_G, 1e-9)
    place = np.arange(len(places.rank_N))
    piece_N = place.copy()
    group_N = places.group_N
    held_N = np.bincount(group_N, room_NN[piece_N, place], len(need_G))
    slack_G = (held_N - need_G) / need_G
    free_N = np.zeros(len(place), np.int64)
    best, best_N = _LEAST_GAIN, None
    for turn in range(_MOST_EXCHANGES):
        change_NN = _changes(room_NN[piece_N], slack_G, need_G, group_N)
        table_N = places.table_N[piece_N]
        can_NN = fits_NN[piece_N] & fits_NN[piece_N].T & (table_N[:, None] != table_N)
        can_NN &= (free_N <= turn)[:, None] & (free_N <= turn)
        change_NN = np.where(can_NN, change_NN, np.inf)
        first, second = np.unravel_index(int(change_NN.argmin()), change_NN.shape)
        if not np.isfinite(change_NN[first, second]):
            break
        piece_N[[first, second]] = piece_N[[second, first]]
        free_N[[first, second]] = turn + _TABU
        held_N = np.bincount(group_N, room_NN[piece_N, place], len(need_G))
        slack_G = (held_N - need_G) / need_G
        if slack_G.min() > best:
            best, best_N = float(slack_G.min()), piece_N.copy()
    return best_N


def _changes(room_NN: Floats, slack_G: Floats, need_G: Floats, group_N: Ints) -> Floats:
    """What an exchange adds to the groups' scarcity; `room_NN` is of the piece of one place in another."""
    gain_NN = (room_NN - room_NN.diagonal()) / need_G[group_N]
    first_NN, second_NN = slack_G[group_N][:, None] + gain_NN.T, slack_G[group_N] + gain_NN
    scarcity_N = _scarcity(slack_G)[group_N]
    apart_NN = _scarcity(first_NN) + _scarcity(second_NN) - scarcity_N[:, None] - scarcity_N
    within_NN = _scarcity(second_NN + gain_NN.T) - scarcity_N
    return np.where(group_N[:, None] == group_N, within_NN, apart_NN)


def _scarcity(slack: Floats) -> Floats:
    scarcity: Floats = np.exp(np.minimum(-_SHARPNESS * slack, _MOST_SCARCE))
    return scarcity


def _move(state: State, places: _Places, piece_N: Ints) -> dict[int, Parts]:
    """Moves pieces to their places; the parts before, of all tables whose sizes may change."""
    old = {table: parts for table, parts in enumerate(state.parts_T) if parts and len(parts.rank_N)}
    for table in np.unique(places.table_N[piece_N != np.arange(len(piece_N))]).tolist():
        mine = places.table_N[piece_N] == table
        parts = state.remove(table)
        rank_N = parts.rank_N.copy()
        rank_N[places.index_N[piece_N[mine]]] = places.rank_N[mine]
        state.add(table, parts._replace(rank_N=rank_N))
    return old
