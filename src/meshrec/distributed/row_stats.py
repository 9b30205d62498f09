"""Compute norms and means over whole rows, for row-wise optimizers and tables with columns on several ranks.

Ranks with columns in the same rows get the same IDs, and touch the same rows in the same order. Their partial
sums therefore match without sending IDs, and a single all-to-all with a few values per touched row is enough.
PartialRowWiseLAMB needs two, because the norm of its update direction depends on the second moment.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.collectives import Splits, all_to_all
from meshrec.comms.mesh import Axis
from meshrec.comms.phase_clock import OFF, phase, recorders
from meshrec.distributed.routing import Routing
from meshrec.ops.tbe.formulas import Formula, Hyper, Rows, RowSum, formula_of
from meshrec.tables.optimizer import UpdateRule
from meshrec.tables.table import Rectangle
from meshrec.tables.updates import TouchedRows

# U: touched rows, D: columns in the rectangle


class ColumnPeers:
    """Ranks which have columns in the same rows, and sum values per row.

    Args:
        routing: the compiled plan.
        axis: the shard axis.
        tables: table numbers, equal on all ranks. The plan must have been compiled with these tables in
            ``whole_rows``; see `compile_plan`.
    """

    def __init__(self, routing: Routing, axis: Axis, tables: Sequence[int]) -> None:
        # All fields depend only on the plan.
        self._axis = axis
        # Bands (row intervals of a table) in which a rank has columns, by rank.
        self._bands: list[list[_Band]] = []
        for work in routing.work:
            selected = [rectangle for rectangle in work.rectangles if rectangle.table in tables]
            self._bands.append(sorted({_band(rectangle) for rectangle in selected}))
        columns: dict[_Band, dict[int, int]] = {}
        for rank, work in enumerate(routing.work):
            for x in work.rectangles:
                if x.table in tables:
                    first = columns.setdefault(_band(x), {})
                    # A rank may hold several column shards in a band; its first column decides the order.
                    first[rank] = min(x.c0, first.get(rank, x.c0))
        # Ranks with columns in a band, in column order.
        self._in_order = {band: sorted(first, key=first.__getitem__) for band, first in columns.items()}
        rectangles = routing.work[axis.rank].rectangles
        self._local_bands = [_band(rectangle) for rectangle in rectangles if rectangle.table in tables]

    def sum_columns(self, partial: Sequence[Tensor]) -> list[Tensor]:
        """Sum values per row over all column shards of a table. Collective.

        Partial values are added in column order. All ranks therefore get the same bits, and the bits do not
        depend on which rank has which columns.

        Args:
            partial: for every rectangle (row and column range) on this rank, S values per row, [U, S].
                Ranks with columns in the same rows must pass the same U rows in the same order.

        Returns:
            For every rectangle on this rank, the sums [U, S].
        """
        # Sums over all local column shards of a band.
        mine: dict[_Band, Tensor] = {}
        # Add this rank's own column shards in a band first.
        for band, part in zip(self._local_bands, partial, strict=True):
            mine[band] = mine[band] + part if band in mine else part
        # By rank, the bands in which both that rank and this rank have columns. Both ranks list the same
        # bands in the same order, so a message needs no description.
        shared = [
            [band for band in bands if band in mine and rank != self._axis.rank]
            for rank, bands in enumerate(self._bands)
        ]
        # Sent and received sizes are equal, because both ranks have touched the same rows.
        sizes = [sum(mine[band].numel() for band in bands) for bands in shared]
        parts = [mine[band].reshape(-1) for bands in shared for band in bands]
        sent = torch.cat(parts) if parts else torch.empty(0)
        received = all_to_all(sent, Splits(sizes, sizes), self._axis, "row statistics").wait()
        # Partial sums by band and rank, including this rank.
        terms: dict[tuple[_Band, int], Tensor] = {(band, self._axis.rank): mine[band] for band in mine}
        for rank, (bands, piece) in enumerate(zip(shared, received.split(sizes), strict=True)):
            parts = piece.split([mine[band].numel() for band in bands])
            terms |= {(band, rank): part.view_as(mine[band]) for band, part in zip(bands, parts, strict=True)}
        total: dict[_Band, Tensor] = {}
        # In column order of the ranks, for equal bits everywhere.
        for band in mine:
            for rank in self._in_order[band]:
                term = terms[band, rank]
                # Not in place: the first term may be ``mine`` itself, or a view of the received message.
                total[band] = total[band] + term if band in total else term
        return [total[band] for band in self._local_bands]

    def mean_squares(self, squares: Tensor, counts: Sequence[int], row_dims: Sequence[int]) -> Tensor:
        """Return the mean squared gradient of every touched row, over all columns of the table. Collective.

        Args:
            squares: sums of squared gradients over this rank's columns, fp32 [total rows], rectangle by
                rectangle.
            counts: number of touched rows in each rectangle.
            row_dims: number of columns in the whole table, for each rectangle.

        Returns:
            Means, fp32 [total rows], in the order of ``squares``.
        """
        with phase("row_stats") if recorders else OFF:
            sums = self.sum_columns(squares.split(counts))
            means = [total / dim for total, dim in zip(sums, row_dims, strict=True)]
            return torch.cat([squares[:0], *means])  # the list may be empty, which torch.cat rejects

    def row_stats(
        self, touched: Sequence[TouchedRows], optimizer: int, hyper: Sequence[Hyper]
    ) -> list[Tensor]:
        """Compute the argument ``row_stats`` of the op ``tbe_update``, sums over whole rows. Collective.

        Args:
            touched: touched rows and their gradients, for every rectangle on this rank.
            optimizer: optimizer code.
            hyper: hyperparameters, for every rectangle on this rank.

        Returns:
            For every rectangle, fp32 [U, 3] with a column per `RowSum`. Sums which the optimizer does not use
            are 0.
        """
        with phase("row_stats") if recorders else OFF:
            return self._row_stats(touched, optimizer, hyper)

    def _row_stats(
        self, touched: Sequence[TouchedRows], optimizer: int, hyper: Sequence[Hyper]
    ) -> list[Tensor]:
        """Compute `row_stats`, in as many exchange rounds as the optimizer needs."""
        formula = formula_of(optimizer)
        whole = [rows.grad.new_zeros(rows.grad.shape[0], len(RowSum)) for rows in touched]
        for sums in _exchange_rounds(formula):
            partial = [
                torch.stack([_local_sum(which, formula, rows, h, sums_so_far) for which in sums], 1)
                for rows, h, sums_so_far in zip(touched, hyper, whole, strict=True)
            ]
            for sums_so_far, total in zip(whole, self.sum_columns(partial), strict=True):
                sums_so_far[:, sums] = total
        return whole


def column_peers(
    routing: Routing, axis: Axis, rule: UpdateRule, tables: Sequence[int]
) -> tuple[frozenset[int], ColumnPeers | None]:
    """Find the tables whose updates need sums over columns on other ranks.

    Args:
        routing: the compiled plan.
        axis: the shard axis.
        rule: update rule of the tables.
        tables: tables with this rule, by number.

    Returns:
        The numbers of the tables which need sums, equal on all ranks, and an object which computes the sums.
        If no table needs sums, an empty set and None.
    """
    if axis.size == 1 or not formula_of(rule.code).row_sums:
        return frozenset(), None
    # Tables with a rectangle narrower than the table.
    cut = {
        rectangle.table
        for work in routing.work
        for rectangle in work.rectangles
        if rectangle.c1 - rectangle.c0 < routing.tables[rectangle.table].dim
    }
    split = frozenset(cut.intersection(tables))
    return split, ColumnPeers(routing, axis, sorted(split)) if split else None


class _Band(NamedTuple):
    """A row interval [r0, r1) of a table."""

    table: int
    r0: int
    r1: int


def _band(rectangle: Rectangle) -> _Band:
    """Return the row interval which a rectangle (row and column range) covers."""
    return _Band(rectangle.table, rectangle.r0, rectangle.r1)


def _squares(x_UD: Tensor) -> Tensor:
    """Return the sum of squares in every row, [U]."""
    norms: Tensor = torch.linalg.vector_norm(x_UD, dim=1)  # takes half the time of squaring and summing
    return norms.square_()


def _exchange_rounds(formula: Formula) -> list[list[int]]:
    """Return the sums over whole rows which the ranks exchange in each round, as `RowSum` values.

    There is one round, or two if the update direction depends on the squared gradient sum from the first
    round.
    """
    first = sorted(formula.row_sums)
    if {RowSum.GRADIENT, RowSum.DIRECTION} <= formula.row_sums:
        return [[which for which in first if which != RowSum.DIRECTION], [RowSum.DIRECTION]]
    return [[*first]]


def _local_sum(which: int, formula: Formula, touched: TouchedRows, h: Hyper, sums_so_far: Tensor) -> Tensor:
    """Return a sum of squares over a rectangle's columns, for every touched row, [U]."""
    rows = Rows(touched.weight, touched.grad, touched.slots, sums_so_far)
    if which == RowSum.WEIGHT:
        return _squares(rows.weight)
    if which == RowSum.GRADIENT:
        return _squares(formula.gradient(rows, h))
    assert formula.direction is not None
    # Computing the direction changes state in place. Clone it, because only the update may change the real
    # state.
    return _squares(formula.direction(rows._replace(slots=[slot.clone() for slot in rows.slots]), h))
