"""Log of old row versions, which keeps a snapshot of a table in a file while training continues."""

import os
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from meshrec.durable import CreatedPath
from meshrec.ops import records
from meshrec.tables.cached.file import RowFileError, memory_for, part_bytes, positions_in
from meshrec.tables.table import RowPart

_SECTOR = 512  # log entries are padded to whole disk sectors


@final
class RowLog:
    """File with the old versions of rows changed since a snapshot.

    An entry in the log is a key and the row under this key. See [Note: how a table in a file is frozen] in
    ``table.py``.

    Args:
        path: new file for the log.
        parts: row parts.
        width: column count.
        num_slots: number of slots in the table's cache.
    """

    def __init__(self, path: Path, parts: Sequence[RowPart], width: int, *, num_slots: int) -> None:
        # From ``FileTable.snapshot`` until ``close``. Only the writing process appends entries.
        self._path, self._parts, self._width = path, parts, width
        # Whether the row now in a slot is in the log, or about to be written to it.
        self._is_logged = torch.zeros(num_slots, dtype=torch.bool)
        # Number of entries written, for the writing process; keys of the entries read so far, for the reading
        # process.
        self._num_rows, self._seen = 0, torch.empty(0, dtype=torch.int64)
        # Per entry: key (8 bytes), row parts, and checksum (4 bytes), padded to whole sectors.
        record = 8 + sum(part_bytes(parts, width)) + 4
        self._layout = records.RecordLayout(0, 1, -(-record // _SECTOR) * _SECTOR, record, 0)
        self._file, created = CreatedPath.create_file(path, 0o600)
        self._end = weakref.finalize(self, _remove, self._file, created, os.getpid())

    def mark_logged(self, slots: Tensor, new: Tensor, *, train: bool = True) -> Tensor:
        """Select the slots whose rows must be logged before a batch changes them, and mark them as logged.

        Args:
            slots: distinct slots used by the batch, int64.
            new: slots that have just been assigned to other keys, so their marks are cleared first, int64.
            train: whether the batch may change rows. If not, no slot is selected.

        Returns:
            The selected slots, int64.
        """
        self._is_logged[new] = False
        unlogged = slots[~self._is_logged[slots]] if train else slots[:0]
        self._is_logged[unlogged] = True
        return unlogged

    def append(self, keys: Tensor, memory: Sequence[Tensor], slots: Tensor) -> None:
        """Append the rows in some slots to the log.

        Args:
            keys: row key per slot of the whole memory, int64.
            memory: memory per row part, indexed by slot.
            slots: slots with the rows to write, int64.

        Raises:
            RowFileError: the disk is full, or fails.
        """
        # An entry's number is its position in the file.
        entries = torch.arange(self._num_rows, self._num_rows + len(slots))
        # Entries are written in order: a reader takes the file size as the number of complete entries.
        failures = records.write(self._file, self._layout, entries, [keys, *memory], slots)
        if len(failures):
            cause = os.strerror(int(failures[0, 1]))
            raise RowFileError(
                f"cannot write to {self._path}, the log of rows that change while a checkpoint is written: "
                f"{cause}. Nothing was changed by this step; free space on that disk and go on."
            )
        self._num_rows += len(slots)

    def contains(self, keys: Tensor) -> Tensor:
        """Return whether the log has a row under each key, bool [N]."""
        return self._entries(keys) >= 0

    def restore(self, keys: Tensor, rows: Sequence[Tensor]) -> None:
        """Replace rows by the logged versions, where the log has one.

        Args:
            keys: row keys, int64 [N].
            rows: rows to change, one tensor with N rows per row part.

        Raises:
            RowFileError: a log entry is damaged.
        """
        entries = self._entries(keys)
        logged = (entries >= 0).nonzero()[:, 0]
        # The log is a record file, whose reader takes ascending entry numbers.
        logged = logged[entries[logged].argsort()]
        for part, values in zip(rows, self._read(entries[logged])[1], strict=True):
            part[logged] = values

    def close(self) -> None:
        """Remove the file."""
        self._end()

    def _entries(self, keys: Tensor) -> Tensor:
        """Return the number of the first log entry per key, int64 [N]; -1 for keys without an entry."""
        # The file is missing if the snapshot was closed.
        with suppress(FileNotFoundError):
            self._read_new_entries()
        positions = positions_in(keys, self._seen)
        here = (positions >= 0).nonzero()[:, 0]
        none = len(self._seen)
        # A row may be logged again after it left the cache and changed. Only the first entry has the old row.
        first_entries = torch.full_like(keys, none).scatter_reduce_(0, positions[here], here, "amin")
        return torch.where(first_entries < none, first_entries, -1)

    def _read_new_entries(self) -> None:
        """Read the keys of the log entries written since the last call, and append them to ``_seen``."""
        count = os.stat(self._path).st_size // self._layout.block_bytes
        entries = torch.arange(len(self._seen), count)
        if len(entries):
            new_keys, _ = self._read(entries)
            self._seen = torch.cat([self._seen, new_keys])

    def _read(self, entries: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Read log entries by number, int64 [N].

        Returns:
            Row keys, int64 [N], and rows, one tensor with N rows per row part.
        """
        keys = torch.empty(len(entries), dtype=torch.int64)
        rows = memory_for(self._parts, len(entries), self._width)
        if len(entries):
            # Open by path: the reader may be a forked process in which the parent's files are closed.
            file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                here = torch.arange(len(entries))
                failures = records.read(file, self._layout, entries, [keys, *rows], here)
            finally:
                os.close(file)
            if len(failures):
                raise RowFileError(
                    f"{self._path}, the log of rows that change while a checkpoint is written, is damaged at "
                    f"entry {int(entries[failures[0, 0]])}. The checkpoint before this one stays; check the "
                    f"disk."
                )
        return keys, rows


def _remove(file: int, created: CreatedPath, owner: int) -> None:
    """Close and remove the log file. Does nothing in a forked child."""
    if os.getpid() == owner:
        os.close(file)
        created.remove()
