"""Save a training state to a checkpoint, in the foreground or background, and load it.

torch.distributed.checkpoint (DCP) plans which rank writes and reads which tensor piece. ``storage.py`` writes
and reads the files, in MeshRec's format.

[Note: checkpoint guarantees]
1. Complete or absent. Data files get new names and reach the disk first; then the manifest appears
   atomically. A crash leaves either the old checkpoint or the new.
2. A single point in time. ``async_save`` writes the state at call time, even if training changes
   it during the write.
3. Independent of the plan. Names and shapes are the unsharded model's, so a checkpoint can be loaded under
   any plan and with any number of ranks.
4. Verified. Checksums cover block bytes and block positions. No byte is used before it is verified,
   and nothing in a file is executed.
5. Resumable. Weights, optimizer state, data position and every rank's random numbers are saved. On the same
   ranks, a resumed run is bit-identical to an uninterrupted run. Additional ranks start with new random
   numbers.
6. Consistent with deltas. The trainer publishes a delta before every checkpoint, so servers and a resumed run
   miss no step.

The guarantees do not hold if two runs save to the same path at once (prevented by runs/lock.py), or if the
file system loses files after ``fsync`` has returned.
"""

import functools
import json
import secrets
import threading
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from meshrec.checkpoint.agreement import (
    CheckpointError,
    agreed,
    as_checkpoint_error,
    combined_error,
    ranks_of,
)
from meshrec.checkpoint.data_file import Written
from meshrec.checkpoint.finding import BEST, CHECKPOINTS, find_checkpoint
from meshrec.checkpoint.manifest import MANIFEST, Manifest
from meshrec.checkpoint.matching import Differences, Matching, prepare_matching
from meshrec.checkpoint.reading import read_manifest, verify_data
from meshrec.checkpoint.removing import KIND, check_target, remove_saves, saves_in
from meshrec.checkpoint.state import Collected, Loading, collect, merge_values, prepare
from meshrec.checkpoint.storage import CheckpointReader, SavePaths, Writer
from meshrec.checkpoint.unfinished import filling
from meshrec.comms.mesh import Axis
from meshrec.durable import CreatedPath, Mark, mark, release, remove_named, write_durably
from meshrec.tables.streamed import saves_key_ordered

if TYPE_CHECKING:
    from meshrec.checkpoint.stored import ObjectStore

Group = dist.ProcessGroup | None
# Intervals at which threads look for notes (files saying that a rank's data file is complete), on the disk
# and in an object store. The interval is longer for a store, because every request costs money.
_POLL_SECONDS = 0.02
_STORE_POLL_SECONDS = 0.5


