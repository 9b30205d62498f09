"""File with the rows and optimizer state of a table larger than memory, a fixed-width record per row.

[Note: the scratch file of a table]

The file belongs to a single process. It lies in a scratch folder inside the folder named in ``FileRows``.
Checkpoints are separate files, and a resumed run writes a new scratch file from the checkpoint. So the
scratch file need not survive a crash. If a process is killed, the scratch folder stays, until the table's
next file is created in the same folder.

Rows are grouped in *regions* of consecutive rows. A region is written whole before any record in it is read:
with initial values, which are a function of the seed, the table and the row, or with loaded values. So a
record that does not match the checksum is damaged, even if all bytes are zero.
"""

import contextlib
import errno
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshrec.durable import make_scratch, remove_scratch
from meshrec.ops import records
from meshrec.ops.library import has_kernels
from meshrec.tables.table import RowPart

_SECTOR = 512  # unit of direct I/O, in bytes
_NAME = "rows"  # name of the file in its scratch folder
IN_FLIGHT = 128
"""Number of concurrent disk requests. More did not increase throughput on the disks that were measured."""


class RowFileError(RuntimeError):
    """A table's row file could not be created, read or written."""


class RowFile:
    """File with a fixed-width record, found by key, for every key in [first_key, first_key + num_rows).

    The file is removed when this object is dropped or closed. Reads and writes may come from several threads.

    Args:
        path: path for the new file, from `new_path`.
        label: table name in messages.
        part_bytes: bytes per row for every row part.
        first_key: first key.
        num_rows: number of keys.

    Raises:
        RowFileError: the file cannot be created.
    """

    def __init__(
        self, path: Path, label: str, part_bytes: Sequence[int], *, first_key: int, num_rows: int
    ) -> None:
        # Fixed for the file's life, as are the layout and the size below.
        self.path, self._label = path, label
        record = sum(part_bytes) + 4  # with a checksum
        # Blocks are whole sectors, as O_DIRECT requires, and hold as many records as fit in a sector.
        per_block = max(1, _SECTOR // record)
        block = -(-per_block * record // _SECTOR) * _SECTOR
        # The random salt makes the checksums differ from those of any other file: a record left on the disk
        # by an earlier file does not match.
        self.layout = records.RecordLayout(first_key, per_block, block, record, secrets.randbits(32))
        self.num_bytes = -(-num_rows // per_block) * block
        # Compared with the process ID, to recognize forked children.
        self._owner = os.getpid()
        try:
            self._file, self.is_direct = _create_file(path, self.num_bytes)
        except OSError as error:
            raise self._error(error.errno or 0, 0, "make") from error
        # Removes the file when this object is dropped or at exit, in the owner process only.
        self._close = weakref.finalize(self, _remove, self._file, path.parent, self._owner)

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read the rows under some keys from the file to slots in memory.

        Args:
            keys: row keys, ascending, int64 [N].
            parts: memory to fill, one tensor per row part, indexed by slot.
            slots: slot for the row under each key, int64 [N].

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        with self._open_file() as (file, in_flight):
            failures = records.read(file, self.layout, keys, parts, slots, in_flight=in_flight)
        self._check(failures, keys, "read")

    def write(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Write rows from slots in memory to the file.

        Args:
            keys: row keys, ascending, int64 [N].
            parts: memory to read, one tensor per row part, indexed by slot.
            slots: slot with the row under each key, int64 [N].

        Raises:
            RowFileError: the disk is full, or fails. Some rows may have been written.
        """
        with self._open_file() as (file, in_flight):
            failures = records.write(file, self.layout, keys, parts, slots, in_flight=in_flight)
        self._check(failures, keys, "write")

    def close(self) -> None:
        """Close and remove the file and its scratch folder."""
        self._close()

    @contextlib.contextmanager
    def _open_file(self) -> Iterator[tuple[int, int]]:
        """Yield a file descriptor, and the maximum number of concurrent disk requests.

        In a forked child, the file is opened again and the number is 0, for requests in the calling thread.
        """
        # A forked child has no worker threads, and in a background checkpoint not even the open file.
        if os.getpid() == self._owner:
            yield self._file, IN_FLIGHT
            return
        file = os.open(self.path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if self.is_direct else 0))
        try:
            yield file, 0
        finally:
            os.close(file)

    def _check(self, failures: Tensor, keys: Tensor, verb: str) -> None:
        """Raise RowFileError for the first failure, if any.

        Args:
            failures: pairs (position in ``keys``, cause), int64 [F, 2], from ``ops.records``.
        """
        if len(failures):
            number, cause = failures[0].tolist()
            # ``failures`` are sorted by position, so the first row in key order is named.
            raise self._error(cause, int(keys[number]), verb)

    def _error(self, cause: int, key: int, verb: str) -> RowFileError:
        """Return the exception for a failure.

        Args:
            cause: ``errno`` of the failure, or a code in ``ops.records`` for a damaged record.
        """
        if verb == "make":
            return RowFileError(
                f"{self._label}: its file {self.path} cannot be made: {os.strerror(cause)}. Give FileRows a "
                "folder of a disk with room that this process may write to."
            )
        position = self.layout.position(key)
        # Causes below 0 come from ``ops.records``; others are ``errno`` values.
        if cause in (records.DAMAGED, records.END_OF_FILE):
            damage = (
                "the checksum of its record differs" if cause == records.DAMAGED else "the file is shorter"
            )
            return RowFileError(
                f"{self._label}: row {key} is damaged: {damage} in the block at byte {position:,} of "
                f"{self.path}. "
                "Check the disk, and resume from the last checkpoint, which writes the file anew."
            )
        reason = "no space is left on the disk" if cause == errno.ENOSPC else os.strerror(cause)
        message = f"{self._label}: cannot {verb} row {key} at byte {position:,} of {self.path}: {reason}."
        if verb == "read":
            return RowFileError(f"{message} Check the disk, and resume from the last checkpoint.")
        return RowFileError(
            f"{message} No row is lost: what could not be written stays in memory. Free space on that disk "
            "and go on, or resume from the last checkpoint with another path in FileRows."
        )


def new_path(folder: Path, name: str) -> Path:
    """Create a scratch folder for the rows of a table, and return the path for the new file in it.

    Also removes the scratch folders left by killed processes for the same table.

    Raises:
        RowFileError: the folder cannot be created.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return make_scratch(name, folder) / _NAME
    except OSError as error:
        raise RowFileError(
            f"the folder {folder} for rows of {name} cannot be used: {error.strerror}. Give FileRows a "
            f"folder "
            "that this process may write to."
        ) from error


def part_bytes(parts: Sequence[RowPart], width: int) -> list[int]:
    """Return the bytes per row for every row part."""
    return [(1 if part.per_row else width) * part.dtype.itemsize for part in parts]


def positions_in(keys: Tensor, requested: Tensor) -> Tensor:
    """Return the position of each requested key in a sorted list of keys; -1 if the list lacks it."""
    if len(keys) == 0:
        return torch.full_like(requested, -1)
    # The clamp is for requested keys above all keys in the list.
    positions = torch.searchsorted(keys, requested).clamp_(max=len(keys) - 1)
    return torch.where(keys[positions] == requested, positions, -1)


def memory_for(parts: Sequence[RowPart], num_rows: int, width: int) -> list[Tensor]:
    """Allocate uninitialized memory for some rows, one tensor per row part.

    Args:
        parts: row parts: the weight and optimizer state.
        num_rows: row count.
        width: column count.

    Returns:
        A tensor per part: [num_rows, width], or [num_rows] for parts with one value per row.
    """
    return [
        torch.empty((num_rows,) if part.per_row else (num_rows, width), dtype=part.dtype) for part in parts
    ]


def _create_file(path: Path, num_bytes: int) -> tuple[int, bool]:
    """Create a sparse file, and return its descriptor, and whether reads and writes bypass the page cache."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # Sets the size without writing: blocks on disk are allocated by the first write.
        os.ftruncate(file, num_bytes)
    except BaseException:
        remove_scratch(path.parent)
        raise
    direct = _open_direct(path)
    if direct is None:
        # Rows are read at random positions, so the system should not read ahead.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file, False
    os.close(file)
    return direct, True


def _open_direct(path: Path) -> int | None:
    """Open a file with ``O_DIRECT``, which bypasses the page cache; None if it is not supported."""
    if not hasattr(os, "O_DIRECT") or not has_kernels:
        return None  # plain Python cannot allocate sector-aligned memory
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    # Probe with a write: a successful open does not prove that direct I/O works.
    parts = [torch.zeros(1, 1, dtype=torch.int8)]
    # One byte and a 4-byte checksum. No read sees the probe: a record is written before its first read.
    probe = records.RecordLayout(0, 1, _SECTOR, 5, 0)
    one = torch.ones(1, dtype=torch.int64)
    if len(records.write(file, probe, one, parts, one - 1)):
        os.close(file)
        return None
    return file


def _remove(file: int, folder: Path, owner: int) -> None:
    """Close and remove the file and its folder. Does nothing in a forked child."""
    # A forked child exits, too, and must not remove the file of its parent.
    if os.getpid() == owner:
        remove_scratch(folder)
        with contextlib.suppress(OSError):
            os.close(file)
