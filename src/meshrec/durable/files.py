"""Atomic files and folders, and reads that a pipe or a device cannot block."""

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class DamageError(RuntimeError):
    """A file does not hold what was written to it."""


def write_durably(path: Path, content: bytes) -> None:
    """Write a small file by way of `durable_file`."""
    with durable_file(path) as file:
        file.write(content)


@contextmanager
def durable_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a temporary file, and rename it to ``path`` once it is on disk. Remove it after an error."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    sync_folder(path.parent)


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Yield a scratch folder beside ``folder``, and rename it once all its files are on disk.

    After an error the scratch folder is removed.

    Raises:
        OSError: a file cannot be written, or ``folder`` exists and is not empty.
    """
    scratch = folder.parent / f".{folder.name}-{secrets.token_hex(4)}"
    scratch.mkdir(parents=True)
    try:
        yield scratch
        for path in (*scratch.rglob("*"), scratch):
            if path.is_dir():
                sync_folder(path)
                continue
            with open_regular(path) as descriptor:
                os.fsync(descriptor)
        os.replace(scratch, folder)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def open_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading, and yield its descriptor.

    A pipe that nobody writes to would hang whoever opens it, and a device may have no end.

    Raises:
        DamageError: for anything but a regular file.
        OSError: for a file that is missing or cannot be read.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0))
    try:
        mode = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if mode != stat.S_IFREG:
            raise DamageError(f"{path} is {_KINDS.get(mode, 'something else')} instead of a regular file")
        yield descriptor
    finally:
        with contextlib.suppress(OSError):
            os.close(descriptor)


def read_regular(path: Path, most: int) -> bytes:
    """Read a regular file of at most ``most`` bytes.

    Raises:
        DamageError: for anything but a regular file, a longer one, and one that changes meanwhile.
        OSError: for a file that is missing or cannot be read.
    """
    with open_regular(path) as descriptor:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise DamageError(f"{path} has {size:,} bytes; at most {most:,} were expected")
        content = bytearray(size)
        read_into(descriptor, memoryview(content), 0, path.name)
    return bytes(content)


def read_into(descriptor: int, target: memoryview, offset: int, what: str) -> None:
    """Fill ``target`` from an open file, beginning at ``offset``.

    Raises:
        DamageError: when the file ends too early.
    """
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [target[done:]], offset + done)
        if count == 0:
            raise DamageError(f"{what}: the file ends too early")
        done += count
