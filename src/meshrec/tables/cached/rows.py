"""``meshrec.FileRows``: tables larger than memory, with all rows in a file and a cache in memory."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from typing_extensions import override

from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.cached.cache import slot_bytes
from meshrec.tables.cached.file import RowFile, new_path, part_bytes
from meshrec.tables.cached.regions import InitializedPart, RowRegions
from meshrec.tables.cached.table import FileTable
from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.dense.table import parts_of
from meshrec.tables.initial import block_rows
from meshrec.tables.storage import ExternalRows
from meshrec.tables.table import Rectangle, RowPart, Span


@dataclass(frozen=True, kw_only=True)
class FileRows:
    """Table option: keep rows and optimizer state in a file, and only the rows in use in a cache in memory.

    Give the cache size either in rows or in bytes, for the whole table. If the table is split over ranks,
    every rank has a proportional share. Training gives the same bits as with the table in memory.

    The files are temporary: they are created when the module is sharded and removed with it. A resumed run
    writes new files from its checkpoint. Use a local disk.

    Args:
        path: folder for the files; created if it does not exist.
        cache_rows: number of rows in the cache. It must hold the distinct rows of two batches.
        cache_bytes: cache memory in bytes, including optimizer state and bookkeeping.

    Raises:
        ValueError: neither size is given, or both are, or a size is below 1.
    """

    path: str | Path
    cache_rows: int | None = None
    cache_bytes: int | None = None

    def __post_init__(self) -> None:
        if (self.cache_rows is None) == (self.cache_bytes is None):
            raise ValueError(
                f"FileRows takes cache_rows or cache_bytes, got cache_rows={self.cache_rows} and "
                f"cache_bytes={self.cache_bytes}. Give one of the two."
            )
        for name in ("cache_rows", "cache_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"FileRows: {name} must be an integer >= 1, got {value!r}.")

    def num_cached(self, row_bytes: int) -> int:
        """Return the cache size in rows, for the whole table.

        Args:
            row_bytes: bytes per whole row, including optimizer state.
        """
        if self.cache_rows is not None:
            return self.cache_rows
        assert self.cache_bytes is not None
        # The bookkeeping per slot counts as cache memory, too.
        return self.cache_bytes // slot_bytes(row_bytes)


@dataclass(frozen=True)
class FileBackedRows(ExternalRows, DenseRows):
    """Storage for fixed tables with floating-point rows in a file; see ``FileRows``.

    In a *fixed* table, unlike in a hashed table, IDs are row numbers, and every ID has a row.

    Args:
        dtype: row dtype: fp32, fp16 or bf16.
        options: folder for the file, and cache size.
        name: table name.
        size: numbers of rows and columns in the whole table.
    """

    # ``dtype`` is the first field, inherited from ``DenseRows``.
    options: FileRows
    name: str
    size: Span

    may_fail = True  # a disk may fail
    needs_row_sums = False

    @override
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> FileTable:
        """Create the ``FileTable`` for a part of the table (a rectangle), with a new file.

        Raises:
            ValueError: the device is not the CPU.
            RowFileError: the file cannot be created.
        """
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"table {self.name!r}: rows in a file are for the CPU, and the module is on {device}. Leave "
                "out storage=FileRows(...), or shard the module over CPUs."
            )
        _, r0, r1, c0, c1 = rectangle
        parts = parts_of(self, spec)
        # A table name may have characters that file names cannot have, such as a slash.
        name = re.sub(r"\W", "_", self.name, flags=re.ASCII) + f".{r0}-{r1}.{c0}-{c1}"
        label = f"table {self.name!r}"
        path = new_path(Path(self.options.path), name)
        file = RowFile(path, label, part_bytes(parts, c1 - c0), first_key=r0, num_rows=r1 - r0)
        # Regions match the random blocks of ``initial_rows``, so a region draws a single block.
        initialized_parts = _parts_with_initial_values(parts, spec)
        stored = RowRegions(file, initialized_parts, rectangle, block_rows(*self.size))
        return FileTable(
            rectangle, initialized_parts, stored, num_slots=self._num_slots(rectangle, parts), name=label
        )

    def _num_slots(self, rectangle: Rectangle, parts: list[RowPart]) -> int:
        """Return the number of cache slots for a rectangle: its share of the whole table's cache."""
        num_rows, dim = self.size
        height = rectangle.r1 - rectangle.r0
        cached = self.options.num_cached(sum(part_bytes(parts, dim)))
        # The rectangle's share of the cache equals the share of the table's rows, at least a single row.
        return max(1, min(height, -(-cached * height // num_rows)))


def _parts_with_initial_values(parts: list[RowPart], spec: OptimizerSpec | None) -> list[InitializedPart]:
    """Return row parts with initial values: 0 for weights, the optimizer's values for the state."""
    values = {slot.name: slot.initial_value for slot in spec.state_slots()} if spec is not None else {}
    return [InitializedPart(part, float(values.get(part.name, 0.0))) for part in parts]
