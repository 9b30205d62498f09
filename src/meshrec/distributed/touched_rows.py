"""Record which rows updates have changed on this rank, for delta checkpoints.

A row's *mark* is the number of the last update which changed the row. Marks take four bytes per row, and an
update writes a mark per looked-up ID. A delta checkpoint saves the rows with marks after the previous
checkpoint.
"""

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from meshrec.distributed.sharded_tables import ShardedTables
from meshrec.ops import tbe
from meshrec.tables.hashed.row_store import ALIVE
from meshrec.tables.hashed.table import HashedTable, has_growable_rows
from meshrec.tables.table import Table
from meshrec.tables.updates import TableGradient

# Mark of a row which no update has changed yet.
_NEVER = -1


class _FixedMarks:
    """The marks for a rectangle (row and column range) of a table with a fixed number of rows, by key.

    The mark is the number of the last update which changed the row.
    """

    def __init__(self, table: Table) -> None:
        r = table.rectangle
        self.table, self._first = table, r.r0
        # int32 is enough for two billion updates.
        self._marks = torch.full((r.r1 - r.r0,), _NEVER, dtype=torch.int32)

    def mark(self, slots: Tensor, now: int) -> None:
        """Set the marks of some rows to ``now``, the number of the current update."""
        if self.table.index is not None:
            # Marks are by key, because a slot of a cache later holds another row.
            slots = self.table.index.keys_at(slots) - self._first
        self._marks.index_fill_(0, slots, now)

    def touched(self, since: int) -> Tensor:
        """Return the keys of all rows changed after update ``since``, ascending, int64."""
        return (self._marks > since).nonzero()[:, 0] + self._first


class _HashedMarks:
    """The marks for a rectangle (row and column range) of a hashed table, by slot, and for evicted keys.

    The mark is the number of the last update which changed the row. A slot is a row's position in
    memory. If an update gives a slot to another key, it also marks the slot, so the new key never has the
    old key's mark.
    """

    def __init__(self, table: HashedTable) -> None:
        self.table = table
        # Grows with the table, see ``mark``.
        self._marks = torch.empty(0, dtype=torch.int32)
        # Keys evicted since the last call of evicted(), and the updates which evicted them.
        self._evicted, self._evicted_marks = torch.empty(2, 0, dtype=torch.int64)
        # From now on, the table lists the keys it evicts.
        table.accounting.is_watched = True

    def mark(self, slots: Tensor, now: int) -> None:
        """Set the marks of the rows in ``slots``, and of keys evicted since the last call, to ``now``."""
        num_slots = len(self.table.memory[ALIVE])
        # The table has grown; new slots start without a mark.
        if len(self._marks) < num_slots:
            more = torch.full((num_slots - len(self._marks),), _NEVER, dtype=torch.int32)
            self._marks = torch.cat([self._marks, more])
        self._marks.index_fill_(0, slots, now)
        self._take_evicted(now)

    def touched(self, since: int) -> Tensor:
        """Return the keys of all live rows changed after update ``since``, ascending, int64."""
        alive = self.table.memory[ALIVE][: len(self._marks)]
        slots = ((self._marks > since)[: len(alive)] & alive).nonzero()[:, 0]
        return self.table.keys_at(slots).sort().values

    def evicted(self, since: int, now: int) -> Tensor:
        """Return the keys evicted after update ``since`` which have no row now, ascending, int64.

        Forgets earlier evictions.
        """
        self._take_evicted(now)
        is_late = self._evicted_marks > since
        self._evicted, self._evicted_marks = self._evicted[is_late], self._evicted_marks[is_late]
        # A key may have been evicted several times.
        keys: Tensor = self._evicted.unique()
        return keys[~is_alive(self.table, keys)]

    def _take_evicted(self, now: int) -> None:
        """Take over the table's list of evicted keys, with the mark ``now``, and clear that list."""
        evicted, self.table.accounting.evicted = self.table.accounting.evicted, []
        for keys in evicted:
            self._evicted = torch.cat([self._evicted, keys])
            self._evicted_marks = torch.cat([self._evicted_marks, torch.full_like(keys, now)])


