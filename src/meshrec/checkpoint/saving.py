"""``save``, ``async_save`` and ``load`` of one checkpoint, with DCP's planning and our file formats.

[Note: what a checkpoint promises]

1. It is whole, or it is not there. Data files get new names and reach the disk first; then the manifest takes
   its place in one moment. A crash leaves the old checkpoint or the new one.
2. It holds one moment. ``async_save`` writes the state at the time of the call, whatever training changes
   meanwhile.
3. It does not depend on the plan. Names and shapes are those of the unsharded model, so any plan on any
   number of ranks can load it.
4. It is verified. Every block has a checksum that covers its place as well; no byte is used before it is
   checked, and nothing in a file is executed.
5. It continues the run. Weights, optimizer state, the position in the data, and the random numbers of every
   rank are in it: on the same ranks, a resumed run gives the same bits as one that was not stopped. A rank
   that did not exist then starts with random numbers of its own.
6. It knows its deltas. The trainer publishes a delta before each checkpoint, so servers and a resumed run
   miss no step.

It does not promise that two runs may save to one path at once (runs/lock.py prevents that), or that a file
system keeps a file after ``fsync`` has returned.
"""

import secrets
import shutil
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from meshrec.checkpoint.agreement import CheckpointError, agreed, as_checkpoint_error, combined, ranks_of
from meshrec.checkpoint.data_file import Written
from meshrec.checkpoint.finding import BEST, CHECKPOINTS, find_checkpoint
from meshrec.checkpoint.manifest import MANIFEST, Manifest
from meshrec.checkpoint.reading import read_manifest
from meshrec.checkpoint.snapshot import read_note
from meshrec.checkpoint.state import Collected, collect, merged, prepare
from meshrec.checkpoint.storage import CheckpointReader, RankFiles, Writer
from meshrec.comms.mesh import Axis
from meshrec.durable import write_durably

Group = dist.ProcessGroup | None
_POLL_SECONDS = 0.02


def save(path: str | Path, state: Mapping[str, Any], *, step: int | None = None, group: Group = None) -> Path:
    """Save a state. When this returns, the checkpoint is on disk. Collective.

    A checkpoint that is at ``path`` already is replaced atomically: until that moment, it is the old one.

    Args:
        path: a folder that all ranks see.
        state: the entries to save, by name: modules (DistributedModelParallel included), optimizers, plain
            values, and objects with ``state_dict()`` and ``load_state_dict()`` over plain values and tensors
            that are equal on all ranks. The random number generators of every rank are saved as well.
        step: the step to record in the checkpoint.
        group: the ranks (default: all of the default process group).

    Raises:
        ValueError: a checkpoint cannot hold the state; raised on every rank.
        CheckpointError: the checkpoint cannot be written, for example because the disk is full. It is raised
            on every rank, and the checkpoint that was at ``path`` remains.
    """
    job = _Save(Path(path), state, step, ranks_of(group), background=False)
    job.run()
    agreed(job.axis, job.complete if job.axis.rank == 0 else lambda: None, "writing the manifest")
    return job.path


def async_save(
    path: str | Path,
    state: Mapping[str, Any],
    *,
    step: int | None = None,
    group: Group = None,
    after: Callable[[], None] | None = None,
) -> "PendingSave":
    """Save the current state while training continues. Collective; see ``save``.

    The call takes as long as a fork. A child of each rank keeps the memory as it is now, and writes it; the
    kernel copies the pages that training changes meanwhile. Tensors on other devices, and in memory that
    processes share, are copied first.

    Call it from a thread that lives until the save is done, and ``wait`` for the save before the process
    ends.

    Args:
        path: see ``save``.
        state: see ``save``.
        step: see ``save``.
        group: see ``save``.
        after: called on the first rank, in another thread, once the checkpoint is complete.
    """
    job = _Save(Path(path), state, step, ranks_of(group), background=True)
    job.run()
    return PendingSave(job, after)


