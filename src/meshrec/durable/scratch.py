"""Scratch folders: private folders for temporary files.

A process removes its scratch folders itself. If it is killed, the next process creating a scratch folder with
the same kind and parent removes them.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from meshrec.durable.files import open_regular, sync_folder
from meshrec.durable.marks import PREFIX, Mark, mark, unlocked_marks
from meshrec.durable.removal import CreatedPath


class _OwnedScratch(NamedTuple):
    """A scratch folder created by this process, or by the parent that forked it."""

    mark: Mark
    lock: int
    """File descriptor with the lock on the mark."""
    owner: int
    """ID of the creating process."""


# By folder, from make_scratch to remove_scratch. A forked process inherits the entries, and compares
# ``owner`` with its process ID.
_owned: dict[Path, _OwnedScratch] = {}


def make_scratch(kind: str, parent: Path | None = None, *, token: str | None = None) -> Path:
    """Create a private folder ``{kind}-{token}`` (mode 0700), and remove abandoned folders of this kind.

    A folder is abandoned if its process was killed before it could clean up. To detect this, every scratch
    folder contains a mark: a file that proves that MeshRec created the folder (see ``marks.py``). This
    process and its forks keep the mark locked until all of them have ended. A call removes the folders in
    ``parent`` that have the same kind and a valid, unlocked mark, and no other folders.

    Args:
        kind: prefix of the folder name.
        parent: parent folder; by default the system's temporary folder.
        token: unique suffix of the folder name, by which other processes can find the folder; random by
            default.

    Returns:
        The folder. Call `remove_scratch` when it is no longer needed.

    Raises:
        FileExistsError: another process created the folder.
    """
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    # If the parent folder cannot be read, mkdir below raises the error.
    with suppress(OSError):
        for name in os.listdir(parent):
            if name.startswith(f"{kind}-"):
                _remove_abandoned(parent / name, kind)
    # A process killed between here and the mark leaves an empty folder, which nobody removes.
    folder = parent / f"{kind}-{token or secrets.token_hex(8)}"
    folder.mkdir(0o700)
    created = CreatedPath.at(folder)
    try:
        _owned[folder] = _OwnedScratch(*mark(folder, kind), os.getpid())
    except BaseException:
        created.remove()
        raise
    return folder


def remove_scratch(folder: Path) -> None:
    """Remove a folder created by `make_scratch` in this process. Does nothing in a forked process."""
    scratch = _owned.get(folder)
    # A forked child inherits the entry, but must not remove the parent's folder.
    if scratch is not None and scratch.owner == os.getpid():
        del _owned[folder]
        scratch.mark.remove_all()
        os.close(scratch.lock)


def abandon_scratch(folder: Path) -> None:
    """Give up a scratch folder inherited by a fork, after the parent was killed.

    Releases this process's lock, and removes the folder unless another process still holds a lock.

    Args:
        folder: result of `make_scratch` in the parent.
    """
    scratch = _owned.pop(folder)
    os.close(scratch.lock)
    _remove_abandoned(folder, scratch.mark.kind)


def join_scratch(folder: Path) -> None:
    """Keep other processes from removing a scratch folder until this process ends.

    Args:
        folder: scratch folder of another process.
    """
    # The folder has no mark if a launcher or another version created it.
    with suppress(OSError):
        for path in folder.glob(f"{PREFIX}*"):
            # The descriptor stays open, and so does the lock, until the process ends.
            fcntl.flock(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW), fcntl.LOCK_SH)


@contextmanager
def scratch_folder(kind: str, parent: Path | None = None) -> Iterator[Path]:
    """Create a scratch folder with `make_scratch`, and remove it when the ``with`` block ends.

    Args:
        kind: prefix of the folder name.
        parent: parent folder; by default the system's temporary folder.
    """
    folder = make_scratch(kind, parent)
    try:
        yield folder
    finally:
        remove_scratch(folder)


@contextmanager
def durable_folder(folder: Path) -> Iterator[Path]:
    """Write a folder atomically: after a crash, ``folder`` has all files or is as before.

    Yields a temporary folder for the caller to fill. When the ``with`` block ends, its files are flushed to
    disk and the folder is renamed to ``folder``. After an error it is removed.

    Args:
        folder: folder to create.

    Raises:
        OSError: a file cannot be written, or ``folder`` exists and is not empty.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(f".{folder.name}", folder.parent) as scratch:
        # A subfolder, because the scratch folder itself has a mark, which must not become part of the result.
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
    # The rename itself is durable only after the parent directory has been synced.
    sync_folder(folder.parent)


def _remove_abandoned(folder: Path, kind: str) -> None:
    """Remove a scratch folder with this kind, if it has a valid mark and no process holds the lock."""
    for free_mark in unlocked_marks(folder, kind):
        free_mark.remove_all()
