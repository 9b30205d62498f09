"""Record of updated rows on this rank: four bytes per row, and a store per looked-up ID."""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.ops import tbe
from meshrec.tables.hashed.table import ALIVE, HashedTable, has_growable_rows
from meshrec.tables.table import Table
from meshrec.tables.updates import TableGradient

_NEVER = -1


class _FixedMarks:
    """Mark of the last update, by row of a table with fixed rows."""

    def __init__(self, table: Table) -> None:
        r = table.rectangle
        self.table, self._first = table, r.r0
        self._marks = torch.full((r.r1 - r.r0,), _NEVER, dtype=torch.int32)

    def mark(self, slots: Tensor, now: int) -> None:
        """Mark the rows in an update."""
        if self.table.index is not None:
            # Slots may change owners later, so marks are by key.
            slots = self.table.index.keys_of(slots) - self._first
        self._marks.index_fill_(0, slots, now)

    def touched(self, since: int) -> Tensor:
        """Return the keys marked above ``since``, ascending."""
        return (self._marks > since).nonzero()[:, 0] + self._first


class _HashedMarks:
    """Marks for a hashed table by slot, and marks for evicted keys.

    A slot keeps its mark when another key gets it: that key comes alive in a later update, which marks it.
    """

    def __init__(self, table: HashedTable) -> None:
        self.table = table
        self._marks = torch.empty(0, dtype=torch.int32)
        self._evicted, self._evicted_marks = torch.empty(2, 0, dtype=torch.int64)
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

    def evicted(self, since: int, now: int) -> Tensor:
        """Return dead keys evicted after ``since``, ascending; forget earlier evictions."""
        self._drain(now)
        is_late = self._evicted_marks > since
        self._evicted, self._evicted_marks = self._evicted[is_late], self._evicted_marks[is_late]
        keys: Tensor = self._evicted.unique()
        return keys[~is_alive(self.table, keys)]

    def _drain(self, now: int) -> None:
        """Take the table's list of evicted keys, which no other reader needs."""
        evicted, self.table.accounting.evicted = self.table.accounting.evicted, []
        for keys in evicted:
            self._evicted = torch.cat([self._evicted, keys])
            self._evicted_marks = torch.cat([self._evicted_marks, torch.full_like(keys, now)])


class TouchedRows:
    """Rows in a module's tables that updates touch from now on.

    Args:
        tables: the module's tables.
        fused: fused table numbers. Only these are watched.
        now: returns the current mark.
    """

    def __init__(self, tables: ShardedTables, fused: Collection[int], now: Callable[[], int]) -> None:
        self._fused, self._now = set(fused), now
        # By part (split, data-parallel) and rectangle, in the order of ``tables.watch``.
        self._marks: list[list[_FixedMarks | _HashedMarks]] = [
            [
                _HashedMarks(table) if has_growable_rows(table) else _FixedMarks(table)
                for shard in part.held.held
                for table in shard.tables
            ]
            for part in (tables.split, tables.local)
        ]
        # Only one watcher at a time: a new record replaces the previous one.
        tables.watch = self._mark

    def touched(self, table: int, since: int) -> Iterator[tuple[Table, Tensor]]:
        """Yield (local rectangle, keys marked above ``since``, ascending) for a table."""
        for marks in self._marks_of(table):
            yield marks.table, marks.touched(since)

    def evicted(self, table: int, since: int, now: int) -> Iterator[tuple[HashedTable, Tensor]]:
        """Yield (local rectangle, evicted keys without a new row) for a hashed table.

        Args:
            table: table number.
            since: only evictions after this mark count. Earlier evictions are forgotten.
            now: number of the last update.
        """
        for marks in self._marks_of(table):
            if isinstance(marks, _HashedMarks):
                yield marks.table, marks.evicted(since, now)

    def _marks_of(self, table: int) -> Iterator[_FixedMarks | _HashedMarks]:
        for part in self._marks:
            yield from (marks for marks in part if marks.table.rectangle.table == table)

    def _mark(self, gradients: Sequence[TableGradient]) -> None:
        now = self._now()
        for part, gradient in zip(self._marks, gradients, strict=False):
            slots = [(i, rows.rows) for i, rows in gradient.rows.items()]
            if gradient.looked_up is not None:
                lookups = gradient.looked_up.lookups
                values = by_key(lookups)
                slots += [
                    (i, values[key])
                    for key, i in zip(lookups.keys, lookups.tables, strict=True)
                    if i not in gradient.rows
                ]
            for i, rectangle_slots in slots:
                if part[i].table.rectangle.table in self._fused:
                    part[i].mark(rectangle_slots.long(), now)


def is_alive(table: HashedTable, keys: Tensor) -> Tensor:
    """Return whether each key has a row, bool [N]."""
    slots = table.slots.find(keys)
    is_present = slots >= 0
    is_present[is_present.clone()] = table.memory[ALIVE][slots[is_present]]
    return is_present


def by_key(lookups: tbe.Lookups) -> list[Tensor]:
    """Return the IDs by key (a route on this rank), over all blocks."""
    assert lookups.segments is not None
    bounds = lookups.offsets[lookups.segments.to(lookups.offsets.device)].tolist()
    num_keys = lookups.num_keys
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    ids = []
    for key in range(num_keys):
        segments = [block * num_keys + key for block in range(num_blocks)]
        ids.append(torch.cat([lookups.values[bounds[s] : bounds[s + 1]] for s in segments]))
    return ids
