"""Checkpoints in an object store, for hosts that share no folder.

[Note: how a checkpoint reaches a store]

1. Each rank writes its data file into a folder of its own host, as into a shared one, and uploads it.
2. When all ranks have uploaded, the first rank uploads the manifest. A store shows an object when it is
   whole, so that the manifest completes the checkpoint, as it does on a disk; before, there is none.
3. Files on the hosts are removed. Training waits for the upload: a forked writer must not talk to a store.

To load a checkpoint, one rank of each host downloads it whole into a folder of the host, from which the
ranks of the host read what they need.
"""

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist

from meshrec.checkpoint.agreement import DamagedCheckpointError, agreed, ranks_of
from meshrec.checkpoint.manifest import MANIFEST
from meshrec.checkpoint.saving import load, save
from meshrec.data.faults import needs

_NAME = re.compile(r"step-(\d{10,})")
_BLOCK = 8 << 20


class ObjectStore:
    """A folder of an object store, by its address, such as ``s3://bucket/runs``; see `meshrec.data` for the
    kinds.

    Raises:
        ValueError: the address cannot be understood.
    """

    def __init__(self, address: str) -> None:
        pa, fs = needs("pyarrow", "data"), needs("pyarrow.fs", "data")
        self.address = address
        try:
            self._files, root = fs.FileSystem.from_uri(address)
        except (pa.ArrowException, OSError, ImportError) as error:
            raise ValueError(
                f"{address} is no address of a store: {error}. Give one such as s3://bucket/runs."
            ) from error
        self._root = root.rstrip("/")
        self._fs = fs

    def under(self, name: str) -> "ObjectStore":
        """Return a folder in this one."""
        plain, question, options = self.address.partition("?")
        return ObjectStore(f"{plain.rstrip('/')}/{name}{question}{options}")

    def put(self, local: Path, name: str) -> None:
        """Upload a file. Others see it when it is whole."""
        self._files.create_dir(self._path(name).rpartition("/")[0], recursive=True)
        with local.open("rb") as source, self._files.open_output_stream(self._path(name)) as target:
            while block := source.read(_BLOCK):
                target.write(block)

    def get(self, name: str, local: Path) -> None:
        """Download a file; it appears under its name when it is whole."""
        local.parent.mkdir(parents=True, exist_ok=True)
        scratch = local.with_name(f".{local.name}.{os.getpid()}")
        try:
            with self._files.open_input_stream(self._path(name)) as source, scratch.open("wb") as target:
                while block := source.read(_BLOCK):
                    target.write(block)
            scratch.replace(local)
        finally:
            scratch.unlink(missing_ok=True)

    def read(self, name: str) -> bytes:
        """Return the contents of a small file."""
        with self._files.open_input_stream(self._path(name)) as source:
            return bytes(source.read())

    def names(self) -> list[str]:
        """Return the names of all files in this folder and below, in order."""
        selector = self._fs.FileSelector(self._root, recursive=True, allow_not_found=True)
        found = self._files.get_file_info(selector)
        return sorted(
            each.path[len(self._root) + 1 :] for each in found if each.type == self._fs.FileType.File
        )

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        if self._files.get_file_info(self._path(name)).type == self._fs.FileType.File:
            self._files.delete_file(self._path(name))

    def check(self) -> None:
        """Write, read and remove a small file.

        Raises:
            OSError: that does not work.
        """
        name = f".probe-{os.getpid()}-{os.urandom(4).hex()}"
        self._files.create_dir(self._root, recursive=True)
        with self._files.open_output_stream(self._path(name)) as target:
            target.write(b"probe")
        self.remove(name)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"


