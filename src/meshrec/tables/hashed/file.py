"""Hashed tables with rows in a file, and a cache in memory.

[Note: hashed rows in a file]

A row is found in two steps. First, the table's hash index maps the key to an *index slot*, as for rows in
memory. The index slot is the record number in the file, and it is the key under which the cache
(``cached.table.FileTable``) looks up the *cache slot*, the row's position in memory. Values for admission and
eviction (a liveness flag, policy parts) stay in memory by index slot, a few bytes per row. Weights and
optimizer state are in the file. A new row starts in the cache or in memory next to it, and is written to the
file when the cache evicts it. So no record is read before it was written, and an index slot may get another
row without a change to the file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from meshrec.tables.cached.cache import RowsInFlight
from meshrec.tables.cached.file import RowFile, memory_for, new_path, part_bytes
from meshrec.tables.cached.regions import InitializedPart, StoredRows
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.cached.table import FileSnapshot, FileTable
from meshrec.tables.hashed.keys import ALL_KEYS
from meshrec.tables.index import Resolved
from meshrec.tables.table import Rectangle, RowBlock, Span


@final
class HashedFile:
    """File with the weights and optimizer state for a hashed table rectangle, and a cache.

    A row is identified by the index slot, which the hash index assigns to the ID. The index slot is also the
    record number in the file; see [Note: hashed rows in a file].

    Args:
        rectangle: key and column intervals.
        initialized_parts: row parts with initial values: the weight first, then the optimizer state.
        options: folder for the file, and cache size for the whole table.
        name: table name.
        dim: number of values in a whole row.
        max_rows: greatest number of index slots in the rectangle.
    """

    def __init__(
        self,
        rectangle: Rectangle,
        initialized_parts: Sequence[InitializedPart],
        options: FileRows,
        *,
        name: str,
        dim: int,
        max_rows: int,
    ) -> None:
        table, r0, r1, c0, c1 = rectangle
        parts = [start.part for start in initialized_parts]
        # Fixed for the table's life. ``_rectangle`` has keys, unlike the file table's, which has index slots.
        self._initialized_parts, self._rectangle = initialized_parts, rectangle
        # Tells table and rectangle to a user who looks into the folder.
        file_name = re.sub(r"\W", "_", name, flags=re.ASCII) + f".{r0}-{r1}.{c0}-{c1}"
        label = f"table {name!r}"
        path = new_path(Path(options.path), file_name)
        file = RowFile(path, label, part_bytes(parts, c1 - c0), first_key=0, num_rows=max_rows)
        cached = options.num_cached(sum(part_bytes(parts, dim)))
        # This rectangle's share of the cache equals the share of the key space, rounded up.
        share = -(-cached * (r1 - r0) // (ALL_KEYS[1] - ALL_KEYS[0]))
        self.table = FileTable(
            Rectangle(table, 0, max_rows, c0, c1),
            initialized_parts,
            StoredRows(file),
            num_slots=max(1, min(share, max_rows)),
            name=label,
        )
        """Fixed table with a row per index slot: the file, and the cache. The keys are index slots."""
        self.slot_keys = torch.zeros(len(self.table.slot_keys), dtype=torch.int64)
        """Hashed key for the row in a cache slot, int64. Set by ``resolve``, valid while a batch uses it."""

    def resolve(self, slots: Tensor, keys: Tensor, *, train: bool) -> tuple[Tensor, RowsInFlight]:
        """Assign cache slots to rows, and start to copy the rows into these slots in the background.

        Args:
            slots: index slots, int64 [N].
            keys: hashed key per index slot, int64 [N].
            train: whether the rows will be updated.

        Returns:
            Cache slots, int64 [N], and a pin on them. The pin's ``wait`` waits for the rows.
        """
        resolved = self.table.resolve(slots, train=train)
        # False if the cache had no room for the row. The pin's ``wait`` then raises an error.
        here = self.table.slot_keys[resolved.slots] == slots
        self.slot_keys[resolved.slots[here]] = keys[here]
        assert isinstance(resolved.pin, RowsInFlight)
        # The inner table knows index slots only, but messages and ranks compare key intervals.
        resolved.pin.band = self._rectangle[:3]
        return resolved.slots, resolved.pin

    def start_rows(self, slots: Tensor, weights: Tensor) -> None:
        """Set the rows in some index slots to initial weights and initial optimizer state."""
        # The file table takes ascending keys only.
        slots, order = slots.sort()
        rows = memory_for(self.table.parts, len(slots), weights.shape[1])
        # The weight is the first part; the others are optimizer state with constant initial values.
        rows[0].copy_(weights[order])
        for start, part in zip(self._initialized_parts[1:], rows[1:], strict=True):
            part.fill_(start.value)
        self.table.start_rows(slots, rows)

    def read(self, slots: Tensor, frozen: FileSnapshot | None = None) -> dict[str, Tensor]:
        """Return copies of the rows in some index slots, by part name."""
        ascending, order = slots.sort()
        source = self.table if frozen is None else frozen
        parts = {}
        # Invert the sort, so rows have the order of ``slots``.
        for part, rows in zip(self.table.parts, source.rows_at(ascending), strict=True):
            parts[part.name] = torch.empty_like(rows)
            parts[part.name][order] = rows
        return parts

    def load(self, slots: Tensor, columns: Span, parts: Mapping[str, Tensor]) -> None:
        """Replace some columns of the rows in some index slots. The slots must hold rows.

        Args:
            slots: index slots, int64 [N].
            columns: table columns to replace.
            parts: new values by part name, one row per slot. Parts that are not in the file are ignored.
        """
        slots, order = slots.sort()
        values = {part.name: parts[part.name][order] for part in self.table.parts if part.name in parts}
        if values:
            self.table.load([RowBlock(slots, columns, values)])


@final
class CachedKeys:
    """``Index`` of a hashed table with rows in a file: maps hashed keys to cache slots.

    Args:
        resolve: method ``HashedTable.resolve``.
        slot_keys: hashed key for the row in a cache slot, int64.
    """

    def __init__(self, resolve: Callable[..., Resolved], slot_keys: Tensor) -> None:
        self.resolve, self.slot_keys = resolve, slot_keys

    def keys_at(self, slots: Tensor) -> Tensor:
        """Return the hashed keys of the rows in some cache slots, int64."""
        return self.slot_keys[slots]
