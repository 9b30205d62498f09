"""All deletion of files and folders goes through this module.

[Note: what MeshRec deletes]

Files of the user lie next to files of MeshRec: in run folders, among checkpoints, in TMPDIR. A file name
alone does not prove who wrote the file. MeshRec therefore deletes a file or folder only with one of these
proofs:

1. This process created it. `Created` remembers the inode, and does not delete another file with the same
name. 2. It is a folder with a valid, unlocked mark. A mark (``marks.py``) is a file ``.meshrec-ID`` with a
random ID, the folder's kind, creator and path, and the inodes of folder and mark. A copy of the folder has a
different path and different inodes, so it belongs to the user. A scratch folder is deleted with its content,
but only at the original path. A checkpoint may have been moved (inodes match) or restored from a backup (path
matches); only files whose names contain the ID are deleted. 3. A manifest in the same folder lists it, with
size and checksum. This holds for checkpoint data of an earlier version without marks. 4. It is a file of a
run, by its full name, and ``config.json`` or a mark identifies the folder as a run.

Symbolic links are deleted as links, never followed. A folder is kept if it has other content.
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
    """File or folder that this process created, identified by device and inode."""

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> "Created":
        """Return the record of the file or folder that the caller has just created at a path."""
        status = path.lstat()
        return cls(path, status.st_dev, status.st_ino)

    @classmethod
    def file(cls, path: Path, mode: int = 0o666) -> tuple[int, "Created"]:
        """Create a file, and return a descriptor for reading and writing, and the record.

        Raises:
            FileExistsError: the path exists, even as a dangling link.
        """
        # O_EXCL: never open an existing file, nor follow a link.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        status = os.fstat(descriptor)
        return descriptor, cls(path, status.st_dev, status.st_ino)

    @classmethod
    def folders(cls, path: Path) -> list["Created"]:
        """Create a folder and its missing parents, and return the records of new folders, innermost first."""
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
        """Delete the folder and everything in it, unless another folder has replaced it."""
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
    """Delete files in or below a folder. The caller must have proven that MeshRec wrote them.

    Skips missing files, folders, and names that lead through a link or out of the folder.

    Args:
        folder: the folder.
        names: file names relative to the folder, such as "data/0.bin".
    """
    for name in names:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            _opened_below(folder, os.path.dirname(name)) as descriptor,
        ):
            os.unlink(os.path.basename(name), dir_fd=descriptor)


@contextlib.contextmanager
def _opened_below(folder: Path, name: str) -> Iterator[int]:
    """Open ``folder / name`` one directory at a time, and yield the descriptor.

    If another process replaces a part of the path by a link meanwhile, the descriptor still refers to the
    original directory.

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
    """Open a directory, relative to the open directory ``parent`` if given."""
    # O_NOFOLLOW with O_DIRECTORY fails with ENOTDIR for a link, instead of following it.
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def is_below(folder: Path, name: str) -> bool:
    """Return whether ``folder / name`` is in ``folder``, without links or ".." in ``name``."""
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
    """Delete a folder and everything in it, without following links.

    Args:
        folder: folder that the caller has proven to be MeshRec's.
        last: name of the file with this proof. It is deleted last, so that a later process can resume an
            interrupted removal.
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
    """Delete everything in an open folder, except for the file ``keep`` and what cannot be deleted."""
    # Names are relative to descriptors, so a link that replaces a folder meanwhile cannot redirect the
    # deletion.
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
