"""Column layout for pooled results: which source columns become which result columns.

A *source* is a row that arrives from a rank, or is computed here for data-parallel tables. The first source
with a result column writes it, and further sources are added. Parts of a table are added in row order, so the
sum depends neither on which rank is faster, nor on which rank holds which rows.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.distributed.routing import Routing


class Piece(NamedTuple):
    """``width`` source columns that go to ``column`` in the result.

    ``mean_use``: use whose bag lengths divide the columns; -1: none.
    """

    source: int
    source_column: int
    width: int
    column: int
    add: bool = False
    mean_use: int = -1


class Span(NamedTuple):
    """Source columns, before it is known which source writes them."""

    source: int
    column: int
    width: int
    mean_use: int = -1


def pieces_of(sources: Sequence[Iterable[Span]], order: Sequence[Sequence[int]] = ()) -> list[Piece]:
    """Lay out each source's spans consecutively, and decide which columns are written and which are added.

    Args:
        sources: spans by source.
        order: for every span, the span's rank among the table parts; the default is source order.
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
    # Part order comes first: the kernel adds pieces in list order, which fixes the bits.
    for _, _, source_column, span in sorted(ordered, key=lambda entry: entry[:3]):
        pieces += _split(span, source_column, written)
    return _joined(pieces)


def as_tensor(pieces: Sequence[Piece]) -> Tensor:
    """Return the pieces as int64 [P, 6], as ``gather_pooled`` reads them."""
    return torch.tensor([list(map(int, piece)) for piece in pieces], dtype=torch.int64).view(-1, 6)


def rank_spans(routing: Routing, rank: int, *, divide: bool = True) -> list[Span]:
    """Return the columns in a rank's lookups. Row-split MEAN tables are divided after the sum.

    Args:
        routing: the compiled plan.
        rank: the shard-axis rank.
        divide: whether to mark the late division at all.
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
    """Return the first table row read by each span in ``rank_spans``."""
    work = routing.work[rank]
    return [work.routes[lookup.route].r0 for lookup in work.lookups]


def row_order(routing: Routing, rank: int) -> list[int]:
    """Return each span's rank among the table parts, by row."""
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
    """Return the columns from data-parallel tables. Source 0 is this rank."""
    return [
        Span(0, routing.columns[u], routing.dims[u])
        for u, use in enumerate(routing.uses)
        if routing.replicated[use.table]
    ]


def divides_late(routing: Routing, use: int) -> bool:
    """Return whether no rank sees a whole MEAN bag, so parts are summed before the division."""
    table = routing.uses[use].table
    return routing.tables[table].mean and routing.row_split[table]


def _split(span: Span, source_column: int, written: set[int]) -> list[Piece]:
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


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Join pieces adjacent both in the source and in the result."""
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
