"""Checkpoints in an object store, for hosts without a shared folder.

[Note: how a checkpoint reaches a store]
1. Every rank forks a writer, as for a save to a folder (snapshot.py). The writer writes a data file and a
   note (a small file with the positions of the pieces) to a scratch folder on the host. It cannot upload
   them, because connections to the store do not survive a fork.
2. A thread on every rank uploads the data file, and then the note, while training continues.
3. A thread on rank 0 uploads the manifest once the store has all ranks' notes, and removes the notes.
   Stores show an object only when it is complete, so the manifest completes the checkpoint, as on a disk.
4. `PendingSave.wait` ends the save on all ranks. Then the scratch folders are removed.

To load a checkpoint, a single rank per host downloads all files to a scratch folder, from which all ranks on
the host read.

Only objects with checkpoint file names are deleted from the store.
"""

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from meshrec.checkpoint.agreement import agreed
from meshrec.checkpoint.finding import step_name, step_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.comms.mesh import Axis
from meshrec.data.faults import needs
from meshrec.data.stores import listed
from meshrec.durable import durable_file, make_scratch, remove_scratch

_FILE = re.compile(rf"{re.escape(MANIFEST)}|(?:data|note)-[0-9a-f]{{8,64}}-\d{{5,}}\.(?:safetensors|json)")
"""Names of a checkpoint's objects. Objects with other names are never deleted."""
_KIND = "staged"
"""Kind of the scratch folders, which is part of their names; see ``durable.make_scratch``."""
# Bytes per read and write.
_BLOCK = 8 << 20
# Suffix of a file during the upload to a disk, which would show the file before it is complete.
_PART = ".part"


class ObjectStore:
    """Folder in an object store such as S3, accessed through pyarrow.

    Args:
        address: address such as ``s3://bucket/runs``; see `meshrec.data` for other schemes.

    Raises:
        ValueError: the address is invalid.
    """

    def __init__(self, address: str) -> None:
        pa, fs = needs("pyarrow", "data"), needs("pyarrow.fs", "data")
        self.address = address
        try:
            self._files, root = fs.FileSystem.from_uri(address)
        except (pa.ArrowException, OSError, ImportError) as error:
            raise ValueError(
                f"{address} is not a store address: {error}. Example: s3://bucket/runs."
            ) from error
        # Path inside the file system, such as bucket/runs.
        self._root = root.rstrip("/")
        self._fs = fs

    def under(self, name: str) -> "ObjectStore":
        """Return the subfolder ``name`` as an ObjectStore."""
        # The address may have options, such as s3://bucket/runs?region=eu-west-1. They stay at the end.
        plain, question, options = self.address.partition("?")
        return ObjectStore(f"{plain.rstrip('/')}/{name}{question}{options}")

    def put(self, local: Path, name: str) -> None:
        """Upload the file ``local`` as ``name``. Readers see it only when it is complete."""
        path = self._path(name)
        # Object stores show a file when it is complete. For ``file://`` a rename does.
        is_disk = self._files.type_name == "local"
        upload_path = f"{path}{_PART}" if is_disk else path
        self._files.create_dir(path.rpartition("/")[0], recursive=True)
        with local.open("rb") as source, self._files.open_output_stream(upload_path) as target:
            while block := source.read(_BLOCK):
                target.write(block)
        if is_disk:
            self._files.move(upload_path, path)

    def get(self, name: str, local: Path) -> None:
        """Download ``name`` to the file ``local``, which appears only when it is complete."""
        local.parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_input_stream(self._path(name)) as source, durable_file(local) as target:
            while block := source.read(_BLOCK):
                target.write(block)

    def read(self, name: str) -> bytes:
        """Return the content of a file, which must fit into memory."""
        with self._files.open_input_stream(self._path(name)) as source:
            return bytes(source.read())

    def names(self, *, partial: bool = False) -> list[str]:
        """Return the names of all files in this folder and subfolders, sorted, relative to the folder.

        Args:
            partial: whether to include files whose upload has not ended, or was interrupted.
        """
        infos = listed(self._files, self._root, recursive=True)
        names = [info.path[len(self._root) + 1 :] for info in infos if info.type == self._fs.FileType.File]
        return sorted(name for name in names if partial or not name.endswith(_PART))

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self._files.get_file_info(self._path(name)).type == self._fs.FileType.File:
            self._files.delete_file(self._path(name))

    def check(self) -> None:
        """Check access to the store: write a small file and remove it.

        Raises:
            OSError: the store does not allow these operations.
        """
        name = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
        self._files.create_dir(self._root, recursive=True)
        with self._files.open_output_stream(self._path(name)) as target:
            target.write(b"probe")
        self.remove(name)

    def _path(self, name: str) -> str:
        """Return the path of the file ``name`` in pyarrow's file system."""
        return f"{self._root}/{name}"