class TouchedRows:
    """Record of the rows which updates have changed in a module's tables on this rank.

    Args:
        tables: the module's tables. A new `TouchedRows` object for them replaces an earlier object.
        fused: numbers of the tables to record. These tables must have fused optimizers.
        now: function which returns the number of the current update. The number never decreases.
    """

    def __init__(self, tables: ShardedTables, fused: Collection[int], now: Callable[[], int]) -> None:
        self._fused, self._now = set(fused), now
        # First index: split or data-parallel tables; second: rectangle. In the order of ``tables.watch``.
        self._marks: list[list[_FixedMarks | _HashedMarks]] = [
            [
                _HashedMarks(table) if has_growable_rows(table) else _FixedMarks(table)
                for shard in part.shards.shards
                for table in shard.tables
            ]
            for part in (tables.split, tables.local)
        ]
        # ``watch`` holds one function, so a new record replaces the previous one.
        tables.watch = self._mark

    def touched(self, table: int, since: int) -> Iterator[tuple[Table, Tensor]]:
        """Yield a table's rectangles on this rank, with the keys of the rows changed after update ``since``.

        A rectangle is a row and column range of the table. A key is a row number, or in hashed tables a hash.

        Args:
            table: table number.
            since: number of an update.
        """
        for marks in self._marks_of(table):
            yield marks.table, marks.touched(since)

    def evicted(self, table: int, since: int, now: int) -> Iterator[tuple[HashedTable, Tensor]]:
        """Yield a hashed table's rectangles on this rank, with the evicted keys which have no row now.

        Yields nothing for a table with a fixed number of rows.

        Args:
            table: table number.
            since: number of an update. Only keys evicted after this update are returned. Earlier evictions
                are forgotten, so later calls cannot return them.
            now: number of the last update.
        """
        for marks in self._marks_of(table):
            if isinstance(marks, _HashedMarks):
                yield marks.table, marks.evicted(since, now)

    def _marks_of(self, table: int) -> Iterator[_FixedMarks | _HashedMarks]:
        """Yield the marks for every rectangle of a table on this rank."""
        for part in self._marks:
            yield from (marks for marks in part if marks.table.rectangle.table == table)

    def _mark(self, gradients: Sequence[TableGradient]) -> None:
        """Mark the rows which a backward pass updates. `ShardedTables` calls it as ``watch``."""
        now = self._now()
        for part, gradient in zip(self._marks, gradients, strict=False):
            # Rectangles whose gradients are already summed by row.
            slots = [(i, rows.rows) for i, rows in gradient.rows.items()]
            if gradient.looked_up is not None:
                lookups = gradient.looked_up.lookups
                # All other rectangles: mark every ID which was looked up.
                values = ids_by_key(lookups)
                slots += [
                    (i, values[key])
                    for key, i in zip(lookups.keys, lookups.tables, strict=True)
                    if i not in gradient.rows
                ]
            for i, rectangle_slots in slots:
                if part[i].table.rectangle.table in self._fused:
                    part[i].mark(rectangle_slots.long(), now)


def is_alive(table: HashedTable, keys: Tensor) -> Tensor:
    """Return whether every key has a row now, bool [N]."""
    slots = table.key_index.find(keys)
    is_present = slots >= 0
    # The copy is the mask: a tensor must not be its own index while it is written.
    is_present[is_present.clone()] = table.memory[ALIVE][slots[is_present]]
    return is_present


def ids_by_key(lookups: tbe.Lookups) -> list[Tensor]:
    """Return the IDs looked up on every route of this rank, from all source ranks.

    Args:
        lookups: the lookup kernel's arguments, with IDs ordered by source rank, then by route. In the
            argument names, "key" means a route.
    """
    assert lookups.segments is not None
    # A single read from the device, with the ends of all segments.
    bounds = lookups.offsets[lookups.segments.to(lookups.offsets.device)].tolist()
    num_keys = lookups.num_keys
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    ids = []
    for key in range(num_keys):
        segments = [block * num_keys + key for block in range(num_blocks)]
        ids.append(torch.cat([lookups.values[bounds[s] : bounds[s + 1]] for s in segments]))
    return ids
