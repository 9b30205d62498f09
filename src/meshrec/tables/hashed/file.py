"""Hashed tables with rows in a file, and a cache in memory.

[Note: hashed rows in a file]

A row is found in two steps. The table's hash index maps the key to a slot, as in memory; this slot is the
record number in the file, and the cache key. Values for the index, admission and eviction (a
liveness flag, policy parts) stay in memory by slot, a few bytes per row; weights and optimizer state are in
the file. A row starts in the cache, and is written to the file when the cache evicts it. So no record is read
before it was written, and a slot may get another row without a change to the file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from meshrec.tables.cached.file import RowFile, memory_for, new_path, part_bytes
from meshrec.tables.cached.regions import StoredRows
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.cached.table import FileTable, RowLog, RowPartStart, RowsInFlight
from meshrec.tables.hashed.keys import ALL_KEYS
from meshrec.tables.index import Resolved
from meshrec.tables.table import Rectangle, RowBlock, Span


@final
class HashedFile:
    """Weights and optimizer state for a hashed table's rectangle, in a file.

    Rows are identified by index slot.

    Args:
        rectangle: keys and columns.
        starts: parts: the weight, and optimizer slots.
        options: file folder, and cache size for the whole table.
        name: table name.
        dim: whole-row width.
        max_rows: slots in the rectangle's index.
    """

    def __init__(
        self,
        rectangle: Rectangle,
        starts: Sequence[RowPartStart],
        options: FileRows,
        *,
        name: str,
        dim: int,
        max_rows: int,
    ) -> None:
        table, r0, r1, c0, c1 = rectangle
        parts = [start.part for start in starts]
        self._starts, self._rectangle = starts, rectangle
        file_name = re.sub(r"\W", "_", name, flags=re.ASCII) + f".{r0}-{r1}.{c0}-{c1}"
        label = f"table {name!r}"
        path = new_path(Path(options.path), file_name)
        file = RowFile(path, label, part_bytes(parts, c1 - c0), first_key=0, num_rows=max_rows)
        cached = options.num_cached(sum(part_bytes(parts, dim)))
        share = -(-cached * (r1 - r0) // (ALL_KEYS[1] - ALL_KEYS[0]))
        self.table = FileTable(
            Rectangle(table, 0, max_rows, c0, c1),
            starts,
            StoredRows(file),
            num_slots=max(1, min(share, max_rows)),
            name=label,
        )
        """File and cache. The "keys" are index slots."""
        self.slot_keys = torch.zeros(len(self.table.slot_keys), dtype=torch.int64)
        """Row key per cache slot."""

    def resolve(self, slots: Tensor, keys: Tensor, *, train: bool) -> tuple[Tensor, RowsInFlight]:
        """Return cache slots for rows and a pin, and start to bring the rows there.

        Args:
            slots: index slots, int64 [N].
            keys: ID keys for these slots, int64 [N].
            train: whether the rows will be updated.
        """
        resolved = self.table.resolve(slots, train=train)
        here = self.table.slot_keys[resolved.slots] == slots  # false for rows without room
        self.slot_keys[resolved.slots[here]] = keys[here]
        assert isinstance(resolved.pin, RowsInFlight)
        resolved.pin.band = self._rectangle[:3]
        return resolved.slots, resolved.pin

    def start_rows(self, slots: Tensor, weights: Tensor) -> None:
        """Set new rows with initial optimizer state.

        Args:
            slots: index slots, int64 [N].
            weights: initial weights, [N, columns].
        """
        slots, order = slots.sort()
        rows = memory_for(self.table.parts, len(slots), weights.shape[1])
        rows[0].copy_(weights[order])
        for start, part in zip(self._starts[1:], rows[1:], strict=True):
            part.fill_(start.value)
        self.table.start_rows(slots, rows)

    def read(self, slots: Tensor, frozen: RowLog | None = None) -> dict[str, Tensor]:
        """Return the rows at some index slots by part name.

        Args:
            slots: index slots, int64 [N].
            frozen: snapshot to read from; None: present rows.
        """
        ascending, order = slots.sort()
        source = self.table if frozen is None else frozen
        parts = {}
        for part, rows in zip(self.table.parts, source.rows_at(ascending), strict=True):
            parts[part.name] = torch.empty_like(rows)
            parts[part.name][order] = rows
        return parts

    def load(self, slots: Tensor, columns: Span, parts: Mapping[str, Tensor]) -> None:
        """Replace some columns of rows. All slots must be in use.

        Args:
            slots: index slots, int64 [N].
            columns: table columns.
            parts: new values, by part name.
        """
        slots, order = slots.sort()
        values = {part.name: parts[part.name][order] for part in self.table.parts if part.name in parts}
        if values:
            self.table.load([RowBlock(slots, columns, values)])


@final
class CachedKeys:
    """Index for a hashed table with rows in a file: maps keys to cache slots.

    Args:
        resolve: the table's ``Index.resolve`` method.
        slot_keys: key per cache slot.
    """

    def __init__(self, resolve: Callable[..., Resolved], slot_keys: Tensor) -> None:
        self.resolve, self.slot_keys = resolve, slot_keys

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the keys for rows in these cache slots."""
        return self.slot_keys[slots]
