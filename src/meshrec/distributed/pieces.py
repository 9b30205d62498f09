"""Column layout of pooled results: which source columns become which result columns.

A *source* is a row that arrives from a rank, or a local row of data-parallel tables. If several sources have
the same result column, as with row-wise sharding, their values are added. Parts of a table are added in row
order, so sums depend neither on which rank is faster, nor on which rank has which rows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.routing import Routing


class Piece(NamedTuple):
    """Columns copied from a source row to the result, or added to it."""

    source: int
    source_column: int
    """First column in the source row."""
    width: int
    column: int
    """First column in the result."""
    add: bool = False
    """Whether the columns are added to those of earlier pieces."""
    mean_use: int = -1
    """Use whose bag lengths divide the columns; -1: no division."""


class Span(NamedTuple):
    """Result columns [column, column + width) that a source has values for."""

    source: int
    column: int
    width: int
    mean_use: int = -1
    """Use whose bag lengths divide the columns; -1: no division."""


def pieces_of(sources: Sequence[Iterable[Span]], order: Sequence[Sequence[int]] = ()) -> list[Piece]:
    """Return the pieces that sum source rows to result rows, in the order in which a kernel adds them.

    Args:
        sources: spans of every source, in the order of its columns.
        order: for every span of every source, the position of its table part in the order of addition; empty:
            sources are added in order.
    """
    pieces: list[Piece] = []
    written: set[int] = set()
    ordered = []
    for number, spans in enumerate(sources):
        source_column = 0
        for i, span in enumerate(spans):
            rank = order[number][i] if number < len(order) else 0
            ordered.append((rank, number, source_column, span))
            source_column += span.width
    # Sorted by part first, because the kernel adds pieces in list order, which determines the bits of the
    # sum.
    for _, _, source_column, span in sorted(ordered, key=lambda entry: entry[:3]):
        pieces += _split_span(span, source_column, written)
    return _join_adjacent(pieces)


def as_tensor(pieces: Sequence[Piece]) -> Tensor:
    """Return the pieces as int64 [P, 6], as ``gather_pooled`` reads them."""
    return torch.tensor([list(map(int, piece)) for piece in pieces], dtype=torch.int64).view(-1, 6)


def rank_spans(routing: Routing, rank: int, *, divide: bool = True) -> list[Span]:
    """Return the result columns of every lookup of a rank.

    Args:
        routing: the compiled plan.
        rank: shard-axis rank.
        divide: whether spans of row-split MEAN tables say that their sums must be divided by bag lengths.
    """
    return [
        Span(
            rank,
            routing.columns[lookup.use] + lookup.c0,
            lookup.width,
            lookup.use if divide and divides_late(routing, lookup.use) else -1,
        )
        for lookup in routing.work[rank].lookups
    ]


def first_rows(routing: Routing, rank: int) -> list[int]:
    """Return, for every span of ``rank_spans``, the first table row of the part that it comes from."""
    work = routing.work[rank]
    return [work.routes[lookup.route].r0 for lookup in work.lookups]


def part_order(routing: Routing, rank: int) -> list[int]:
    """Return, for every span of ``rank_spans``, the position of its part among the table's parts, by row."""
    work = routing.work[rank]
    starts: dict[int, list[int]] = {}
    for rank_work in routing.work:
        for rectangle in rank_work.rectangles:
            starts.setdefault(rectangle.table, []).append(rectangle.r0)
    ranks = {
        table: {row: position for position, row in enumerate(sorted(set(rows)))}
        for table, rows in starts.items()
    }
    return [ranks[routing.uses[lookup.use].table][work.routes[lookup.route].r0] for lookup in work.lookups]


def local_spans(routing: Routing) -> list[Span]:
    """Return the result columns of data-parallel tables, with this rank as source 0."""
    return [
        Span(0, routing.columns[u], routing.dims[u])
        for u, use in enumerate(routing.uses)
        if routing.replicated[use.table]
    ]


def divides_late(routing: Routing, use: int) -> bool:
    """Return whether a use reads a row-split MEAN table, so that the division follows the sum of parts."""
    table = routing.uses[use].table
    return routing.tables[table].mean and routing.row_split[table]


def _split_span(span: Span, source_column: int, written: set[int]) -> list[Piece]:
    """Split a span where columns change between written before (added) and new; ``written`` is updated."""
    pieces: list[Piece] = []
    for offset in range(span.width):
        column = span.column + offset
        add = column in written
        written.add(column)
        if pieces and pieces[-1].add == add:
            pieces[-1] = pieces[-1]._replace(width=pieces[-1].width + 1)
        else:
            pieces.append(Piece(span.source, source_column + offset, 1, column, add, span.mean_use))
    return pieces


def _join_adjacent(pieces: list[Piece]) -> list[Piece]:
    """Join consecutive pieces that are adjacent both in the source and in the result."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.source, last.add, last.mean_use) == (piece.source, piece.add, piece.mean_use)
            and last.source_column + last.width == piece.source_column
            and last.column + last.width == piece.column
        ):
            joined[-1] = last._replace(width=last.width + piece.width)
        else:
            joined.append(piece)
    return joined