def load(path: str | Path, state: Mapping[str, Any], *, partial: bool = False, group: Group = None) -> None:
    """Load a checkpoint into a state, in place. The state has the entries that you want. Collective.

    The plan and the number of ranks may differ from those of the save. A rank whose number existed then
    continues its random numbers. Every byte is verified before it is used.

    Args:
        path: a checkpoint, or a run's folder, whose reported weights are loaded; see `find_checkpoint`.
        state: see ``save``. Plain values in it are replaced.
        partial: modules take the tensors that the checkpoint has, such as pretrained tables, and keep the
            others. The log says which are kept.
        group: see ``save``.

    Raises:
        ValueError: the state does not fit. It is raised on every rank, and nothing has changed.
        DamagedCheckpointError: files are not what was written; raised on every rank. If only the data shows
            it, the state is partly loaded.
    """
    axis = ranks_of(group)
    box: dict[str, Any] = {}

    def begin() -> None:
        # Of a run: the weights that it reports. What is no run is read as it is, to name what is wrong.
        is_run = (Path(path) / BEST).is_dir() or (Path(path) / CHECKPOINTS).is_dir()
        box["folder"] = folder = find_checkpoint(path) if is_run else Path(path)
        box["manifest"] = manifest = read_manifest(folder)
        box["loading"] = prepare(state, folder, manifest, axis.rank, partial=partial)

    agreed(axis, begin, f"reading {path}")
    folder: Path = box["folder"]
    loading = box["loading"]
    with _errors_of_dcp(f"loading {folder}"):
        dcp_load(
            loading.tensors,
            storage_reader=CheckpointReader(folder, box["manifest"]),
            planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
            process_group=axis.group,
            no_dist=axis.size == 1,
        )
    agreed(axis, lambda: loading.fill(folder), f"loading {folder}")
    loading.settle()
    agreed(axis, loading.finish, f"loading {folder}")


class PendingSave:
    """A save in the background. ``wait`` is collective."""

    def __init__(self, job: "_Save", after: Callable[[], None] | None) -> None:
        self._job, self._after = job, after
        self._cancelled = threading.Event()
        self._error: Exception | None = None
        self._is_over = False
        self._thread: threading.Thread | None = None
        if job.axis.rank == 0:
            self._thread = threading.Thread(target=self._finish, name="checkpoint", daemon=True)
            self._thread.start()

    @property
    def path(self) -> Path:
        """The path of the future checkpoint."""
        return self._job.path

    @property
    def is_writing(self) -> bool:
        """Whether this rank's part is still being written. Not collective."""
        snapshot = self._job.writer.snapshot
        thread = self._thread is not None and self._thread.is_alive()
        return thread or (snapshot is not None and snapshot.is_running)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            CheckpointError: one of the ranks could not write; raised on every rank.
        """
        if self._is_over:
            return self.path
        self._is_over = True
        snapshot = self._job.writer.snapshot
        try:
            agreed(self._job.axis, snapshot.wait if snapshot else lambda: None, "writing a checkpoint")
        except Exception:
            self._cancel()
            raise
        agreed(self._job.axis, self._join, "writing the manifest")
        return self.path

    def kill(self) -> None:
        """Abandon this rank's part, in a process that is about to end."""
        self._is_over = True
        if self._job.writer.snapshot is not None:
            self._job.writer.snapshot.kill()
        self._cancel()

    def _cancel(self) -> None:
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            raise self._error

    def _finish(self) -> None:
        """Write the manifest on the first rank, once all ranks have left their notes."""
        job = self._job
        notes = {rank: job.files.note(rank) for rank in job.writer.writing_ranks}
        try:
            while not all(note.exists() for note in notes.values()):
                if self._cancelled.wait(_POLL_SECONDS):
                    job.clean_up()
                    return
            job.writer.written = {rank: read_note(note) for rank, note in notes.items()}
            job.complete()
            if self._after is not None:
                self._after()
        except Exception as error:
            self._error = as_checkpoint_error(error, "writing the manifest")


