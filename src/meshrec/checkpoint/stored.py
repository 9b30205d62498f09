"""Checkpoints in an object store, for hosts without a shared folder.

[Note: how a checkpoint reaches a store]
1. Every rank writes a data file to a local scratch folder, and uploads it.
2. After all uploads, rank 0 uploads the manifest. Stores show an object only when it is complete, so the
   manifest completes the checkpoint, as on a disk.
3. The local files are removed. Training waits for the upload: a forked writer must not talk to a store.

To load a checkpoint, one rank per host downloads it completely to a scratch folder, from which all ranks of
the host read.

Only objects with names of checkpoint files are deleted from the store.
"""

import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.saving import load, save
from meshrec.data.faults import needs
from meshrec.durable import durable_file, make_scratch, remove_scratch

_NAME = re.compile(r"step-(\d{10,})")
_FILE = re.compile(rf"{re.escape(MANIFEST)}|data-[0-9a-f]{{8,64}}-\d{{5,}}\.safetensors")
"""Checkpoint object names; other objects are never deleted."""
_KIND = "staged"
"""Scratch folder kind."""
# Bytes per read and write.
_BLOCK = 8 << 20


class ObjectStore:
    """Folder in an object store, given by an address such as ``s3://bucket/runs``; see `meshrec.data` for the
    kinds.

    Raises:
        ValueError: invalid address.
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
        self._root = root.rstrip("/")
        self._fs = fs

    def under(self, name: str) -> "ObjectStore":
        """Return a subfolder."""
        plain, question, options = self.address.partition("?")
        return ObjectStore(f"{plain.rstrip('/')}/{name}{question}{options}")

    def put(self, local: Path, name: str) -> None:
        """Upload a file; visible to readers only when complete."""
        self._files.create_dir(self._path(name).rpartition("/")[0], recursive=True)
        with local.open("rb") as source, self._files.open_output_stream(self._path(name)) as target:
            while block := source.read(_BLOCK):
                target.write(block)

    def get(self, name: str, local: Path) -> None:
        """Download a file; it appears only when complete."""
        local.parent.mkdir(parents=True, exist_ok=True)
        with self._files.open_input_stream(self._path(name)) as source, durable_file(local) as target:
            while block := source.read(_BLOCK):
                target.write(block)

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        with self._files.open_input_stream(self._path(name)) as source:
            return bytes(source.read())

    def names(self) -> list[str]:
        """Return all file names in this folder and subfolders, sorted."""
        selector = self._fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        infos = self._files.get_file_info(selector)
        return sorted(
            info.path[len(self._root) + 1 :] for info in infos if info.type == self._fs.FileType.File
        )

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        if self._files.get_file_info(self._path(name)).type == self._fs.FileType.File:
            self._files.delete_file(self._path(name))

    def check(self) -> None:
        """Write, read and remove a small file.

        Raises:
            OSError: the store does not allow that.
        """
        name = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
        self._files.create_dir(self._root, recursive=True)
        with self._files.open_output_stream(self._path(name)) as target:
            target.write(b"probe")
        self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class StoredCheckpoints:
    """A run's checkpoints in an object store; same interface as `CheckpointManager`.

    `save`, `async_save` and `load_latest` are collective.

    Args:
        store: folder in the store.
        local: folder on this host for files in transit.
        keep_last: number of checkpoints to keep.
        group: participating ranks (default: the default process group).
    """

    def __init__(
        self, store: ObjectStore, local: Path, *, keep_last: int = 3, group: dist.ProcessGroup | None = None
    ) -> None:
        self._store, self._local = store, local
        self._keep_last, self._group = keep_last, group

    def save(self, step: int, state: Mapping[str, Any]) -> str:
        """Save and upload, then remove old checkpoints.

        Raises:
            CheckpointError: the checkpoint cannot be written or uploaded; raised on every rank. Older ones
                remain.
        """
        axis, name = ranks_of(self._group), f"step-{step:010d}"
        uploading = f"uploading to {self._store.address}"
        folder = agreed(axis, self._scratch, f"writing to {self._local}")[axis.rank]
        try:
            save(folder, state, step=step, group=self._group)
            agreed(axis, lambda: self._upload(folder, name), uploading)
            agreed(axis, lambda: self._complete(folder, name, axis.rank, step), uploading)
        finally:
            remove_scratch(folder)
        return f"{self._store.address}/{name}"

    def async_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save like `save`, and return after the upload.

        For the interface of `CheckpointManager`. A forked writer must not talk to a store, so there is no
        background save.
        """
        self.save(step, state)

    def wait(self) -> None:
        """Do nothing: saves run in the foreground."""

    def latest(self) -> str | None:
        """Return the address of the newest complete checkpoint. Not collective."""
        steps = self.steps()
        return f"{self._store.address}/step-{max(steps):010d}" if steps else None

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest intact checkpoint and return the step; without checkpoints, return None.

        Raises:
            DamagedCheckpointError: checkpoints exist, but none is intact; raised on every rank.
        """
        axis = ranks_of(self._group)
        steps = agreed(axis, self.steps, f"looking into {self._store.address}")[0]
        for step in sorted(steps, reverse=True):
            # A common folder name: the ranks on a host share the download.
            token = agreed(axis, lambda: secrets.token_hex(8), "loading a checkpoint")[0]
            scratch = self._local / f"{_KIND}-{token}"
            try:
                agreed(axis, partial(self._download, step, scratch), f"downloading step {step}")
                load(scratch / f"step-{step:010d}", state, group=self._group)
            except DamagedCheckpointError:
                if step == min(steps):
                    raise
                continue
            finally:
                # Barrier: another rank of this host may still read from the folder.
                agreed(axis, lambda: None, "loading a checkpoint")
                remove_scratch(scratch)
            return step
        return None

    def fetch(self, step: int, to: Path) -> None:
        """Download a checkpoint to a folder of this host, by the host's local rank 0. Not collective."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            name = f"step-{step:010d}"
            names = [object_name for object_name in self._store.names() if object_name.startswith(f"{name}/")]
            for object_name in sorted(
                names, key=lambda object_name: object_name.endswith(MANIFEST)
            ):  # the manifest completes it
                self._store.get(object_name, to / object_name)

    def remove_after(self, step: int) -> None:
        """Remove checkpoints of later steps. Call on every rank: rank 0 removes, other ranks do not wait."""
        if ranks_of(self._group).rank == 0:
            for later in self.steps():
                if later > step:
                    self._remove(later)

    def _scratch(self, token: str | None = None) -> Path:
        self._local.mkdir(parents=True, exist_ok=True)
        return make_scratch(_KIND, self._local, token=token)

    def _download(self, step: int, scratch: Path) -> None:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            with suppress(FileExistsError):  # hosts may share the folder
                self._scratch(scratch.name.removeprefix(f"{_KIND}-"))
            self.fetch(step, scratch)

    def _upload(self, folder: Path, name: str) -> None:
        for path in folder.glob("data-*.safetensors"):
            self._store.put(path, f"{name}/{path.name}")

    def _complete(self, folder: Path, name: str, rank: int, step: int) -> None:
        if rank == 0:
            self._store.put(folder / MANIFEST, f"{name}/{MANIFEST}")
            self._remove_old(step)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints, ascending. Not collective."""
        return sorted(step for step, name in self._files() if name == MANIFEST)

    def _files(self) -> Iterator[tuple[int, str]]:
        for object_name in self._store.names():
            folder, _, name = object_name.partition("/")
            if (match := _NAME.fullmatch(folder)) and _FILE.fullmatch(name):
                yield int(match[1]), name

    def _remove_old(self, saved: int) -> None:
        complete = [step for step in self.steps() if step <= saved]
        retained = set(complete[-self._keep_last :])
        for step in {step for step, _ in self._files()}:
            if step <= saved and step not in retained:
                self._remove(step)

    def _remove(self, step: int) -> None:
        names = [name for file_step, name in self._files() if file_step == step]
        # Manifest first: an interrupted removal must not leave an apparently complete checkpoint.
        for name in sorted(names, key=lambda name: name != MANIFEST):
            self._store.remove(f"step-{step:010d}/{name}")
