"""Planning problem in solver form: candidates made of pieces, each with a load vector.

A *type* is a set of identical tables. A *candidate* is a way to split a table of a type. It costs every rank
something (`common`), and has pieces which go to distinct slots. A slot is a rank, or a whole node in which
every rank takes the piece's load (rows split over the node).
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from meshrec.planner.types import Bools, Floats, Ints


class Scope(IntEnum):
    """Slots to which the pieces of a candidate go."""

    RANKS = 0
    """Distinct ranks."""
    NODES = 1
    """Distinct nodes; every rank of a node takes the piece's load."""
    ONE_NODE = 2
    """Distinct ranks of a single node."""
    EVERYWHERE = 3
    """Every rank holds the whole table."""


class Layout(NamedTuple):
    """Split of a table. `row_parts` counts ranks per column part, or nodes for `Scope.NODES`."""

    scope: Scope
    widths: tuple[int, ...]
    row_parts: int

    @property
    def by_nodes(self) -> bool:
        """Whether pieces go to whole nodes."""
        return self.scope is Scope.NODES


class Problem(NamedTuple):
    """Planning problem: T tables, Y types, C candidates, P groups of equal pieces, K phases.

    Phases with proportional loads on every rank are merged, because their slowest rank is the same.
    Candidates are sorted by type, pieces by candidate.
    """

    num_ranks: int
    node_size: int
    memory_cap: float
    type_T: Ints
    layouts_C: list[Layout]
    type_C: Ints
    common_C: Floats
    """Seconds added by a candidate to every rank, summed over phases."""
    common_bytes_C: Floats
    """Bytes added by a candidate to every rank."""
    piece_start_C: Ints
    """First piece group per candidate; C + 1 entries."""
    candidate_P: Ints
    count_P: Ints
    """Equal pieces per group."""
    load_PK: Floats
    """Seconds on a rank holding a piece, or on each rank of the node."""
    fixed_PK: Floats
    """Part of the load which does not scale with the piece.

    A piece `amount` times the even size costs fixed + amount * (load - fixed). Rows vary if there are several
    row parts, otherwise columns.
    """
    bytes_P: Floats
    fixed_bytes_P: Floats
    width_P: Ints
    """Columns per piece."""
    rows_P: Floats
    """Rows per piece."""
    min_partition_Y: Ints
    """Minimum columns per column part."""
    merge_FK: Floats
    """Merged phase [K] per original phase [F]."""
    ranks_Y: list[Bools | None]
    """Ranks allowed per type; None: all."""
    sharded_C: Bools
    """Whether a candidate has pieces."""
    row_stats_C: Bools
    """Whether a candidate needs an all-reduce of row statistics."""

    @property
    def num_nodes(self) -> int:
        """Nodes on the shard axis."""
        return self.num_ranks // self.node_size

    def pieces(self, candidate: int) -> slice:
        """Return the index range for a candidate's piece groups, as a slice for arrays [P, ...]."""
        return slice(int(self.piece_start_C[candidate]), int(self.piece_start_C[candidate + 1]))

    def ranks_per_piece_C(self) -> Ints:
        """Count the ranks which take a piece's load."""
        nodes = np.array([layout.scope is Scope.NODES for layout in self.layouts_C], bool)
        return np.where(nodes, self.node_size, 1).astype(np.int64)

    def mean_load_CK(self) -> Floats:
        """Return the mean seconds over ranks [C, K] per candidate."""
        weight_P = self.count_P * self.ranks_per_piece_C()[self.candidate_P] / self.num_ranks
        return self._sum_over_pieces(self.load_PK * weight_P[:, None])

    def mean_bytes_C(self) -> Floats:
        """Return the mean bytes over ranks per candidate."""
        weight_P = self.count_P * self.ranks_per_piece_C()[self.candidate_P] / self.num_ranks
        return self.common_bytes_C + self._sum_over_pieces((self.bytes_P * weight_P)[:, None])[:, 0]

    def can_fit_C(self) -> Bools:
        """Return whether a candidate can fit into memory at all."""
        return np.asarray(self.piece_bytes_C() + self.common_bytes_C <= self.memory_cap)

    def piece_bytes_C(self) -> Floats:
        """Return a candidate's mean piece size. In an uneven split, at least one piece is as large."""
        count_C, total_CN = (
            np.zeros(len(self.layouts_C)),
            self._sum_over_pieces((self.bytes_P * self.count_P)[:, None]),
        )
        np.add.at(count_C, self.candidate_P, self.count_P)
        mean_C: Floats = total_CN[:, 0] / np.maximum(count_C, 1.0)
        return mean_C

    def largest_load_CK(self) -> Floats:
        """Return the seconds [C, K] for a candidate's largest piece."""
        largest = np.zeros((len(self.layouts_C), self.load_PK.shape[1]))
        np.maximum.at(largest, self.candidate_P, self.load_PK)
        return largest

    def least_load_PK(self) -> Floats:
        """Return the seconds [P, K] of the smallest possible piece: no rows, or the minimum columns; unsplit
        tables stay whole.
        """
        uncut_C = [not layout.by_nodes and layout.row_parts == 1 for layout in self.layouts_C]
        split_C = [len(layout.widths) > 1 for layout in self.layouts_C]
        least_P = self.min_partition_Y[self.type_C[self.candidate_P]] / self.width_P
        least_P = np.where(np.array(split_C)[self.candidate_P], np.minimum(least_P, 1.0), 1.0)
        least_P = np.where(np.array(uncut_C)[self.candidate_P], least_P, 0.0)
        least: Floats = self.fixed_PK + (self.load_PK - self.fixed_PK) * least_P[:, None]
        return least

    def _sum_over_pieces(self, values_P_: Floats) -> Floats:
        """Sum values per piece group [P, N] over the groups of a candidate, to [C, N]."""
        total = np.zeros((len(self.layouts_C), values_P_.shape[1]))
        np.add.at(total, self.candidate_P, values_P_)
        return total
