"""Scratch folders. If their process is killed, the next process that needs one removes them."""

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
    """Mark of a scratch folder, descriptor that locks the mark, and ID of the process that made it."""

    mark: Mark
    lock: int
    owner: int


# Scratch folders made by this process, from make_scratch to remove_scratch. A forked process inherits the
# entries.
_owned: dict[Path, _OwnedScratch] = {}


def make_scratch(kind: str, parent: Path | None = None, *, token: str | None = None) -> Path:
    """Create a private folder ``KIND-TOKEN`` (mode 0700), and remove such folders left by killed processes.

    A process killed by SIGKILL cannot clean up. The folder therefore carries a mark, whose lock ends with the
    process and all its forks. Folders in ``parent`` without a mark, or of another kind, are not removed.

    Args:
        kind: prefix of the folder name.
        parent: parent folder; the system's temporary folder by default.
        token: unique suffix of the folder name. Processes can agree on it to find the folder. Random by
            default.

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
    """Close a scratch folder inherited from a killed parent process, and remove it if no process uses it."""
    scratch = _owned.pop(folder)
    os.close(scratch.lock)
    _remove_abandoned(folder, scratch.mark.kind)


def join_scratch(folder: Path) -> None:
    """Prevent the removal of another process's scratch folder until this process ends."""
    with suppress(OSError):  # the folder has no marks, if another version or a launcher created it
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
    """Yield a temporary folder to fill, flush its files to disk at the end, and rename it to ``folder``.

    The temporary folder lies in a scratch folder next to ``folder``, and is removed after an error.

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
    """Remove a scratch folder of this kind if its mark is valid and unlocked."""
    for free_mark in marks(folder, kind):
        free_mark.remove_all()
