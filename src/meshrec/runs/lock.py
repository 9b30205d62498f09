"""File locks on a run folder, by which only one launch at a time trains into it.

There are two kinds of lock files. Both use ``flock``, so the system releases the lock when the process ends
for any reason:

- ``.lock`` is held by the process started by the user: MeshRec's launcher, the single process in a run, or
  rank 0 under another launcher. It is taken before the folder is read or written.
- ``.process_rankN`` is held by rank N. When a launcher is killed, that lock ends, but the ranks still write a
  last checkpoint. No other launch may write to the folder before they have ended.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from meshrec.durable import remove_named
from meshrec.train.run_folder import CONFIG, RUNS, RunFolder, new_run, timestamp

_logger = logging.getLogger("meshrec")
_LOCKED_ERRNOS = (errno.EWOULDBLOCK, errno.EACCES)
"""Error numbers with which ``flock`` reports that another process holds the lock. Other errors mean that the
file system does not support locks.
"""


class RunLock:
    """Exclusive lock on a run folder, held until ``release`` or the end of this process.

    Args:
        folder: run folder.

    Raises:
        ValueError: another process, or a rank from an earlier launch, holds a lock in the folder.
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder = folder
        self._path = folder.path / ".lock"
        # File descriptor of the locked file; None after release.
        self._file = _open_locked(self._path)
        if self._file is None:
            raise ValueError(_in_use_message(folder, "process", _read_holder(self._path)))
        try:
            # Holding `.lock` is not enough: ranks of a killed launcher may still be running.
            for path in sorted(folder.path.glob(".process_rank*")):
                if not _is_free(path):
                    rank = path.name.removeprefix(".process_rank")
                    raise ValueError(
                        _in_use_message(
                            folder, f"rank {rank} of an earlier start, process", _read_holder(path)
                        )
                    )
            _write_holder(
                self._file, {"pid": os.getpid(), "host": socket.gethostname(), "since": timestamp()}
            )
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock. Further calls do nothing."""
        descriptor, self._file = self._file, None
        if descriptor is not None:
            _unlock(self._path, descriptor)

    def __enter__(self) -> RunFolder:
        return self.folder

    def __exit__(self, *_: object) -> None:
        self.release()


def claim_run(name: str | None, recipe: str, runs: Path = RUNS, *, resume: bool = False) -> RunLock:
    """Find or create a run folder as `new_run` does, and lock it.

    Args:
        name: run name; None: derive it from ``recipe``.
        recipe: recipe name.
        runs: folder with all runs.
        resume: whether to continue an existing run.

    Raises:
        ValueError: `new_run` fails, or another process holds the folder.
    """
    # The lock comes second, because the lock file lies in the folder.
    lock = RunLock(new_run(name, recipe, runs, resume=resume))
    # The folder was checked before it was locked: a start that held the lock meanwhile may have trained
    # there.
    if not resume and (lock.folder.path / CONFIG).exists():
        lock.release()
        raise ValueError(
            f"{lock.folder.path} has a run already; use another --name, or continue it with --resume."
        )
    return lock


@contextmanager
def rank_lock(folder: RunFolder, rank: int) -> Iterator[None]:
    """Context manager that holds a rank's lock. The lock file contains the process ID.

    Raises:
        ValueError: the same rank of another launch still runs.
    """
    path = folder.process(rank)
    descriptor = _open_locked(path)
    if descriptor is None:
        raise ValueError(
            _in_use_message(folder, f"rank {rank} of another start, process", _read_holder(path))
        )
    # The process ID is for error messages only: the lock itself tells whether a rank is running.
    _write_holder(descriptor, os.getpid())
    try:
        yield
    finally:
        _unlock(path, descriptor)


# Descriptors of all locks held by this process. A forked child closes the copies, because an flock ends only
# when all copies of the descriptor are closed.
_open_descriptors: set[int] = set()


def _open_locked(path: Path) -> int | None:
    """Create and lock a file. Return the descriptor, or None if another process holds the lock.

    A process removes its lock file before it releases the lock. This function may therefore lock a file that
    has just been removed, perhaps replaced by a new one. It then tries again with the new file.
    """
    while True:
        # O_NOFOLLOW: a symbolic link could make this process lock and later remove another file.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            if error.errno in _LOCKED_ERRNOS:
                return None
            _logger.warning(
                "%s cannot be locked (%s): see to it yourself that no other start trains into this folder",
                path,
                error.strerror,
            )
            # The file system does not support locks. Continue without one, after the warning.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        if _is_file_at(path, descriptor):
            _open_descriptors.add(descriptor)
            return descriptor
        os.close(descriptor)


def _unlock(path: Path, descriptor: int) -> None:
    """Remove a lock file, then release the lock by closing the file."""
    if _is_file_at(path, descriptor):  # the folder may have been removed, and another start made a new one
        remove_named(path.parent, [path.name])
    _open_descriptors.discard(descriptor)
    os.close(descriptor)


def _is_file_at(path: Path, descriptor: int) -> bool:
    """Return whether an open file is the file now at a path."""
    # Another process may have removed the file after this one opened it.
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    return False


def _is_free(path: Path) -> bool:
    """Return whether no process holds the lock on a file. The function leaves the file unlocked."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in _LOCKED_ERRNOS
    finally:
        # Also releases the lock which the test has taken.
        os.close(descriptor)
    return True


def _write_holder(descriptor: int, value: Any) -> None:
    """Replace a lock file's content by a description of the process holding the lock."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, json.dumps(value).encode(), 0)


def _read_holder(path: Path) -> dict[str, Any]:
    """Return the description of the process holding a lock, such as ``{"pid": 7, "host": "node1"}``.

    The result is empty if that process has not written it yet, or if the file is damaged.
    """
    try:
        content = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: not JSON, or not UTF-8
        return {}
    # The file of a rank has only the process ID.
    return content if isinstance(content, dict) else {"pid": content, "host": socket.gethostname()}


def _in_use_message(folder: RunFolder, who: str, holder: dict[str, Any]) -> str:
    """Return the error message for a locked run folder."""
    where = f"{who} {holder['pid']} on {holder['host']}" if holder else f"{who}, not known yet,"
    since = f" since {holder['since']}" if "since" in holder else ""
    stop = f"stop it (kill {holder['pid']})" if holder else "stop it"
    return (
        f"{folder.path} is in use: {where} trains into it{since}. Wait until it has ended, {stop}, or take "
        "another --name."
    )


def _close_inherited_locks() -> None:
    """Close the parent's lock files in a forked child, so that the locks end with the parent."""
    for descriptor in _open_descriptors:
        os.close(descriptor)
    _open_descriptors.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)
