"""All deletion of files and folders goes through this module.

[Note: what MeshRec deletes]

User files lie next to ours: in run folders, among checkpoints, in TMPDIR. A name proves nothing, so a file or
folder is deleted only with one of these proofs:

1. This process created it. `Created` remembers the inode, and never deletes another file with the same name.
2. It carries a valid mark with a free lock. A mark (``marks.py``) is a file ``.meshrec-ID`` written by this
version, with a random ID, the folder's kind, creator and path, and the inodes of folder and mark. A copy of
the folder has a different path and inodes: it is the user's. A scratch folder is deleted with its content,
but only at the original path. A checkpoint may have been moved (matching inodes) or restored from a backup
(matching path); only files whose names contain the ID are deleted.
3. A manifest in the same folder lists it, with size and checksum: checkpoint data from an earlier version
without marks.
4. It is a run's file, by its full name, and ``config.json`` or a mark identifies the folder as a run.

Symbolic links are deleted as links, never followed. A folder with other content stays.
tests/durable/test_removal.py fails for any other deleting call in ``src/``.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class Created(NamedTuple):
    """File or folder created by this process, identified by inode."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> "Created":
        """Remember the file or folder this process has just created at a path."""
        status = path.lstat()
        return cls(path, status.st_dev, status.st_ino)

    @classmethod
    def file(cls, path: Path, mode: int = 0o666) -> tuple[int, "Created"]:
        """Create a file, and return a descriptor for reading and writing.

        Raises:
            FileExistsError: the path exists, even as a dangling link.
        """
        # O_EXCL: never open an existing file, nor follow a link.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        status = os.fstat(descriptor)
        return descriptor, cls(path, status.st_dev, status.st_ino)

    @classmethod
    def folders(cls, path: Path) -> list["Created"]:
        """Create a folder and missing parents; return the newly created ones, innermost first."""
        created: list[Created] = []
        for folder in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                created.insert(0, cls.at(folder))
        if not path.is_dir():
            raise FileExistsError(errno.EEXIST, "it exists and is not a folder", str(path))
        return created

    def remove(self) -> None:
        """Delete the file or empty folder, unless another one has replaced it."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                return
            if stat.S_ISDIR(status.st_mode):
                remove_empty(self.path)
            else:
                os.unlink(self.path)

    def remove_tree(self) -> None:
        """Delete the folder and all content, unless another folder has replaced it."""
        with contextlib.suppress(OSError):
            descriptor = _open_folder(self.path)
            try:
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) == (self.device, self.inode):
                    _remove_content(descriptor)
            finally:
                os.close(descriptor)
            self.remove()


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Delete files in or below a folder, proven to be ours by the caller. Links are not followed.

    Skips folders, and names that lead through a link or out of the folder.
    """
    for name in names:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            _opened_below(folder, os.path.dirname(name)) as descriptor,
        ):
            os.unlink(os.path.basename(name), dir_fd=descriptor)


@contextlib.contextmanager
def _opened_below(folder: Path, name: str) -> Iterator[int]:
    """Open a folder at or below ``folder``, so that a link that takes its path meanwhile changes nothing.

    Raises:
        NotADirectoryError: the name leads through a link, out of the folder, or to a file.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in Path(name).parts:
            if part in ("..", os.sep):
                raise NotADirectoryError(errno.ENOTDIR, "it is not below", os.fspath(folder / name))
            parent = descriptor
            try:
                descriptor = _open_folder(part, parent)
            finally:
                if descriptor != parent:
                    os.close(parent)
        yield descriptor
    finally:
        os.close(descriptor)


def _open_folder(path: str | Path, parent: int | None = None) -> int:
    # O_DIRECTORY makes this ENOTDIR for a link.
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def is_below(folder: Path, name: str) -> bool:
    """Return whether a folder name resolves to a path below ``folder``, without links."""
    return os.path.realpath(folder / name) == f"{os.path.realpath(folder)}/{name}".rstrip("/")


def remove_link(path: Path) -> bool:
    """Delete a symbolic link, and return True; return False for anything else."""
    if not path.is_symlink():
        return False
    remove_named(path.parent, [path.name])
    return True


def remove_empty(folder: Path) -> bool:
    """Delete an empty folder, but not a link. Return whether it was deleted."""
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def remove_tree(folder: Path, *, last: str) -> None:
    """Delete a folder and all content, and the file named ``last`` at the end. Links are not followed.

    The caller has proven ownership by that file, so an interrupted removal can be resumed.
    """
    with contextlib.suppress(OSError):
        descriptor = _open_folder(folder)
        try:
            _remove_content(descriptor, keep=last)
            if os.listdir(descriptor) == [last]:
                os.unlink(last, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        remove_empty(folder)


def _remove_content(folder: int, keep: str = "") -> None:
    """Delete what an open folder contains, except for the file ``keep``. What cannot be deleted stays."""
    # Names are relative to descriptors: a path that another folder or a link takes meanwhile changes nothing.
    for name in os.listdir(folder):
        with contextlib.suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
                descriptor = _open_folder(name, folder)
                try:
                    _remove_content(descriptor)
                finally:
                    os.close(descriptor)
                os.rmdir(name, dir_fd=folder)
            elif name != keep:
                os.unlink(name, dir_fd=folder)
