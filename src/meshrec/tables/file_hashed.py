"""The rows of a hashed table in a file, with a cache of them in memory.

[Note: hashed rows in a file]

Two steps find a row. The table's hash index gives its key a slot, as in memory; the slot is the number of the
row's record in the file, and the key of the cache. What the index, admission and eviction need of every row
(whether it is alive, its policy's parts) stays in memory by slot, a few bytes each; weights and optimizer
state are in the file. A row begins its life in the cache, and reaches the file when it leaves the cache
changed. So no record is read before it was written, and a slot may get another row without the file knowing.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from meshrec.tables.file_rows import FileRows
from meshrec.tables.file_table import FileTable, RowPartStart
from meshrec.tables.index import Resolved
from meshrec.tables.key_space import ALL_KEYS
from meshrec.tables.row_file import RowFile, file_in, memory_for, part_bytes
from meshrec.tables.row_log import RowLog
from meshrec.tables.row_regions import EveryRow
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span


class FiledForm(Protocol):
    """The storage of a hashed table in a file."""

    @property
    def file(self) -> FileRows | None:
        """The options of the file: its folder and the size of the cache."""

    @property
    def name(self) -> str:
        """The name of the table."""

    @property
    def dim(self) -> int:
        """The width of whole rows."""


@final
class HashedFile:
    """Weights and optimizer state of a rectangle of a hashed table, by slot of its index.

    Args:
        rectangle: the keys and columns.
        starts: the weight and the slots of the optimizer.
        options: where the file is, and the size of the cache of the whole table.
        name: the table's name.
        dim: the width of whole rows.
        max_rows: the number of rows that the rectangle's index may have.
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
        what = f"table {name!r}"
        path = file_in(Path(options.path), file_name)
        file = RowFile(path, what, part_bytes(parts, c1 - c0), first_key=0, num_rows=max_rows)
        cached = options.num_cached(sum(part_bytes(parts, dim)))
        share = -(-cached * (r1 - r0) // (ALL_KEYS[1] - ALL_KEYS[0]))
        self.table = FileTable(
            Rectangle(table, 0, max_rows, c0, c1),
            starts,
            EveryRow(file),
            num_slots=max(1, min(share, max_rows)),
            name=what,
        )
        """The file and its cache. Its keys are slots of the index."""
        self.slot_keys = torch.zeros(len(self.table.slot_keys), dtype=torch.int64)
        """The key whose row is in each place of the cache."""

    @classmethod
    def of(
        cls,
        parts: Sequence[RowPart],
        row: dict[str, Tensor],
        rectangle: Rectangle,
        storage: "FiledForm",
        max_rows: int,
    ) -> "HashedFile":
        """Make the file of a table, and remove the parts that are in it from ``row``, a new row."""
        starts = [RowPartStart(part, float(row.pop(part.name).max())) for part in parts if part.name in row]
        assert storage.file is not None
        return cls(rectangle, starts, storage.file, name=storage.name, dim=storage.dim, max_rows=max_rows)

    def resolve(self, slots: Tensor, keys: Tensor, *, train: bool) -> Resolved:
        """Return the places of the rows of some slots in the cache, and begin to bring the rows there.

        ``keys``: the keys that have the slots.
        """
        found = self.table.resolve(slots, train=train)
        here = self.table.slot_keys[found.slots] == slots  # not so where the rows have no room
        self.slot_keys[found.slots[here]] = keys[here]
        assert found.pin is not None
        found.pin.band = self._rectangle[:3]  # type: ignore[attr-defined]
        return found

    def begin(self, slots: Tensor, weights: Tensor) -> None:
        """Give slots new rows with the state before the first update."""
        slots, order = slots.sort()
        rows = memory_for(self.table.parts, len(slots), weights.shape[1])
        rows[0].copy_(weights[order])
        for start, part in zip(self._starts[1:], rows[1:], strict=True):
            part.fill_(start.value)
        self.table.begin(slots, rows)

    def read(self, slots: Tensor, frozen: RowLog | None = None) -> dict[str, Tensor]:
        """Read the rows of some slots, as they are now or as a snapshot has them."""
        ascending, order = slots.sort()
        source = self.table if frozen is None else frozen
        found = {}
        for part, rows in zip(self.table.parts, source.rows_at(ascending), strict=True):
            found[part.name] = torch.empty_like(rows)
            found[part.name][order] = rows
        return found

    def load(self, slots: Tensor, columns: Span, parts: Mapping[str, Tensor]) -> None:
        """Replace some columns of the given parts in the rows of ``slots``, all of which are in use."""
        slots, order = slots.sort()
        chosen = {part.name: parts[part.name][order] for part in self.table.parts if part.name in parts}
        if chosen:
            self.table.load([RowBlock(slots, columns, chosen)])


@final
class CachedKeys:
    """The index of a hashed table in a file, which gives keys places in the cache.

    Args:
        resolve: see ``tables.index.Index``.
        slot_keys: the key whose row is in each place.
    """

    def __init__(self, resolve: Callable[..., Resolved], slot_keys: Tensor) -> None:
        self.resolve, self.slot_keys = resolve, slot_keys

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the key whose row is in each place of the cache."""
        return self.slot_keys[slots]
