"""The file of a table larger than memory: its rows, with their optimizer state, in records of one width.

[Note: what the file of a table is worth]

The file belongs to one process and is scratch. A run that resumes writes it anew from its checkpoint, which
has files of its own, so the file is never the only copy of anything that a checkpoint promises, and nothing
in it need survive a crash. Its name is new each time; whoever makes the next file of the table in that folder
removes those that no process has locked.

Rows lie in regions. A region is written whole before any record in it is read: with first values, which are a
function of the seed, the table and the row, or with what is loaded. So a record that does not match its
checksum is damage, a record of zeros among them.
"""

import contextlib
import errno
import fcntl
import os
import secrets
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor

from meshrec.ops import records
from meshrec.ops.library import has_kernels
from meshrec.tables.table import RowPart

_SECTOR = 512
_SUFFIX = ".rows"
IN_FLIGHT = 128
"""The requests that the disk has at a time. More gave no more on the disks that were measured."""


class RowFileError(RuntimeError):
    """The file of a table could not be read or written."""


class RowFile:
    """A file with the records of keys [first_key, first_key + num_rows).

    Args:
        path: the file, which must not exist.
        what: what messages call the table.
        part_bytes: the bytes of a row in each part.
        first_key: the first key.
        num_rows: the number of rows.
    """

    def __init__(
        self, path: Path, what: str, part_bytes: Sequence[int], *, first_key: int, num_rows: int
    ) -> None:
        self.path, self._what = path, what
        record = sum(part_bytes) + 4
        per_block = max(1, _SECTOR // record)
        block = -(-per_block * record // _SECTOR) * _SECTOR
        self.layout = records.RecordLayout(first_key, per_block, block, record, secrets.randbits(32))
        self.num_bytes = -(-num_rows // per_block) * block
        self._owner = os.getpid()
        try:
            self._file, self.is_direct = _created(path, self.num_bytes)
        except OSError as error:
            raise self._error(error.errno or 0, 0, "make") from error
        self._close = weakref.finalize(self, _remove, self._file, path, self._owner)

    def read(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Read the rows of some keys, int64 [N] and ascending, to their slots of ``parts``.

        Raises:
            RowFileError: a record is damaged, or the disk fails.
        """
        with self._opened() as (file, in_flight):
            failures = records.read(file, self.layout, keys, parts, slots, in_flight=in_flight)
        self._check(failures, keys, "read")

    def write(self, keys: Tensor, parts: Sequence[Tensor], slots: Tensor) -> None:
        """Write the rows of some keys, int64 [N] and ascending, from their slots of ``parts``.

        Raises:
            RowFileError: the disk is full, or fails. Some of the rows may have been written.
        """
        with self._opened() as (file, in_flight):
            failures = records.write(file, self.layout, keys, parts, slots, in_flight=in_flight)
        self._check(failures, keys, "write")

    def close(self) -> None:
        """Remove the file."""
        self._close()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[tuple[int, int]]:
        # A forked child has neither the threads nor, in a background checkpoint, the open file.
        if os.getpid() == self._owner:
            yield self._file, IN_FLIGHT
            return
        file = os.open(self.path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if self.is_direct else 0))
        try:
            yield file, 0
        finally:
            os.close(file)

    def _check(self, failures: Tensor, keys: Tensor, verb: str) -> None:
        if len(failures):
            number, cause = failures[0].tolist()
            raise self._error(cause, int(keys[number]), verb)

    def _error(self, cause: int, key: int, verb: str) -> RowFileError:
        if verb == "make":
            return RowFileError(
                f"{self._what}: its file {self.path} cannot be made: {os.strerror(cause)}. Give FileRows a "
                "folder of a disk with room that this process may write to."
            )
        position = self.layout.position(key)
        if cause in (records.DAMAGED, records.END_OF_FILE):
            found = (
                "the checksum of its record differs" if cause == records.DAMAGED else "the file is shorter"
            )
            return RowFileError(
                f"{self._what}: row {key} is damaged: {found} in the block at byte {position:,} of "
                f"{self.path}. "
                "Check the disk, and resume from the last checkpoint, which writes the file anew."
            )
        reason = "no space is left on the disk" if cause == errno.ENOSPC else os.strerror(cause)
        what = f"{self._what}: cannot {verb} row {key} at byte {position:,} of {self.path}: {reason}."
        if verb == "read":
            return RowFileError(f"{what} Check the disk, and resume from the last checkpoint.")
        return RowFileError(
            f"{what} No row is lost: what could not be written stays in memory. Free space on that disk and "
            f"go "
            "on, or resume from the last checkpoint with another path in FileRows."
        )


def file_in(folder: Path, name: str) -> Path:
    """Return a new path for the rows of a table, and remove files that processes left when they were killed.

    Raises:
        RowFileError: the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in folder.glob(f"{name}.*{_SUFFIX}"):
            _remove_if_left(path)
    except OSError as error:
        raise RowFileError(
            f"the folder {folder} for rows of {name} cannot be used: {error.strerror}. Give FileRows a "
            f"folder "
            "that this process may write to."
        ) from error
    return folder / f"{name}.{secrets.token_hex(4)}{_SUFFIX}"


def part_bytes(parts: Sequence[RowPart], width: int) -> list[int]:
    """Return the bytes of a row of ``width`` columns in each part."""
    return [(1 if part.per_row else width) * part.dtype.itemsize for part in parts]


def places_in(keys: Tensor, wanted: Tensor) -> Tensor:
    """Return the place of each wanted key among ascending keys, int64 [N]; -1 where it is not there."""
    if len(keys) == 0:
        return torch.full_like(wanted, -1)
    places = torch.searchsorted(keys, wanted).clamp_(max=len(keys) - 1)
    return torch.where(keys[places] == wanted, places, -1)


def memory_for(parts: Sequence[RowPart], num_rows: int, width: int) -> list[Tensor]:
    """Return memory for some rows, not filled: a tensor for each part."""
    return [
        torch.empty((num_rows,) if part.per_row else (num_rows, width), dtype=part.dtype) for part in parts
    ]


def _created(path: Path, num_bytes: int) -> tuple[int, bool]:
    """Make a file of holes and lock it. Return it, and whether the system's page cache is passed by."""
    # Nobody sees it under its name before it is locked.
    hidden = path.with_name(f".{path.name}")
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    file = os.open(hidden, flags, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(file, num_bytes)
        os.rename(hidden, path)
    except BaseException:
        os.close(file)
        hidden.unlink(missing_ok=True)
        raise
    direct = _direct(path)
    if direct is None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file, False
    fcntl.flock(file, fcntl.LOCK_UN)
    os.close(file)
    fcntl.flock(direct, fcntl.LOCK_EX)
    return direct, True


def _direct(path: Path) -> int | None:
    """Open a file for reads and writes of single sectors past the page cache; None if that is impossible."""
    if not hasattr(os, "O_DIRECT") or not has_kernels:
        return None  # plain Python has no memory that begins where a sector does
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT)
    except OSError:
        return None
    parts = [torch.zeros(1, 1, dtype=torch.int8)]
    probe = records.RecordLayout(0, 1, _SECTOR, 5, 0)
    one = torch.ones(1, dtype=torch.int64)
    if len(records.write(file, probe, one, parts, one - 1)):
        os.close(file)
        return None
    return file


def _remove(file: int, path: Path, owner: int) -> None:
    if os.getpid() == owner:
        path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            os.close(file)


def _remove_if_left(path: Path) -> None:
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # a process has it
    else:
        for each in path.parent.glob(f"{path.name}*"):
            each.unlink(missing_ok=True)
    finally:
        os.close(file)
