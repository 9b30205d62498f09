"""Record of updated rows on this rank: four bytes per row, and a store per looked-up ID."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from meshrec.distributed.lookup import LookupTables
from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.ops import tbe
from meshrec.tables.hashed.table import ALIVE, HashedTable, has_growable_rows
from meshrec.tables.table import Table
from meshrec.tables.updates import TableGradient

_NEVER = -1


class TouchedRows:
    """Rows in a module's tables that updates touch from now on.

    Args:
        tables: the module's tables.
        fused: fused table numbers. Only these are watched.
        now: returns the current mark.
    """

    def __init__(self, tables: ShardedTables, fused: Collection[int], now: Callable[[], int]) -> None:
        self._fused, self._now = set(fused), now
        self._parts = [tables.split, tables.local]
        self._marks = [[_marks(rows) for rows in _tables(part)] for part in self._parts]
        # Only one watcher at a time: a new record replaces the previous one.
        tables.watch = self._mark

    def touched(self, table: int, since: int) -> Iterator[tuple[Table, Tensor]]:
        """Yield (local rectangle, keys marked above ``since``, ascending) for a table."""
        for rows, marks in self._of(table):
            if isinstance(marks, _HashedMarks):
                yield rows, marks.touched(since)
            else:
                yield rows, (marks > since).nonzero()[:, 0] + rows.rectangle.r0

    def gone(self, table: int, since: int, now: int) -> Iterator[tuple[HashedTable, Tensor]]:
        """Yield (local rectangle, evicted keys without a new row) for a hashed table.

        Args:
            table: table number.
            since: only evictions after this mark count. Earlier evictions are forgotten.
            now: number of the last update.
        """
        for _, marks in self._of(table):
            if isinstance(marks, _HashedMarks):
                yield marks.table, marks.gone(since, now)

    def _of(self, table: int) -> Iterator[tuple[Table, "Tensor | _HashedMarks"]]:
        for part, marks in zip(self._parts, self._marks, strict=True):
            for rows, own in zip(_tables(part), marks, strict=True):
                if rows.rectangle.table == table:
                    yield rows, own

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

    def _set(
        self,
        part: LookupTables,
        marks: "Sequence[Tensor | _HashedMarks]",
        i: int,
        rows: Tensor,
        now: int,
    ) -> None:
        if part.work.rectangles[i].table in self._fused:
            own = marks[i]
            if isinstance(own, _HashedMarks):
                own.mark(rows.long(), now)
                return
            if (index := part.held.indexes.get(i)) is not None:
                # Slots may change owners later, so marks are by key.
                rows = index.keys_of(rows.long()) - part.work.rectangles[i].r0
            own.index_fill_(0, rows.long(), now)


class _HashedMarks:
    """Marks for a hashed table by slot, and marks for evicted keys.

    A slot keeps its mark when another key gets it: that key comes alive in a later update, which marks it.
    """

    def __init__(self, table: HashedTable) -> None:
        self.table = table
        self._marks = torch.empty(0, dtype=torch.int32)
        self._gone, self._gone_marks = torch.empty(2, 0, dtype=torch.int64)
        table.accounting.is_watched = True

    def mark(self, slots: Tensor, now: int) -> None:
        """Mark the rows in an update."""
        num_slots = len(self.table.memory[ALIVE])
        # The table has grown; new slots start without a mark.
        if len(self._marks) < num_slots:
            more = torch.full((num_slots - len(self._marks),), _NEVER, dtype=torch.int32)
            self._marks = torch.cat([self._marks, more])
        self._marks.index_fill_(0, slots, now)
        self._drain(now)

    def touched(self, since: int) -> Tensor:
        """Return the live keys marked above ``since``, ascending."""
        alive = self.table.memory[ALIVE][: len(self._marks)]
        slots = ((self._marks > since)[: len(alive)] & alive).nonzero()[:, 0]
        return self.table.keys_of(slots).sort().values

    def gone(self, since: int, now: int) -> Tensor:
        """Return dead keys evicted after ``since``, ascending; forget earlier evictions."""
        self._drain(now)
        late = self._gone_marks > since
        self._gone, self._gone_marks = self._gone[late], self._gone_marks[late]
        keys: Tensor = self._gone.unique()
        return keys[~is_alive(self.table, keys)]

    def _drain(self, now: int) -> None:
        evicted, self.table.accounting.evicted = self.table.accounting.evicted, []
        for keys in evicted:
            self._gone = torch.cat([self._gone, keys])
            self._gone_marks = torch.cat([self._gone_marks, torch.full_like(keys, now)])


def is_alive(table: HashedTable, keys: Tensor) -> Tensor:
    """Return whether each key has a row, bool [N]."""
    slots = table.slots.find(keys)
    found = slots >= 0
    found[found.clone()] = table.memory[ALIVE][slots[found]]
    return found


def _marks(rows: Table) -> Tensor | _HashedMarks:
    if has_growable_rows(rows):
        return _HashedMarks(rows)
    r = rows.rectangle
    return torch.full((r.r1 - r.r0,), _NEVER, dtype=torch.int32)


def _tables(part: LookupTables) -> list[Table]:
    """Return a part's rectangles, in work order."""
    return [rows for held in part.held.held for rows in held.tables]


def by_key(lookups: tbe.Lookups) -> list[Tensor]:
    """Return the IDs by key (a route on this rank), over all blocks."""
    assert lookups.segments is not None
    bounds = lookups.offsets[lookups.segments.to(lookups.offsets.device)].tolist()
    num_keys = lookups.num_keys
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    found = []
    for key in range(num_keys):
        places = [block * num_keys + key for block in range(num_blocks)]
        found.append(torch.cat([lookups.values[bounds[p] : bounds[p + 1]] for p in places]))
    return found
