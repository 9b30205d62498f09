"""Scratch folders that the next process removes if their owner was killed."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SECONDS_TO_LOCK = 60.0
"""Seconds that a new folder may have its first name, until its owner has locked it."""


@contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Yield a private folder (mode 0700) among the system's temporary files; remove it at the end.

    A process that gets SIGKILL removes nothing. So the owner holds a lock on its folder, which ends with the
    process and all that it forked. A later call for the same kind first removes the folders without a lock. A
    folder gets its name only with its lock: no folder is removed before its owner could lock it.

    Args:
        kind: the beginning of the folder's name.
    """
    parent = Path(tempfile.gettempdir())
    _remove_left(parent, f"{kind}-", 0.0)
    _remove_left(parent, f".{kind}-", _SECONDS_TO_LOCK)
    folder = Path(tempfile.mkdtemp(prefix=f".{kind}-"))
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        folder = folder.rename(parent / folder.name[1:])
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _remove_left(parent: Path, prefix: str, seconds: float) -> None:
    """Remove the unlocked folders of this user that are older than some seconds."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            # Never through a link, and nothing of another user.
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if status.st_uid != os.getuid() or time.time() - status.st_ctime < seconds:
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)