def save(path: str | Path, state: Mapping[str, Any], *, step: int | None = None, group: Group = None) -> Path:
    """Save a training state. When the function returns, the checkpoint is on disk. Collective.

    An existing checkpoint at ``path`` is replaced atomically. Other files in the folder are kept. The random
    number generator states of every rank are saved as well.

    Args:
        path: folder accessible from all ranks.
        state: entries by name: modules (including DistributedModelParallel), optimizers, plain values, and
            objects with ``state_dict()`` and ``load_state_dict()``, whose plain values and tensors are equal
            on all ranks.
        step: training step, recorded in the checkpoint.
        group: participating ranks; None: the default process group.

    Returns:
        ``path`` as a Path.

    Raises:
        ValueError: checkpoints do not support the state, or the folder has a ``manifest.json`` from another
            program; raised on every rank.
        CheckpointError: the checkpoint cannot be written, for example because the disk is full; raised on
            every rank. An existing checkpoint at ``path`` remains.

    Example::

        from meshrec.checkpoint import load, save

        model = torch.nn.Linear(4, 1)
        save("checkpoint", {"model": model, "epoch": 3}, step=100)
        state = {"model": torch.nn.Linear(4, 1), "epoch": 0}
        load("checkpoint", state)
        assert state["epoch"] == 3
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
    store: "ObjectStore | None" = None,
) -> "PendingSave":
    """Save the current training state in the background. Collective; see `save`.

    Every rank forks a child process and returns. The child's memory keeps the values from the time of the
    call, and the child writes them to a file. Until the file is written, the kernel copies every memory page
    that training changes. Device tensors, and memory shared between processes, are copied before the fork.

    Call this function from a thread that outlives the save, and ``wait`` for the save before the process
    ends.

    Args:
        path, state, step, group: see `save`.
        after: function to call on rank 0 once the checkpoint is complete. It is called in another thread.
        store: folder in an object store, to which the files are uploaded. ``path`` is then this rank's
            scratch folder; see [Note: how a checkpoint reaches a store] in ``stored.py``.

    Returns:
        The save in progress.
    """
    job = _Save(Path(path), state, step, ranks_of(group), background=True)
    job.run()
    return PendingSave(job, after, store)


def load(path: str | Path, state: Mapping[str, Any], *, partial: bool = False, group: Group = None) -> None:
    """Load a checkpoint into a training state, in place. Collective.

    The plan and the number of ranks may differ from those at the save. Ranks that existed at the save
    continue their saved random number sequences.

    Before any rank writes to a table, all ranks compare the whole state with the checkpoint and verify all
    bytes. Every byte is therefore read twice, the second time from the page cache if it fits there.

    Args:
        path: checkpoint, or a run folder, which stands for the run's reported weights; see
            `find_checkpoint`.
        state: entries to load; see `save`. Plain values are replaced in this mapping.
        partial: whether modules may have tensors missing from the checkpoint, and vice versa. If True,
            modules load the tensors in common, such as pretrained tables, and the log lists the others.
        group: see `save`.

    Raises:
        ValueError: the state does not fit the checkpoint; raised on every rank before any change.
        DamagedCheckpointError: files are damaged; raised on every rank before any change.
        CheckpointError: after tables have been written to, a file could not be read, or a table's file could
            not be written. Raised on every rank. The modules then raise in forward passes and saves until a
            load succeeds.
    """
    axis = ranks_of(group)

    def prepare_all(folder: Path, manifest: Manifest, undo: list[Callable[[], object]]) -> Loading:
        """Compare the whole state with the checkpoint.

        Args:
            folder: checkpoint folder.
            manifest: checkpoint manifest.
            undo: receives functions that undo the changes made here.
        """
        return prepare(state, folder, manifest, axis.rank, partial=partial, undo=undo)

    _load(path, state, prepare_all, axis, is_whole=not partial)


def load_matching(
    path: str | Path,
    state: Mapping[str, Any],
    *,
    fresh_tables: Collection[str] = (),
    tables_only: bool = False,
    group: Group = None,
) -> Differences:
    """Load the values of a checkpoint that fit a model which may have changed since. Collective.

    Tensors with the saved shape are loaded, with their optimizer state. A table with more rows than saved
    gets the saved rows, in the same order; the new rows keep their initial values. All other tensors keep
    their initial values. Random number generators are not loaded.

    Args:
        path: checkpoint folder.
        state: modules and optimizers to load.
        fresh_tables: names of tables that keep their initial values.
        tables_only: whether all tensors other than tables keep their initial values.
        group: see `save`.

    Returns:
        The differences between state and checkpoint, equal on every rank.

    Raises:
        ValueError: a table has another width than in the checkpoint; raised on every rank before any change.
        DamagedCheckpointError, CheckpointError: as for `load`.
    """
    matching = Matching(fresh_tables, tables_only, Differences())

    def prepare_fitting(folder: Path, manifest: Manifest, undo: list[Callable[[], object]]) -> Loading:
        """Find the values that fit.

        Args:
            folder: checkpoint folder.
            manifest: checkpoint manifest.
            undo: receives functions that undo the changes made here.
        """
        return prepare_matching(state, folder, manifest, matching, undo)

    _load(path, state, prepare_fitting, ranks_of(group), is_whole=False)
    return matching.differences


def _load(
    path: str | Path,
    state: Mapping[str, Any],
    prepare: Callable[[Path, Manifest, list[Callable[[], object]]], Loading],
    axis: Axis,
    *,
    is_whole: bool,
) -> None:
    """Load a checkpoint as `prepare` says; see `load`. Collective.

    Args:
        prepare: function that compares the state with the checkpoint, called with folder, manifest, and a
            list that receives functions to undo its changes.
    """
    # Results of `read_and_prepare`, which cannot return them because `agreed` would send them to all ranks.
    prepared: dict[str, Any] = {}
    # Functions that restore the state. They run in reverse order if a check fails before tables are written
    # to.
    undo: list[Callable[[], object]] = []

    def read_and_prepare() -> set[str]:
        """Read the manifest, prepare the load in ``prepared``, and return the names of tensors to read."""
        # A path that is not a run goes to read_manifest unchanged, whose error then names it.
        is_run = (Path(path) / BEST).is_dir() or (Path(path) / CHECKPOINTS).is_dir()
        prepared["folder"] = folder = find_checkpoint(path) if is_run else Path(path)
        prepared["manifest"] = manifest = read_manifest(folder)
        prepared["loading"] = loading = prepare(folder, manifest, undo)
        return loading.names

    def fill(tensors: dict[str, Tensor]) -> None:
        """Read the values of ``tensors`` (by checkpoint name) from the checkpoint, in place. Collective."""
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        with _convert_dcp_errors(f"loading {folder}"):
            dcp_load(
                tensors,
                storage_reader=CheckpointReader(folder, manifest, sizes),
                planner=DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                process_group=axis.group,
                no_dist=axis.size == 1,
            )

    try:
        names = set().union(*agreed(axis, read_and_prepare, f"reading {path}"))
        folder: Path = prepared["folder"]
        manifest: Manifest = prepared["manifest"]
        loading: Loading = prepared["loading"]
        # Ranks share the work: every rank verifies a part of the blocks of all tensors that any rank reads.
        verify = functools.partial(verify_data, names=names, rank=axis.rank, world_size=axis.size)
        agreed(axis, lambda: verify(folder, manifest), f"verifying {folder}")
        fill(loading.fresh)
        agreed(axis, loading.accept, f"loading {folder}")
    except BaseException:
        for step_back in reversed(undo):
            step_back()
        raise
    # From here on, a failure cannot be undone. `filling` then makes the modules raise until a load succeeds.
    with filling(state.values(), folder, is_whole=is_whole):
        fill(loading.tensors)
        try:
            agreed(axis, lambda: loading.fill(folder), f"loading {folder}")
        finally:
            loading.exchange_row_counts()  # also after a failure, because the next load needs the row counts
        agreed(axis, loading.finish, f"loading {folder}")


class PendingSave:
    """A checkpoint save running in the background.

    On every rank, a child process writes the data file, and then the note. The note is a small file with the
    positions of the tensor pieces in the data file. With a store, a thread on every rank then uploads both
    files. Rank 0 always has a thread. This thread waits for the notes from all ranks, and then writes the
    manifest, which completes the checkpoint.

    Args:
        job: the save, whose writer processes are running.
        after, store: see `async_save`.
    """

    def __init__(
        self, job: "_Save", after: Callable[[], None] | None, store: "ObjectStore | None" = None
    ) -> None:
        self._job, self._after, self._store = job, after, store
        # Set by `wait` after a failure, or by `kill`, to stop the thread from waiting for notes.
        self._cancelled = threading.Event()
        # Set when this rank's upload has ended, with or without an error, or if this rank uploads nothing.
        self._uploaded = threading.Event()
        # Error in the thread, raised by `wait`.
        self._error: Exception | None = None
        # Set by the first `wait` or `kill`. Later calls to `wait` return at once.
        self._is_over = False
        self._thread: threading.Thread | None = None
        if job.axis.rank == 0 or store is not None:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._uploaded.set()

    @property
    def path(self) -> Path:
        """Checkpoint folder, incomplete while the save runs. With a store, this rank's scratch folder."""
        return self._job.path

    @property
    def is_writing(self) -> bool:
        """Whether this rank is still writing or uploading files. Not collective."""
        snapshot = self._job.writer.snapshot
        thread = self._thread is not None and self._thread.is_alive()
        return thread or (snapshot is not None and snapshot.is_running)

    def wait(self) -> Path:
        """Wait until the checkpoint is complete. Collective.

        Raises:
            CheckpointError: a rank failed to write or to upload; raised on every rank.
        """
        if self._is_over:
            return self.path
        self._is_over = True
        snapshot = self._job.writer.snapshot

        def finish_local_part() -> None:
            """Wait until this rank's files are written and uploaded. Raise the error if this failed."""
            if snapshot is not None:
                snapshot.wait()
            self._uploaded.wait()
            self._raise_error()

        # Two rounds. Rank 0's thread waits for notes from all ranks, so it must first be told to stop if a
        # rank has failed, whose note will never come.
        try:
            agreed(self._job.axis, finish_local_part, "writing a checkpoint")
        except Exception:
            self._cancel()
            raise
        agreed(self._job.axis, self._join, "writing the manifest")
        return self.path

    def kill(self) -> None:
        """Stop writing, because this process is about to end. The checkpoint stays incomplete.

        Not collective.
        """
        self._is_over = True
        if self._job.writer.snapshot is not None:
            self._job.writer.snapshot.kill()
        self._cancel()

    def _cancel(self) -> None:
        """Make the thread stop waiting for notes, and wait until it has ended."""
        self._cancelled.set()
        if self._thread is not None:
            self._thread.join()

    def _join(self) -> None:
        """Wait until the thread has ended, and raise its error."""
        if self._thread is not None:
            self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        """Raise the thread's error, if there was one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        """Upload this rank's files, and complete the checkpoint on rank 0. Runs in a thread."""
        action = "writing the manifest"
        try:
            if self._store is not None:
                action = f"uploading to {self._store.address}"
                self._upload(self._store)
            # Before ``_complete``, which waits for all ranks: ``wait`` must be able to report this rank's
            # result in the meantime.
            self._uploaded.set()
            if self._job.axis.rank == 0:
                self._complete()
        except Exception as error:
            # `wait` raises the error in the calling thread, on all ranks.
            self._error = as_checkpoint_error(error, action)
        finally:
            self._uploaded.set()

    def _upload(self, store: "ObjectStore") -> None:
        """Wait for the note of this rank's writer, and then upload the data file and the note."""
        files, rank = self._job.files, self._job.axis.rank
        if self._job.writer.snapshot is None:
            return
        # If the writer fails, the note never appears. ``wait`` then cancels this loop.
        while not files.completion_note(rank).exists():
            if self._cancelled.wait(_POLL_SECONDS):
                return
        # The note last, because it tells rank 0 that the data file is in the store.
        for path in (files.data(rank), files.completion_note(rank)):
            store.put(path, path.name)

    def _complete(self) -> None:
        """Wait until the notes of all ranks exist, and then write the manifest. Rank 0 only."""
        job, store = self._job, self._store
        # Ranks without pieces write neither a data file nor a note.
        notes = {rank: job.files.completion_note(rank) for rank in job.writer.writing_ranks}
        while not self._has_all(notes.values()):
            if self._cancelled.wait(_POLL_SECONDS if store is None else _STORE_POLL_SECONDS):
                # Another rank has failed, or the process is about to end.
                job.clean_up()
                return
        for rank, note in notes.items():
            content = note.read_bytes() if store is None else store.read(note.name)
            job.writer.written[rank] = Written.from_json(json.loads(content))
        job.complete()
        if store is not None:
            # The manifest comes last, because it makes the checkpoint complete for readers.
            store.put(job.path / MANIFEST, MANIFEST)
            for note in notes.values():
                store.remove(note.name)
        if self._after is not None:
            self._after()

    def _has_all(self, notes: Collection[Path]) -> bool:
        """Return whether all notes exist: in the store if there is a store, else in the folder."""
        if self._store is None:
            return all(note.exists() for note in notes)
        return {note.name for note in notes} <= set(self._store.names())


