"""A record of the updated rows on this rank: four bytes per row, and one store per looked-up ID."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.ops import tbe
from meshrec.tables.table import Rectangle, TableRows
from meshrec.tables.updates import TableGradient


class TouchedRows:
    """The rows of one module's tables that updates touch from now on.

    Args:
        tables: the tables of the module.
        fused: the numbers of its fused tables. Only these are watched.
        now: returns the mark for rows that are touched now.
    """

    def __init__(self, tables: ShardedTables, fused: Collection[int], now: Callable[[], int]) -> None:
        self._fused, self._now = set(fused), now
        self._parts = [tables.split, tables.local]
        self._marks = [[_marks(rectangle) for rectangle in part.work.rectangles] for part in self._parts]
        tables.watch = self._mark

    def touched(self, table: int, since: int) -> Iterator[tuple[TableRows, Tensor]]:
        """Yield, for each local rectangle of a table, the keys of the rows with a mark above ``since``,
        ascending.
        """
        for part, marks in zip(self._parts, self._marks, strict=True):
            here = part.held.of_table(table)
            own = [last for last, r in zip(marks, part.work.rectangles, strict=True) if r.table == table]
            for rows, last in zip(here.tables if here is not None else [], own, strict=True):
                yield rows, (last > since).nonzero()[:, 0] + rows.rectangle.r0

    def _mark(self, gradients: Sequence[TableGradient]) -> None:
        now = self._now()
        for part, marks, gradient in zip(self._parts, self._marks, gradients, strict=False):
            for i, rows in gradient.rows.items():
                self._set(part, marks, i, rows.rows, now)
            if gradient.looked_up is None:
                continue
            lookups = gradient.looked_up.lookups
            values = by_key(lookups)
            for key, rectangle in zip(lookups.keys, lookups.tables, strict=True):
                if rectangle not in gradient.rows:
                    self._set(part, marks, rectangle, values[key], now)

    def _set(self, part: LookupTables, marks: Sequence[Tensor], i: int, rows: Tensor, now: int) -> None:
        if part.work.rectangles[i].table in self._fused:
            if (index := part.held.indexes.get(i)) is not None:
                rows = index.keys_of(rows.long()) - part.work.rectangles[i].r0
            marks[i].index_fill_(0, rows.long(), now)


def _marks(rectangle: Rectangle) -> Tensor:
    return torch.full((rectangle.r1 - rectangle.r0,), -1, dtype=torch.int32)  # never


def by_key(lookups: tbe.Lookups) -> list[Tensor]:
    """Return the IDs of each key (a route of this rank), over all blocks."""
    assert lookups.segments is not None
    bounds = lookups.offsets[lookups.segments.to(lookups.offsets.device)].tolist()
    num_keys = lookups.num_keys
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    found = []
    for key in range(num_keys):
        places = [block * num_keys + key for block in range(num_blocks)]
        found.append(torch.cat([lookups.values[bounds[p] : bounds[p + 1]] for p in places]))
    return found