class _Save:
    """One save, as one rank runs it."""

    def __init__(
        self, path: Path, state: Mapping[str, Any], step: int | None, axis: Axis, *, background: bool
    ) -> None:
        self.path, self.axis = path, axis
        self._step, self._background = step, background
        self._collected = Collected()

        def begin() -> _RankShare:
            self._collected = collected = collect(state, axis.rank)
            if axis.rank == 0:
                path.mkdir(parents=True, exist_ok=True)
            names = {name: entry for name, entry in collected.entries.items() if entry in collected.parts}
            return _RankShare(
                secrets.token_hex(4), {entry: collected.values[entry] for entry in collected.parts}, names
            )

        parts = agreed(axis, begin, f"saving to {path}")
        for part in parts[1:]:
            self._collected.entries.update(part.names)
            for entry, values in part.values.items():
                own = self._collected.values.get(entry, values)
                self._collected.values[entry] = merged(own, values, entry)
        self.files = RankFiles(path, parts[0].nonce)
        self.writer = Writer(self.files, background=background)

    def run(self) -> None:
        """Write this rank's part, or start to write it."""
        try:
            with _errors_of_dcp(f"saving to {self.path}"):
                dcp_save(
                    dict(self._collected.tensors),
                    storage_writer=self.writer,
                    planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self.axis.group,
                    no_dist=self.axis.size == 1,
                )
        except BaseException:
            if self.writer.snapshot is not None:
                self.writer.snapshot.kill()
            if self.axis.rank == 0:
                self.clean_up()
            raise

    def complete(self) -> None:
        """Write the manifest, which completes the checkpoint, and remove the files that it replaces. First
        rank only.
        """
        entries = _entries(self.writer, self._collected)
        written, tensors = self.writer.records(self.writer.written, entries)
        manifest = Manifest(
            step=self._step,
            world_size=self.axis.size,
            files=tuple(each.file for each in written),
            tensors=tensors,
            values=self._collected.values,
            plans=self._collected.plans,
        )
        try:
            content = manifest.to_bytes()
            Manifest.from_bytes(content)  # what could not be loaded does not replace what can
            write_durably(self.path / MANIFEST, content)
        except BaseException:
            self.clean_up()
            raise
        _remove_others(self.path, written)

    def clean_up(self) -> None:
        """Remove the files of a failed save."""
        for leftover in self.path.glob(f"*-{self.files.nonce}-*"):
            leftover.unlink(missing_ok=True)
        if not any(self.path.iterdir()):
            shutil.rmtree(self.path, ignore_errors=True)


class _RankShare(NamedTuple):
    """The part of a save that other ranks must know: ``values`` of the entries of which this rank holds
    ``names``.
    """

    nonce: str
    values: dict[str, Any]
    names: dict[str, str]


def _entries(writer: Writer, collected: Collected) -> dict[str, str]:
    """Return the entry of every tensor.

    A tensor that only other ranks hold (their random numbers) has the entry as the first word of its name.
    """
    return {name: collected.entries.get(name, name.split(".")[0]) for name in writer.metadata}


def _remove_others(folder: Path, written: list[Written]) -> None:
    keep = {each.file.name for each in written} | {MANIFEST}
    for pattern in ("data-*.safetensors", "note-*"):
        for leftover in folder.glob(pattern):
            if leftover.name not in keep:
                leftover.unlink(missing_ok=True)


@contextmanager
def _errors_of_dcp(what: str) -> Iterator[None]:
    """Turn DCP's errors, which are not Exceptions, into ours, with the same message on every rank."""
    with warnings.catch_warnings():
        # It warns of being alone, which is no mistake.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            yield
        except CheckpointException as error:
            failures = {
                rank: wrapped[0]
                if isinstance(wrapped[0], Exception)
                else CheckpointError(f"it was interrupted ({type(wrapped[0]).__name__})")
                for rank, wrapped in error.failures.items()
            }
            raise combined(failures, what) from error