class _Save:
    """One rank's work for a save, in the foreground or background. Creating it is collective.

    Args:
        background: whether a forked process writes the data file.
    """

    def __init__(
        self, path: Path, state: Mapping[str, Any], step: int | None, axis: Axis, *, background: bool
    ) -> None:
        self.path, self.axis = path, axis
        self._step, self._background = step, background
        # Filled by ``gather`` below, and kept until the manifest is written.
        self._collected = Collected()
        # Replaced below, once rank 0's ID is known.
        self.files = SavePaths(path, secrets.token_hex(4))
        # Folders created by this save, removed by `clean_up` after a failure. Empty except on rank 0.
        self._created: list[CreatedPath] = []
        # Lock on the save's mark, held by rank 0 until the save is complete or has failed.
        self._lock: int | None = None

        def gather() -> _RankShare:
            """Collect this rank's state, and return the data to send to all ranks.

            Rank 0 also creates the folder, with a mark that identifies the save.
            """
            self._collected = collected = collect(state, axis.rank)
            if axis.rank == 0:
                check_target(path)
                self._created = CreatedPath.create_folders(path)
                # If the save is killed, the mark identifies the files to remove.
                self._lock = mark(path, KIND, id=self.files.nonce)[1]
            names = {
                name: entry for name, entry in collected.entries.items() if entry in collected.partial_entries
            }
            return _RankShare(
                self.files.nonce,
                {entry: collected.values[entry] for entry in collected.partial_entries},
                names,
            )

        try:
            parts = agreed(axis, gather, f"saving to {path}")
        except BaseException:
            self.clean_up()
            raise
        # Merge entries that are split over ranks, so that all ranks know the whole entries.
        for part in parts[1:]:
            self._collected.entries.update(part.names)
            for entry, values in part.values.items():
                # An entry that only other ranks have is taken from them.
                local_values = self._collected.values.get(entry, values)
                self._collected.values[entry] = merge_values(local_values, values, entry)
        # All ranks use rank 0's nonce, which the mark names.
        self.files = SavePaths(path, parts[0].nonce)
        self.writer = Writer(self.files, background=background)

    def run(self) -> None:
        """Write this rank's data file, or start a process that writes it. Collective."""
        # Growable tables refuse to be saved by plain DCP, which could not load them. This save can load them.
        token = saves_key_ordered.set(True)
        try:
            with _convert_dcp_errors(f"saving to {self.path}"):
                dcp_save(
                    dict(self._collected.tensors),
                    storage_writer=self.writer,
                    planner=DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                    process_group=self.axis.group,
                    no_dist=self.axis.size == 1,
                )
        except BaseException:
            # The child may be writing already when another rank fails.
            if self.writer.snapshot is not None:
                self.writer.snapshot.kill()
            if self.axis.rank == 0:
                self.clean_up()
            raise
        finally:
            saves_key_ordered.reset(token)

    def complete(self) -> None:
        """Write the manifest, which completes the checkpoint, and remove the files of the replaced one.

        Rank 0 only.
        """
        # The names of other ranks' random number tensors are unknown here, but start with their entry.
        local = self._collected.entries
        entries = {name: local.get(name, name.split(".")[0]) for name in self.writer.metadata}
        written, tensors = self.writer.records(entries)
        manifest = Manifest(
            step=self._step,
            world_size=self.axis.size,
            files=tuple(data_file.file for data_file in written),
            tensors=tensors,
            values=self._collected.values,
            plans=self._collected.plans,
        )
        # Read before the old manifest is replaced, because only it names the old files.
        replaced = saves_in(self.path, current=self.files.nonce)
        try:
            content = manifest.to_bytes()
            Manifest.from_bytes(content)  # never replace a checkpoint by one that load would reject
            write_durably(self.path / MANIFEST, content, token=self.files.nonce)
        except BaseException:
            self.clean_up()
            raise
        notes = [self.files.completion_note(rank).name for rank in self.writer.writing_ranks]
        # The manifest now names the save's files, so notes and mark are not needed any more.
        remove_named(self.path, [*notes, Mark(self.path, self.files.nonce, KIND).path.name])
        self._release()
        remove_saves(self.path, replaced)

    def clean_up(self) -> None:
        """Remove the files of this save after a failure, and the folders created for it."""
        remove_saves(self.path, {self.files.nonce})
        self._release()
        for folder in self._created:
            folder.remove()

    def _release(self) -> None:
        """Release the lock on the save's mark (the file that identifies an unfinished save), if held here."""
        lock, self._lock = self._lock, None
        if lock is not None:
            release(lock)


class _RankShare(NamedTuple):
    """Data that a rank sends to all ranks when a save starts.

    Attributes:
        nonce: random ID. All ranks use rank 0's ID, which becomes part of the file names.
        values: by entry name, the kind and plain values of partial entries. A partial entry is an entry of
            the training state that is split over ranks, such as a model split into pipeline stages.
        names: by tensor name, the name of the partial entry to which the tensor belongs.
    """

    nonce: str
    values: dict[str, Any]
    names: dict[str, str]


@contextmanager
def _convert_dcp_errors(action: str) -> Iterator[None]:
    """Context manager that replaces DCP's CheckpointException by the error from `combined_error`.

    The error names the failed ranks, and is the same on all ranks.
    """
    with warnings.catch_warnings():
        # DCP warns without a process group, which is a supported case here.
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
            raise combined_error(failures, action) from error
