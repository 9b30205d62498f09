"""The rows of a table larger than memory as they were at one moment, while training goes on.

[Note: how a table in a file is frozen]

From the mark on, the first batch that may change a row writes it, as it is, to a log of the snapshot, before
the batch changes it. (Rows of batches that were in flight at the mark are written at once.) So a row as it
was at the mark is in the log; or, if it is not there, nobody has changed it: it is where the table has it, in
memory or in the file. A background checkpoint reads all this in a forked process, in which memory is what it
was at the fork and training goes on to change the files. It reads a row from the table's file first and looks
into the log
afterwards: a row that was overwritten under its eyes is in the log by then.
"""

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final

import torch
from torch import Tensor

from meshrec.ops import records
from meshrec.tables.row_file import RowFileError, memory_for, places_in
from meshrec.tables.table import RowBlock, RowPart, Span

_SECTOR = 512


class FrozenSource(Protocol):
    """The interface that a snapshot needs of its table."""

    def spans(self, keys: Span | None) -> Iterator[Span]:
        """Split keys into spans, one for each block."""

    def rows_at(self, keys: Tensor, known: Tensor | None = None) -> list[Tensor]:
        """Return the parts of the rows of some keys as they are now; rows of ``known`` keys are not read."""

    def block_of(self, keys: range, parts: Sequence[Tensor], columns: Span | None) -> RowBlock:
        """Return a block of rows."""

    def leave(self, snapshot: "RowLog") -> None:
        """Stop writing to this snapshot's log."""


@final
class RowLog:
    """A snapshot of a table; see [Note: how a table in a file is frozen].

    Args:
        table: the table.
        path: a new file for the log.
        parts: the parts of a row, and the number of columns.
        num_slots: the number of slots of the table's cache.
    """

    def __init__(
        self, table: FrozenSource, path: Path, parts: tuple[Sequence[RowPart], int], num_slots: int
    ) -> None:
        self._table, self._path, self._parts = table, path, parts
        self._is_logged = torch.zeros(num_slots, dtype=torch.bool)
        self._num_rows, self._seen = 0, torch.empty(0, dtype=torch.int64)
        kinds, width = parts
        record = 8 + sum((1 if part.per_row else width) * part.dtype.itemsize for part in kinds) + 4
        self._layout = records.RecordLayout(0, 1, -(-record // _SECTOR) * _SECTOR, record, 0)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, path, os.getpid())

    def fresh(self, slots: Tensor, new: Tensor, *, train: bool = True) -> Tensor:
        """Return the slots whose rows must be logged before the batch changes them.

        Args:
            slots: the slots of a batch.
            new: the slots that have another row now.
            train: whether the batch may change rows.
        """
        self._is_logged[new] = False
        found = slots[~self._is_logged[slots]] if train else slots[:0]
        self._is_logged[found] = True
        return found

    def append(self, keys: Tensor, memory: Sequence[Tensor], slots: Tensor) -> None:
        """Write rows to the log; ``keys``: the key of each slot of ``memory``.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        places = torch.arange(self._num_rows, self._num_rows + len(slots))
        # One after the other: the file never has a later row and lacks an earlier one.
        failures = records.write(self._file, self._layout, places, [keys, *memory], slots)
        if len(failures):
            cause = os.strerror(int(failures[0, 1]))
            raise RowFileError(
                f"cannot write to {self._path}, the log of rows that change while a checkpoint is written: "
                f"{cause}. Nothing was changed by this step; free space on that disk and go on."
            )
        self._num_rows += len(slots)

    def append_rows(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Write rows that are not in slots to the log."""
        self.append(keys, rows, torch.arange(len(keys)))

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows as they were at the mark; see ``tables.table.RowsSnapshot``."""
        for first, end in self._table.spans(keys):
            parts = self.rows_at(torch.arange(first, end))
            yield self._table.block_of(range(first, end), parts, columns)

    def rows_at(self, keys: Tensor) -> list[Tensor]:
        """Return the parts of the rows of some keys, int64 [N] and ascending, as they were at the mark.

        Raises:
            RowFileError: a row or an entry of the log is damaged.
        """
        parts = self._table.rows_at(keys, self._entries(keys) >= 0)
        entries = self._entries(keys)
        logged = (entries >= 0).nonzero()[:, 0]
        logged = logged[entries[logged].argsort()]
        for part, values in zip(parts, self._read(entries[logged])[1], strict=True):
            part[logged] = values
        return parts

    def close(self) -> None:
        """Remove the log."""
        self._table.leave(self)
        self._end()

    def _entries(self, keys: Tensor) -> Tensor:
        """Return the number of each key's first entry in the log; -1 for a key without one."""
        with suppress(FileNotFoundError):
            self._catch_up()
        places = places_in(keys, self._seen)
        here = (places >= 0).nonzero()[:, 0]
        none = len(self._seen)
        found = torch.full_like(keys, none).scatter_reduce_(0, places[here], here, "amin")
        return torch.where(found < none, found, -1)

    def _catch_up(self) -> None:
        count = os.stat(self._path).st_size // self._layout.block_bytes
        places = torch.arange(len(self._seen), count)
        if len(places):
            found, _ = self._read(places)
            self._seen = torch.cat([self._seen, found])

    def _read(self, places: Tensor) -> tuple[Tensor, list[Tensor]]:
        kinds, width = self._parts
        keys, rows = torch.empty(len(places), dtype=torch.int64), memory_for(kinds, len(places), width)
        if len(places):
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                here = torch.arange(len(places))
                failures = records.read(file, self._layout, places, [keys, *rows], here)
            finally:
                os.close(file)
            if len(failures):
                raise RowFileError(
                    f"{self._path}, the log of rows that change while a checkpoint is written, is damaged at "
                    f"entry {int(places[failures[0, 0]])}. The checkpoint before this one stays; check the "
                    f"disk."
                )
        return keys, rows


def _remove(file: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        os.close(file)
        path.unlink(missing_ok=True)
