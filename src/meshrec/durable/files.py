"""Atomic file writes, errors of full disks, and reads that never block on a pipe or device."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshrec.durable.removal import Created

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk."""
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamageError(RuntimeError):
    """A file is missing, incomplete, or differs from what was written."""


def write_durably(path: Path, content: bytes, *, token: str | None = None) -> None:
    """Write a file atomically: after a crash, ``path`` has the old or the new content, never a part of it.

    Args:
        path: file to write, replaced if it exists.
        content: file content.
        token: see `durable_file`.

    Example::

        write_durably(Path("state.json"), b"{}")
        assert read_regular(Path("state.json"), 100) == b"{}"
    """
    with durable_file(path, token=token) as file:
        file.write(content)


@contextmanager
def durable_file(path: Path, *, token: str | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file for writing, flush it to disk at the end, and rename it to ``path``.

    After an error in the ``with`` block, the temporary file is removed, and ``path`` is unchanged.

    Args:
        path: file to write. An existing file or link is replaced.
        token: unique suffix of the temporary name ``.NAME.TOKEN``; random by default. A killed process leaves
            the temporary file behind.

    Raises:
        FileExistsError: the path is a folder, device, pipe or socket.
    """
    # Without the check, root would replace a device such as /dev/null by a file.
    _check_replaceable(path)
    temporary = path.with_name(f".{path.name}.{token or secrets.token_hex(8)}")
    descriptor, created = Created.file(temporary)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        created.remove()
        raise
    # The rename itself is durable only after the directory has been synced.
    sync_folder(path.parent)


def _check_replaceable(path: Path) -> None:
    """Raise FileExistsError if the path exists and is not a regular file, or is a link like /dev/stdout."""
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:  # nothing is there, or a link that leads nowhere
        return
    if kind is None and path.is_symlink() and os.readlink(path).startswith(("/proc/", "/dev/")):
        kind = "a link to an open file"
    if kind is not None:
        raise FileExistsError(errno.EEXIST, f"it is {kind}, and only a file can be replaced", str(path))


def sync_folder(folder: Path) -> None:
    """Flush the entries of a directory to disk, so that renames in it survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and yield its descriptor.

    Raises:
        DamageError: not a regular file.
        OSError: the file is missing or unreadable.
    """
    # O_NONBLOCK, because opening a pipe without a writer would hang. Devices may have no end.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if mode != stat.S_IFREG:
            raise DamageError(f"{path} is {_KINDS.get(mode, 'something else')} instead of a regular file")
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a regular file with at most ``max_bytes`` bytes.

    Raises:
        DamageError: not a regular file, too large, or modified while reading.
        OSError: the file is missing or unreadable.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > max_bytes:
            raise DamageError(f"{path} has {size:,} bytes; at most {max_bytes:,} were expected")
        content = bytearray(size)
        read_into(descriptor, memoryview(content), 0, path.name)
    return bytes(content)


def read_into(descriptor: int, target: memoryview, offset: int, name: str) -> None:
    """Fill ``target`` with bytes of an open file.

    Args:
        descriptor: open file.
        target: memory to fill.
        offset: position in the file of the first byte to read.
        name: file name in messages.

    Raises:
        DamageError: the file ends early.
    """
    num_read = 0
    while num_read < len(target):
        count = os.preadv(descriptor, [target[num_read:]], offset + num_read)
        if count == 0:
            raise DamageError(f"{name}: the file ends too early")
        num_read += count


def name_full_disk(error: OSError, paths: Iterable[Path | str]) -> None:
    """Set the ``filename`` of a disk-full error to a folder on the full disk, unless it has a file name.

    Args:
        error: error of a write; other errors than those of `FULL` are unchanged.
        paths: files and folders that were written to. The one on the disk with the least free space is named,
            or its nearest existing parent folder.
    """
    if error.errno not in FULL or error.filename is not None:
        return
    folders = [folder for path in paths if (folder := _nearest_folder(Path(path))) is not None]
    error.filename = min(map(str, folders), key=_free_bytes, default=None)


def _nearest_folder(path: Path) -> Path | None:
    """Return the path if it is a folder, else its nearest existing parent; None for an invalid path."""
    try:
        path = path.absolute()
        return next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    except (OSError, ValueError):  # too long a name, or a null byte
        return None


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
