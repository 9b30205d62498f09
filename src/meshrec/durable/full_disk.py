"""Naming the folder on a full disk: a failed write to an open file does not report a name."""

import errno
import os
from collections.abc import Iterable
from pathlib import Path

FULL = (errno.ENOSPC, errno.EDQUOT)


def name_full_disk(error: OSError, paths: Iterable[Path | str]) -> None:
    """Set the file name on a disk-full error, unless it already has one.

    Args:
        error: error from a write.
        paths: files and folders on the disks written to. The path on the disk with the least free space is
            named, or its nearest existing parent.
    """
    if error.errno not in FULL or error.filename is not None:
        return
    folders = [folder for path in paths if (folder := _existing(Path(path))) is not None]
    error.filename = min(map(str, folders), key=_free_bytes, default=None)


def _existing(path: Path) -> Path | None:
    try:
        path = path.absolute()
        return next((folder for folder in (path, *path.parents) if folder.is_dir()), None)
    except (OSError, ValueError):  # too long a name, or a null byte
        return None


def _free_bytes(folder: str) -> int:
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
