"""Column layout for pooled results: from which columns of the received rows a result column is summed.

A *source* is a row received from a rank, or a local row from data-parallel tables. If several sources have
values for the same result column, as with row-wise sharding, the values are added. Parts of a table are added
in row order, so sums depend neither on which rank is faster, nor on which rank has which rows.

For example, if ranks 0 and 1 have half of the rows of a table with 8 columns each, both sources have the span
[0, 8). The first piece copies the columns from source 0, and the second piece adds the columns from source 1.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.routing import Routing


class Piece(NamedTuple):
    """A copy or addition of consecutive columns from a source row to the result row."""

    source: int
    """Source number: a rank on the axis, or one after the last rank for data-parallel tables."""
    source_column: int
    """First column in the source row."""
    width: int
    column: int
    """First column in the result."""
    add: bool = False
    """Whether values are added to the result of earlier pieces. If not, they are copied."""
    mean_use: int = -1
    """Number of the use (a feature looked up in a table) by whose bag lengths the values are divided. -1:
    they are not divided.
    """


class Span(NamedTuple):
    """Result columns [column, column + width) for which a source has values."""

    source: int
    column: int
    width: int
    mean_use: int = -1
    """As in `Piece`."""


def pieces_of(sources: Sequence[Iterable[Span]], order: Sequence[Sequence[int]] = ()) -> list[Piece]:
    """Return the pieces from which a kernel sums source rows to result rows, in the order of addition.

    Args:
        sources: spans of every source, in the order of the source's columns.
        order: for every span of every source, when to add it: the position of its table part in row order.
            Empty: sources are added in their order.
    """
    pieces: list[Piece] = []
    # Result columns which some earlier piece has written.
    written: set[int] = set()
    # (position of the part, source, source column, span) for every span.
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
    """Return P pieces as an int64 tensor [P, 6] with the fields of `Piece`, as the kernels read them."""
    return torch.tensor([list(map(int, piece)) for piece in pieces], dtype=torch.int64).view(-1, 6)


def rank_spans(routing: Routing, rank: int, *, divide: bool = True) -> list[Span]:
    """Return the span of result columns for every lookup on a rank.

    Args:
        routing: the compiled plan.
        rank: rank on the shard axis.
        divide: whether to set ``mean_use`` for MEAN tables split by rows, whose sums are divided after the
            exchange.
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
    """Return the first table row which each lookup on a rank reads, in the order of ``rank_spans``."""
    work = routing.work[rank]
    return [work.routes[lookup.route].r0 for lookup in work.lookups]


def row_range_indices(routing: Routing, rank: int) -> list[int]:
    """Return the index of each lookup's row range among the row ranges of its table, sorted by first row.

    For example, a lookup in a table with two row-wise shards has index 0 on the rank with the first rows, and
    index 1 on the other rank. Column shards of the same rows have the same index. Lookups are in the order of
    ``rank_spans``.
    """
    work = routing.work[rank]
    # First row of all rectangles, by table.
    starts: dict[int, list[int]] = {}
    for rank_work in routing.work:
        for rectangle in rank_work.rectangles:
            starts.setdefault(rectangle.table, []).append(rectangle.r0)
    # Several column shards start at the same row and have the same position.
    ranks = {
        table: {row: position for position, row in enumerate(sorted(set(rows)))}
        for table, rows in starts.items()
    }
    return [ranks[routing.uses[lookup.use].table][work.routes[lookup.route].r0] for lookup in work.lookups]


def local_spans(routing: Routing) -> list[Span]:
    """Return the spans of result columns from data-parallel tables, with source 0."""
    return [
        Span(0, routing.columns[u], routing.dims[u])
        for u, use in enumerate(routing.uses)
        if routing.replicated[use.table]
    ]


def divides_late(routing: Routing, use: int) -> bool:
    """Return whether a use (a feature looked up in a table) reads a MEAN table split by rows.

    Its parts return sums, which are divided by the bag lengths after the parts have been added.
    """
    table = routing.uses[use].table
    return routing.tables[table].mean and routing.row_split[table]


def _split_span(span: Span, source_column: int, written: set[int]) -> list[Piece]:
    """Split a span into pieces which copy new columns, and pieces which add to columns written before."""
    pieces: list[Piece] = []
    # Column by column, because a span may cover written and new columns.
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
    """Join consecutive pieces which are adjacent both in the source and in the result."""
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
