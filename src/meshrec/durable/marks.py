"""Marks: files ``.meshrec-ID`` in a folder, as a proof that MeshRec created the folder and may delete it.

A process holds a lock on the mark while it uses the folder. See [Note: what MeshRec deletes] in
``removal.py``.
"""

import contextlib
import errno
import fcntl
import getpass
import os
import re
import secrets
import socket
import stat
import time
from pathlib import Path
from typing import NamedTuple

from meshrec.durable.files import DamageError, read_into
from meshrec.durable.removal import CreatedPath, remove_named, remove_tree
from meshrec.durable.sealed import sealed, unsealed

PREFIX = ".meshrec-"
"""File name prefix of marks."""
_NAME = re.compile(r"\.meshrec-([0-9a-f]{8,64})")
_MAX_BYTES = 1 << 16  # largest mark file accepted
# Attempts to lock a mark exclusively. Other processes hold the lock for a moment while they check the mark.
_LOCK_ATTEMPTS = 3
_LOCK_RETRY_SECONDS = 0.01


class Mark(NamedTuple):
    """A mark: a file ``.meshrec-ID`` as a proof that MeshRec created the folder and may delete it.

    The object only names the mark; the file need not exist or be valid. See [Note: what MeshRec deletes].
    """

    folder: Path
    id: str
    """Hexadecimal digits, unique to the folder."""
    kind: str
    """Use of the folder, such as "checkpoint"."""

    @property
    def path(self) -> Path:
        """Path of the mark file."""
        return self.folder / f"{PREFIX}{self.id}"

    def remove(self, names: str) -> None:
        """Delete some files in the folder, then the mark.

        Args:
            names: regular expression. A file is deleted if it matches the whole name.
        """
        pattern = re.compile(names)
        remove_named(self.folder, (name for name in _file_names(self.folder) if pattern.fullmatch(name)))
        remove_named(self.folder, [self.path.name])

    def remove_all(self) -> None:
        """Delete the folder and everything in it, the mark last."""
        remove_tree(self.folder, last=self.path.name)


def mark(folder: Path, kind: str, *, id: str | None = None) -> tuple[Mark, int]:
    """Write a mark into a folder just created by this process, and lock the mark.

    Args:
        folder: folder to mark.
        kind: use of the folder, such as "checkpoint".
        id: unique hexadecimal digits; random by default.

    Returns:
        The mark, and an open file descriptor with the lock. Other processes must not delete the folder while
            the lock is held. Forked processes share the lock. It ends when all of them have closed the
            descriptor or died.
    """
    new_mark = Mark(folder, id or secrets.token_hex(8), kind)
    descriptor, created = CreatedPath.create_file(new_mark.path, 0o644)
    try:
        # Without locks in the file system, no process can prove that the mark is unlocked, and the folder is
        # never deleted.
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        content = {
            "id": new_mark.id,
            "kind": kind,
            "creator": f"{_user()} on {socket.gethostname()}, process {os.getpid()}",
            "path": os.path.realpath(folder),
            "inodes": [os.stat(folder).st_ino, os.fstat(descriptor).st_ino],
        }
        # Write after locking. A mark without content is invalid, so other processes never see a mark both
        # valid and unlocked.
        os.pwrite(descriptor, sealed(content), 0)
    except BaseException:
        created.remove()
        os.close(descriptor)
        raise
    return new_mark, descriptor


def unlocked_marks(
    folder: Path, kind: str, *, moved: bool = False, excluded: str | None = None
) -> list[Mark]:
    """Return the marks in a folder that are valid and not locked.

    A folder with at least one such mark may be deleted by this user. If the list is empty, the folder may be
    in use, or belong to the user.

    Args:
        folder: the folder. The result for a link to a folder is empty.
        kind: required use of the folder, such as "checkpoint". A mark for another use is not valid.
        moved: whether to accept a folder moved or restored from a backup, and a file system without locks.
            The caller must then hold another lock on the folder.
        excluded: ID of a mark locked by the caller. This mark is not returned, and no time is lost with
            attempts to lock it (30 ms).
    """
    if folder.is_symlink():
        return []
    names = (_NAME.fullmatch(name) for name in _file_names(folder))
    candidates = [Mark(folder, name[1], kind) for name in names if name and name[1] != excluded]
    return [candidate for candidate in candidates if _is_valid(candidate, moved)]


def release(lock: int) -> None:
    """Release the lock on a mark and close the descriptor. This ends the lock in forked processes, too.

    Args:
        lock: file descriptor returned by `mark`.
    """
    # Closing alone would leave the lock to forked processes that share it.
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


def _is_valid(candidate: Mark, moved: bool) -> bool:
    """Return whether a mark file is unlocked, and was written by this user for this very folder.

    Args:
        moved: False: the path and the inodes recorded in the mark must both match the folder. True: one of
            the two is enough, and the file system need not support locks.
    """
    try:
        # NFS grants an exclusive lock only on a file opened for writing.
        descriptor = os.open(candidate.path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # The exclusive lock ends when the descriptor is closed below.
        if not _is_free(descriptor, without_locks=moved):
            return False
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.getuid() or status.st_size > _MAX_BYTES:
            return False
        raw = bytearray(status.st_size)
        read_into(descriptor, memoryview(raw), 0, candidate.path.name)
        content = unsealed(bytes(raw), candidate.path.name, required=True)
        proofs = (
            content["path"] == os.path.realpath(candidate.folder),
            content["inodes"] == [os.stat(candidate.folder).st_ino, status.st_ino],
        )
        is_original = any(proofs) if moved else all(proofs)
        return is_original and (content["id"], content["kind"]) == (candidate.id, candidate.kind)
    except (OSError, DamageError, KeyError, TypeError):
        return False
    finally:
        os.close(descriptor)


def _is_free(descriptor: int, *, without_locks: bool) -> bool:
    """Try to lock a mark file exclusively, and return whether this worked. Closing the file ends the lock.

    Args:
        without_locks: value to return if the file system does not support locks.
    """
    # Another process may be checking the same mark, so try again after a moment.
    for _ in range(_LOCK_ATTEMPTS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                return without_locks
        time.sleep(_LOCK_RETRY_SECONDS)
    return False


def _file_names(folder: Path) -> list[str]:
    """Return the file names in a folder; an empty list if it cannot be read."""
    with contextlib.suppress(OSError):
        return os.listdir(folder)
    return []


def _user() -> str:
    """Return the user name, or the user ID if it has no name, as in some containers."""
    with contextlib.suppress(KeyError, OSError):
        return getpass.getuser()
    return str(os.getuid())