class StoredCheckpoints:
    """Access to a run's checkpoints in an object store, for `CheckpointManager`.

    Args:
        store: checkpoint folder.
        local: folder on this host for temporary files.
    """

    def __init__(self, store: ObjectStore, local: Path) -> None:
        self._store, self._local = store, local

    def address(self, step: int) -> str:
        """Return the address of a step's checkpoint."""
        return self.under(step).address

    def under(self, step: int) -> ObjectStore:
        """Return the folder of a step's checkpoint in the store."""
        return self._store.under(step_name(step))

    def steps(self) -> dict[int, bool]:
        """Return the steps with objects in the store. The value is True if the step has a manifest."""
        complete: dict[int, bool] = {}
        for step, name in self._objects():
            complete[step] = complete.get(step, False) or name == MANIFEST
        return complete

    def check(self, step: int) -> None:
        """Do nothing, because a check needs a download. A load checks the files after the download."""

    def remove(self, step: int) -> None:
        """Remove a checkpoint, finished or not."""
        names = [name for object_step, name in self._objects() if object_step == step]
        # The manifest first, so that after an interrupted removal the checkpoint does not look complete.
        for name in sorted(names, key=lambda name: name != MANIFEST):
            self._store.remove(f"{step_name(step)}/{name}")

    def new_scratch(self, token: str | None = None) -> Path:
        """Create a scratch folder for temporary files; see `make_scratch`."""
        self._local.mkdir(parents=True, exist_ok=True)
        return make_scratch(_KIND, self._local, token=token)

    def download(self, step: int, to: Path) -> None:
        """Download a checkpoint into the folder ``to``, if this is the first rank on its host.

        Other ranks return at once. Not collective.
        """
        if os.environ.get("LOCAL_RANK", "0") == "0":
            names = [name for object_step, name in self._objects() if object_step == step]
            # Notes remain only if a save was interrupted after its manifest; a load does not need them.
            names = [name for name in names if not name.startswith("note-") and not name.endswith(_PART)]
            # The manifest last, because it makes the downloaded checkpoint complete.
            for name in sorted(names, key=lambda name: name == MANIFEST):
                self._store.get(f"{step_name(step)}/{name}", to / step_name(step) / name)

    @contextmanager
    def opened(self, step: int, axis: Axis) -> Iterator[Path]:
        """Download a step's checkpoint, yield the folder on this host, and remove the folder at the end.

        Collective: the first rank on every host downloads, and all ranks wait for it.
        """
        # All ranks use the same folder name, because the ranks on a host share the download.
        token = agreed(axis, lambda: secrets.token_hex(8), "loading a checkpoint")[0]
        scratch = self._local / f"{_KIND}-{token}"

        def download() -> None:
            """Download the checkpoint to ``scratch`` if this is the first rank on its host."""
            if os.environ.get("LOCAL_RANK", "0") == "0":
                with suppress(FileExistsError):  # hosts may share the folder
                    self.new_scratch(token)
                self.download(step, scratch)

        try:
            agreed(axis, download, f"downloading step {step}")
            yield scratch / step_name(step)
        finally:
            # Wait for all ranks, because another rank on this host may still read from the folder.
            agreed(axis, lambda: None, "loading a checkpoint")
            remove_scratch(scratch)

    def _objects(self) -> Iterator[tuple[int, str]]:
        """Yield (step, file name) for all checkpoint objects in the store, partial uploads included."""
        for object_name in self._store.names(partial=True):
            folder, _, name = object_name.partition("/")
            step = step_of(folder)
            # Other objects in the store belong to the user.
            if step is not None and _FILE.fullmatch(name.removesuffix(_PART)):
                yield step, name
