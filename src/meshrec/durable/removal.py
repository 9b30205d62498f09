"""Deletion of files and folders. No other module in MeshRec deletes any.

[Note: what MeshRec deletes]

In run folders, among checkpoints and in TMPDIR, user files lie next to files written by MeshRec, and a file
name alone does not prove who wrote a file. MeshRec therefore deletes a file or folder only with one of four
proofs:

1. This process created it. `CreatedPath` remembers the inode, and does not delete another file under the same
   name.
2. It is a folder with a valid, unlocked mark. A mark (``marks.py``) is a file ``.meshrec-ID`` with a random
   ID, the folder's kind, creator and path, and the inodes of folder and mark. A copy of the folder has a
   different path and different inodes, so it belongs to the user. A scratch folder is deleted with all
   content, but only at the original path. A checkpoint may have been moved (inodes match) or restored from a
   backup (path matches); only files with the ID in their names are deleted.
3. A manifest in the same folder lists it with size and checksum. This holds for checkpoint data from earlier
   versions without marks.
4. It has the full name of a file in a run, and ``config.json`` or a mark identifies the folder as a run.

Symbolic links are deleted as links, never followed. A folder with other content stays.
tests/durable/test_removal.py fails if code elsewhere in ``src/`` deletes files.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple


class CreatedPath(NamedTuple):
    """Record of a file or folder created by this process, identified by device and inode.

    The record proves that MeshRec may delete the file; see [Note: what MeshRec deletes].
    """

    path: Path
    device: int
    inode: int

    @classmethod
    def at(cls, path: Path) -> "CreatedPath":
        """Return a record for the file or folder which the caller has just created at a path."""
        status = path.lstat()
        return cls(path, status.st_dev, status.st_ino)

    @classmethod
    def create_file(cls, path: Path, mode: int = 0o666) -> tuple[int, "CreatedPath"]:
        """Create an empty file.

        Args:
            path: path of the new file.
            mode: file permissions, before the umask.

        Returns:
            A file descriptor for reading and writing, and the `CreatedPath` record for the file.

        Raises:
            FileExistsError: the path exists, even as a dangling link.
        """
        # O_EXCL: never open an existing file or follow a link.
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        # From the descriptor, not the path: another process might already have replaced the file.
        status = os.fstat(descriptor)
        return descriptor, cls(path, status.st_dev, status.st_ino)

    @classmethod
    def create_folders(cls, path: Path) -> list["CreatedPath"]:
        """Create a folder and all missing parents.

        Returns:
            Records for the new folders, innermost first, which is the order in which they can be removed.

        Raises:
            FileExistsError: the path exists and is not a folder.
        """
        created: list[CreatedPath] = []
        # From the root down. Another process may create the same folders at the same time.
        for folder in (*reversed(path.parents), path):
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                created.insert(0, cls.at(folder))
        if not path.is_dir():
            raise FileExistsError(errno.EEXIST, "it exists and is not a folder", str(path))
        return created

    def remove(self) -> None:
        """Delete the file or empty folder, unless another file has replaced it. Ignores a missing file."""
        with contextlib.suppress(FileNotFoundError):
            status = self.path.lstat()
            # Another file is at the path now.
            if (status.st_dev, status.st_ino) != (self.device, self.inode):
                return
            if stat.S_ISDIR(status.st_mode):
                remove_empty(self.path)
            else:
                os.unlink(self.path)

    def remove_tree(self) -> None:
        """Delete the folder and everything in it, unless another folder has replaced it. Ignores errors."""
        with contextlib.suppress(OSError):
            descriptor = _open_folder(self.path)
            try:
                # Compare the open folder, whose content is deleted next, and not the path.
                status = os.fstat(descriptor)
                if (status.st_dev, status.st_ino) == (self.device, self.inode):
                    _remove_content(descriptor)
            finally:
                os.close(descriptor)
            self.remove()


def remove_named(folder: Path, names: Iterable[str]) -> None:
    """Delete some files in or below a folder.

    The caller must have a proof for every file that MeshRec wrote it; see [Note: what MeshRec deletes]. A
    name is skipped if the file is missing, if it is the name of a folder, or if it leads through a link or
    out of ``folder``.

    Args:
        folder: the folder.
        names: file names relative to the folder, such as "data/0.bin".
    """
    for name in names:
        with (
            contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError),
            _opened_below(folder, os.path.dirname(name)) as descriptor,
        ):
            # Relative to the open folder, so links in the path have no effect.
            os.unlink(os.path.basename(name), dir_fd=descriptor)


@contextlib.contextmanager
def _opened_below(folder: Path, name: str) -> Iterator[int]:
    """Open a directory in or below a folder, without following links, and yield the file descriptor.

    The path is opened directory by directory. If another process replaces a part of it by a link meanwhile,
    the descriptor still refers to the original directory.

    Args:
        folder: the folder.
        name: path relative to the folder; empty for the folder itself.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in Path(name).parts:
            # An absolute name starts with the separator.
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
    """Open a directory without following a link, and return the file descriptor."""
    # With O_NOFOLLOW and O_DIRECTORY, a link gives the error ENOTDIR.
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)


def is_below(folder: Path, name: str) -> bool:
    """Return whether ``folder / name`` lies in ``folder`` and ``name`` has neither links nor ".."."""
    # A link or ".." in ``name`` would give another real path.
    return os.path.realpath(folder / name) == f"{os.path.realpath(folder)}/{name}".rstrip("/")


def remove_link(path: Path) -> bool:
    """Delete a path if it is a symbolic link. Return whether it was."""
    # Deletes the link itself; ``remove_named`` does not follow the last part of a path.
    if not path.is_symlink():
        return False
    remove_named(path.parent, [path.name])
    return True


def remove_empty(folder: Path) -> bool:
    """Delete a folder if it is empty and not a link. Return whether it was deleted."""
    # rmdir itself refuses folders with content, and links.
    try:
        os.rmdir(folder)
    except OSError:
        return False
    return True


def remove_tree(folder: Path, *, last: str) -> None:
    """Delete a folder and everything in it, without following links. Ignores errors.

    Args:
        folder: the folder. The caller must have a proof that MeshRec created it.
        last: name of the file with this proof, which is deleted last. If the removal is interrupted, a later
            process still finds the proof and can complete it.
    """
    with contextlib.suppress(OSError):
        descriptor = _open_folder(folder)
        try:
            _remove_content(descriptor, keep=last)
            # Keep the proof if anything else could not be deleted.
            if os.listdir(descriptor) == [last]:
                os.unlink(last, dir_fd=descriptor)
        finally:
            os.close(descriptor)
        remove_empty(folder)


def _remove_content(folder: int, keep: str = "") -> None:
    """Delete everything in an open folder that can be deleted."""
    # Names are relative to open folders, so a folder replaced by a link meanwhile cannot redirect the
    # deletion.
    for name in os.listdir(folder):
        # Continue after an error, so as much as possible is deleted.
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
