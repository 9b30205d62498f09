"""Scratch folders, removed by the next process if their owner was killed."""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from meshrec.durable.files import open_regular, sync_folder
from meshrec.durable.marks import PREFIX, Mark, mark, marks
from meshrec.durable.removal import Created


class _OwnedScratch(NamedTuple):
    mark: Mark
    lock: int
    owner: int


_owned: dict[Path, _OwnedScratch] = {}
"""Scratch folders of this process, and of the process it was forked from."""


def make_scratch(kind: str, parent: Path | None = None, *, token: str | None = None) -> Path:
    """Create a private folder (mode 0700), and remove those of the same kind with killed owners.

    A process killed by SIGKILL cannot clean up. The folder therefore carries a mark, whose lock is released
    when the process and all its forks are gone. Neighboring folders without a mark, or of another kind, stay.

    Args:
        kind: folder name prefix.
        parent: parent folder; the system's temporary folder by default.
        token: unique folder name suffix, for processes that agree on it; random by default.

    Raises:
        FileExistsError: another process created the folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    with suppress(OSError):  # an unreadable parent is reported by mkdir below
        for name in os.listdir(parent):
            if name.startswith(f"{kind}-"):
                _remove_abandoned(parent / name, kind)
    # A process killed before the mark is written leaves an empty folder that is never removed.
    folder = parent / f"{kind}-{token or secrets.token_hex(8)}"
    folder.mkdir(0o700)
    created = Created.at(folder)
    try:
        _owned[folder] = _OwnedScratch(*mark(folder, kind), os.getpid())
    except BaseException:
        created.remove()
        raise
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder created by `make_scratch` in this process; does nothing in a forked process."""
    scratch = _owned.get(folder)
    # A forked child inherits the entry, but must not remove its parent's folder.
    if scratch is not None and scratch.owner == os.getpid():
        del _owned[folder]
        scratch.mark.remove_all()
        os.close(scratch.lock)


def abandon_scratch(folder: Path) -> None:
    """Remove a scratch folder of the parent process, unless another process has it open.

    For a forked process whose parent was killed.
    """
    scratch = _owned.pop(folder)
    os.close(scratch.lock)
    _remove_abandoned(folder, scratch.mark.kind)


def join_scratch(folder: Path) -> None:
    """Prevent the removal of another process's folder until this process ends."""
    with suppress(OSError):  # created by another version or launcher
        for path in folder.glob(f"{PREFIX}*"):
            fcntl.flock(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), fcntl.LOCK_SH)


@contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Yield the folder from `make_scratch`, and remove it at the end."""
    folder = make_scratch(kind, parent)
    try:
        yield folder
    finally:
        remove_scratch(folder)


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder to fill, and rename it to ``folder`` once all files are on disk.

    Until then it is in a scratch folder next to ``folder``. After an error it is removed.

    Raises:
        OSError: a file cannot be written, or ``folder`` exists and is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{folder.name}", folder.parent) as scratch:
        parts = scratch / "parts"
        parts.mkdir()
        yield parts
        for path in (*parts.rglob("*"), parts):
            if path.is_dir():
                sync_folder(path)
                continue
            with open_regular(path) as descriptor:
                os.fsync(descriptor)
        os.replace(parts, folder)
    sync_folder(folder.parent)


def _remove_abandoned(folder: Path, kind: str) -> None:
    for free_mark in marks(folder, kind):
        free_mark.remove_all()
