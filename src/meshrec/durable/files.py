"""Atomic file writes, error messages for full disks, and reads that never block on a pipe or device."""

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from meshrec.durable.removal import CreatedPath

FULL = (errno.ENOSPC, errno.EDQUOT)
"""Values of ``errno`` for a full disk or an exhausted quota."""
# Names in messages for paths other than regular files.
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamageError(RuntimeError):
    """A file is missing or incomplete, or its content has changed since it was written."""


def write_durably(path: Path, content: bytes, *, token: str | None = None) -> None:
    """Write a file atomically: after a crash, ``path`` has either the old or the new content.

    Args:
        path: file to write, replaced if it exists.
        content: new content.
        token: see `durable_file`.

    Example::

        write_durably(Path("state.json"), b"{}")
        assert read_regular(Path("state.json"), 100) == b"{}"
    """
    with durable_file(path, token=token) as file:
        file.write(content)


@contextmanager
def durable_file(path: Path, *, token: str | None = None) -> Iterator[BinaryIO]:
    """Write a file atomically, from a ``with`` block: after a crash, ``path`` has the old or the new content.

    Yields a temporary file, open for writing. When the block ends, the file is flushed to disk and renamed to
    ``path``. After an error in the block it is removed, and ``path`` is unchanged.

    Args:
        path: file to write. An existing file or link is replaced.
        token: unique suffix of the temporary name ``.NAME.TOKEN``; random by default. A killed process leaves
            the temporary file behind.

    Raises:
        FileExistsError: the path is a folder, device, pipe or socket.
    """
    # Without this check, the root user would replace a device such as /dev/null by a file.
    _check_replaceable(path)
    temporary = path.with_name(f".{path.name}.{token or secrets.token_hex(8)}")
    descriptor, created = CreatedPath.create_file(temporary)
    try:
        with open(descriptor, "wb") as file:
            yield file
            # Before the rename, or a crash could leave an empty file under the final name.
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        created.remove()
        raise
    # The rename itself is durable only after the parent directory has been synced.
    sync_folder(path.parent)


def _check_replaceable(path: Path) -> None:
    """Raise FileExistsError if replacing the path would do harm.

    This holds if the path leads to a folder, device, pipe or socket. It also holds for a link into ``/proc``
    or ``/dev``, such as ``/dev/stdout``. The check passes if the path does not exist.
    """
    try:
        kind = _KINDS.get(stat.S_IFMT(path.stat().st_mode))
    except OSError:  # the path does not exist, or is a dangling link
        return
    # /dev/stdout may lead to a regular file, but is a link into /proc.
    if kind is None and path.is_symlink() and os.readlink(path).startswith(("/proc/", "/dev/")):
        kind = "a link to an open file"
    if kind is not None:
        raise FileExistsError(errno.EEXIST, f"it is {kind}, and only a file can be replaced", str(path))


def sync_folder(folder: Path) -> None:
    """Flush a directory's entries to disk. Renames in the directory then survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and yield the file descriptor. Never blocks on a pipe or device.

    Raises:
        DamageError: the path is not a regular file.
        OSError: the file is missing or unreadable.
    """
    # O_NONBLOCK, because opening a pipe without a writer would block.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        # Test the open file, because another process may replace the path meanwhile.
        mode = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if mode != stat.S_IFREG:
            raise DamageError(f"{path} is {_KINDS.get(mode, 'something else')} instead of a regular file")
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_regular(path: Path, max_bytes: int) -> bytes:
    """Read a whole regular file.

    Args:
        path: the file.
        max_bytes: maximum file size.

    Raises:
        DamageError: the path is not a regular file, or the file is too large or was cut off while reading.
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
    """Fill memory with bytes from an open file, starting at a position in the file.

    Args:
        descriptor: open file.
        target: memory to fill completely.
        offset: position of the first byte to read.
        name: file name in messages.

    Raises:
        DamageError: the file ends early.
    """
    num_read = 0
    while num_read < len(target):
        # A read may return fewer bytes than requested; 0 bytes mean the end of the file.
        # ``preadv`` reads at a position, so threads can share the descriptor.
        count = os.preadv(descriptor, [target[num_read:]], offset + num_read)
        if count == 0:
            raise DamageError(f"{name}: the file ends too early")
        num_read += count


def name_full_disk(error: OSError, paths: Iterable[Path | str]) -> None:
    """Name a folder on the full disk in a disk-full error, so that the error message shows the folder.

    Does nothing if the error has another cause, or already names a file.

    Args:
        error: error raised by a write. Its ``filename`` is set in place.
        paths: files and folders on the disks which may be full. ``filename`` becomes the existing folder on
            the disk with the least free space.
    """
    # A file name from the failed call is better than a guess.
    if error.errno not in FULL or error.filename is not None:
        return
    folders = [folder for path in paths if (folder := _nearest_folder(Path(path))) is not None]
    error.filename = min(map(str, folders), key=_free_bytes, default=None)


def _nearest_folder(path: Path) -> Path | None:
    """Return a path if it is a folder, else the nearest existing parent; None for an invalid path."""
    try:
        path = path.absolute()
        return next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    except (OSError, ValueError):  # the name is too long or has a null byte
        return None


def _free_bytes(folder: str) -> int:
    """Return the bytes that this user may still write to the disk with the folder."""
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