class StoredCheckpoints:
    """Checkpoints of one run in a store; the counterpart of `CheckpointManager`. All methods are collective.

    Args:
        store: the folder of the store.
        local: a folder of this host, for files on their way.
        keep_last: the number of checkpoints to keep.
        group: the ranks (default: all of the default process group).
    """

    def __init__(
        self, store: ObjectStore, local: Path, *, keep_last: int = 3, group: dist.ProcessGroup | None = None
    ) -> None:
        self._store, self._local = store, local
        self._keep_last, self._group = keep_last, group

    def save(self, step: int, state: Mapping[str, Any]) -> str:
        """Save and upload, and remove old checkpoints.

        Raises:
            CheckpointError: the checkpoint cannot be written or uploaded; raised on every rank. Older ones
                remain.
        """
        axis, name = ranks_of(self._group), f"step-{step:010d}"
        folder = self._local / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            save(folder, state, step=step, group=self._group)
            agreed(axis, lambda: self._upload(folder, axis.rank), f"uploading to {self._store.address}")
            agreed(
                axis, lambda: self._complete(folder, axis.rank, step), f"uploading to {self._store.address}"
            )
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return f"{self._store.address}/{name}"

    def async_save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save; see ``save``. Nothing happens in the background."""
        self.save(step, state)

    def wait(self) -> None:
        """Do nothing, because nothing happens in the background."""

    def latest(self) -> str | None:
        """Return the address of the newest complete checkpoint. Not collective."""
        steps = self.steps()
        return f"{self._store.address}/step-{max(steps):010d}" if steps else None

    def load_latest(self, state: Mapping[str, Any]) -> int | None:
        """Load the newest checkpoint, and return its step; None if there is none.

        Raises:
            DamagedCheckpointError: there are checkpoints, but none is intact; raised on every rank.
        """
        axis = ranks_of(self._group)
        found = agreed(axis, self.steps, f"looking into {self._store.address}")[0]
        for step in sorted(found, reverse=True):
            folder = self._local / f"step-{step:010d}"
            try:
                agreed(axis, lambda step=step: self.fetch(step, self._local), f"downloading step {step}")  # type: ignore[misc]
                load(folder, state, group=self._group)
            except DamagedCheckpointError:
                if step == min(found):
                    raise
                continue
            finally:
                agreed(
                    axis, lambda: None, "loading a checkpoint"
                )  # before another rank of this host removes it
                shutil.rmtree(folder, ignore_errors=True)
            return step
        return None

    def fetch(self, step: int, to: Path) -> None:
        """Download a checkpoint into a folder of this host, by one rank of the host. Not collective."""
        if os.environ.get("LOCAL_RANK", "0") == "0":
            name = f"step-{step:010d}"
            names = [each for each in self._store.names() if each.startswith(f"{name}/")]
            for each in sorted(names, key=lambda each: each.endswith(MANIFEST)):  # the manifest completes it
                self._store.get(each, to / each)

    def remove_after(self, step: int) -> None:
        """Remove the checkpoints of later steps."""
        if ranks_of(self._group).rank == 0:
            for later in self.steps():
                if later > step:
                    self._remove(later)

    def _upload(self, folder: Path, rank: int) -> None:
        mine = sorted(folder.glob(f"data-*-{rank:05d}.safetensors"), key=lambda path: path.stat().st_mtime)
        for path in mine[-1:]:  # older ones are of a save that was killed
            self._store.put(path, f"{folder.name}/{path.name}")

    def _complete(self, folder: Path, rank: int, step: int) -> None:
        if rank == 0:
            self._store.put(folder / MANIFEST, f"{folder.name}/{MANIFEST}")
            self._remove_old(step)

    def steps(self) -> list[int]:
        """Return the steps of complete checkpoints in ascending order. Not collective."""
        return sorted(step for step, name in self._files() if name == MANIFEST)

    def _files(self) -> Iterator[tuple[int, str]]:
        for each in self._store.names():
            folder, _, name = each.partition("/")
            if match := _NAME.fullmatch(folder):
                yield int(match[1]), name

    def _remove_old(self, saved: int) -> None:
        complete = [step for step in self.steps() if step <= saved]
        kept = set(complete[-self._keep_last :])
        for step in {step for step, _ in self._files()}:
            if step <= saved and step not in kept:
                self._remove(step)

    def _remove(self, step: int) -> None:
        names = [name for each, name in self._files() if each == step]
        for name in sorted(
            names, key=lambda name: name != MANIFEST
        ):  # without it, it is no checkpoint any more
            self._store.remove(f"step-{step:010d}/{name}")
