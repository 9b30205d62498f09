"""Planning problem in solver form: candidates made of pieces, each with a load vector.

A *type* is a set of identical tables. A *candidate* is one way to split a table of a type, such as "4 column
parts". It has *pieces*, which the solver assigns to distinct *slots*. A slot is a rank, or a whole node if
the piece's rows are split over the node's ranks: then every rank in the node takes the piece's load. In
addition, a candidate may cost every rank the same time and memory (`common_cost_C`). Equal candidate pieces
form a *piece group*, so that arrays stay small on large clusters.

[Note: planner arrays]
The suffix of an array's name gives the axes, a letter per axis: ``load_PK`` has shape [P, K].

- T: tables. Y: table types. C: candidates. P: piece groups.
- R: ranks in a shard group. F: phases of a training step, see `estimators.PHASES`.
- K: merged phases. Phases whose loads are proportional on every rank are merged into one.
- N: entries of a list, such as the rectangles in a plan or the pieces of a table. Letters in other names
  are explained where they occur.

``num_tables_C`` has the tables per candidate, fractional, in a linear relaxation.
"""

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from meshrec.planner.types import Bools, Floats, Ints


class Scope(IntEnum):
    """Where the pieces of a split table may be placed.

    A piece is a part of the table that goes to a rank, or to a node whose ranks divide the piece by rows.
    """

    RANKS = 0
    """Distinct ranks."""
    NODES = 1
    """Distinct nodes; every rank of a node takes the piece's load."""
    ONE_NODE = 2
    """Distinct ranks of a single node."""
    EVERYWHERE = 3
    """Every rank holds the whole table."""


class Layout(NamedTuple):
    """Split of a table into column parts, each of which is split into row parts. The results are pieces.

    Attributes:
        scope: where the pieces may be placed: on ranks, on whole nodes, on a single node, or everywhere.
        widths: columns per column part.
        row_parts: row parts per column part; for `Scope.NODES`, nodes per column part.
    """

    scope: Scope
    widths: tuple[int, ...]
    row_parts: int

    @property
    def by_nodes(self) -> bool:
        """Whether every piece occupies a whole node, with rows split over the node's ranks."""
        return self.scope is Scope.NODES


class Problem(NamedTuple):
    """Costs of all candidates, for T tables, Y types, C candidates, P piece groups, K merged phases.

    A type is a set of identical tables. A candidate is a way to split a table of a type into pieces. A piece
    group has equal pieces of a candidate. Phases with proportional loads on every rank are merged, because
    they have the same slowest rank. Candidates are sorted by type, and piece groups by candidate. See
    [Note: planner arrays].
    """

    num_ranks: int
    """Ranks in the shard group to plan."""
    node_size: int
    """Ranks per node."""
    memory_cap: float
    """Maximum bytes per rank."""
    type_T: Ints
    """Type index per table."""
    layouts_C: list[Layout]
    type_C: Ints
    """Type index per candidate, ascending."""
    common_cost_C: Floats
    """Seconds added by a candidate to every rank, summed over phases."""
    common_bytes_C: Floats
    """Bytes added by a candidate to every rank."""
    piece_start_C: Ints
    """First piece group per candidate; C + 1 entries, so that candidate c has the groups [c] to [c + 1]."""
    candidate_P: Ints
    """Candidate index per piece group, ascending."""
    count_P: Ints
    """Equal pieces in the group."""
    load_PK: Floats
    """Seconds per phase which a piece costs the rank holding it, or every rank in the node holding it."""
    fixed_PK: Floats
    """Part of ``load_PK`` that does not depend on the piece's size.

    In an uneven split, a piece has `amount` times the size of an even split, and costs
    ``fixed + amount * (load - fixed)``. If there are several row parts, the row count is scaled,
    otherwise the column count.
    """
    bytes_P: Floats
    """Bytes which a piece takes on the rank holding it."""
    fixed_bytes_P: Floats
    """Part of ``bytes_P`` that does not depend on the piece's size; see ``fixed_PK``."""
    width_P: Ints
    """Columns per piece in an even split."""
    rows_P: Floats
    """Rows per piece in an even split; fractional, because whole rows are assigned only at the end."""
    min_partition_Y: Ints
    """Minimum columns per column part."""
    merge_FK: Floats
    """1 where phase F is a part of merged phase K, else 0. ``load_RF @ merge_FK`` merges the phases."""
    ranks_Y: list[Bools | None]
    """Mask of the ranks that may hold pieces of a type's tables; None: all ranks."""
    sharded_C: Bools
    """Whether a candidate has pieces. Data-parallel candidates have none, and cost every rank the same."""
    row_stats_C: Bools
    """Whether a candidate needs an all-reduce of row statistics, because the columns are split."""

    @property
    def num_nodes(self) -> int:
        """Nodes in the shard group."""
        return self.num_ranks // self.node_size

    def pieces(self, candidate: int) -> slice:
        """Return the slice of arrays [P, ...] with a candidate's piece groups (groups of equal pieces)."""
        return slice(int(self.piece_start_C[candidate]), int(self.piece_start_C[candidate + 1]))

    def ranks_per_piece_C(self) -> Ints:
        """Return for every candidate how many ranks take the load of a piece, int64 [C].

        This is the node size for layouts over whole nodes (`Scope.NODES`), otherwise 1.
        """
        nodes = np.array([layout.scope is Scope.NODES for layout in self.layouts_C], bool)
        return np.where(nodes, self.node_size, 1).astype(np.int64)

    def mean_load_CK(self) -> Floats:
        """Return the seconds [C, K] per phase which a candidate's pieces cost, averaged over all ranks."""
        weight_P = self.count_P * self.ranks_per_piece_C()[self.candidate_P] / self.num_ranks
        return self._sum_over_pieces(self.load_PK * weight_P[:, None])

    def mean_bytes_C(self) -> Floats:
        """Return the bytes [C] which a candidate takes on a rank, on average over ranks.

        Includes `common_bytes_C`.
        """
        weight_P = self.count_P * self.ranks_per_piece_C()[self.candidate_P] / self.num_ranks
        return self.common_bytes_C + self._sum_over_pieces((self.bytes_P * weight_P)[:, None])[:, 0]

    def can_fit_C(self) -> Bools:
        """Return a mask [C] of the candidates whose mean piece and the common bytes of all tables fit."""
        least_Y = np.full(int(self.type_C[-1]) + 1, np.inf)
        np.minimum.at(least_Y, self.type_C, self.common_bytes_C)
        other_tables_C = least_Y[self.type_T].sum() - least_Y[self.type_C]
        return np.asarray(self.piece_bytes_C() + self.common_bytes_C + other_tables_C <= self.memory_cap)

    def piece_bytes_C(self) -> Floats:
        """Return the mean bytes per piece of every candidate [C].

        An uneven split has at least one piece of this size or larger.
        """
        count_C, total_CN = (
            np.zeros(len(self.layouts_C)),
            self._sum_over_pieces((self.bytes_P * self.count_P)[:, None]),
        )
        np.add.at(count_C, self.candidate_P, self.count_P)
        mean_C: Floats = total_CN[:, 0] / np.maximum(count_C, 1.0)
        return mean_C

    def largest_load_CK(self) -> Floats:
        """Return the seconds [C, K] for the largest piece of every candidate, in an even split."""
        largest = np.zeros((len(self.layouts_C), self.load_PK.shape[1]))
        np.maximum.at(largest, self.candidate_P, self.load_PK)
        return largest

    def least_load_PK(self) -> Floats:
        """Return the seconds [P, K] for the smallest piece that an uneven split may contain.

        A piece split by rows may have no rows. A piece split only by columns has at least the minimum
        columns. The only piece of an unsplit table is the whole table.
        """
        uncut_C = [not layout.by_nodes and layout.row_parts == 1 for layout in self.layouts_C]
        split_C = [len(layout.widths) > 1 for layout in self.layouts_C]
        min_amount_P = self.min_partition_Y[self.type_C[self.candidate_P]] / self.width_P
        min_amount_P = np.where(np.array(split_C)[self.candidate_P], np.minimum(min_amount_P, 1.0), 1.0)
        min_amount_P = np.where(np.array(uncut_C)[self.candidate_P], min_amount_P, 0.0)
        least: Floats = self.fixed_PK + (self.load_PK - self.fixed_PK) * min_amount_P[:, None]
        return least

    def _sum_over_pieces(self, values_P_: Floats) -> Floats:
        """Return the sums [C, N] of values [P, N] over the piece groups of every candidate."""
        total = np.zeros((len(self.layouts_C), values_P_.shape[1]))
        np.add.at(total, self.candidate_P, values_P_)
        return total
