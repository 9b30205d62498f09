"""Write a checkpoint while training continues, from a forked process whose memory does not change.

The kernel shares memory pages between both processes, and copies a page when either process writes to it. A
snapshot therefore takes only the time to copy page tables, and additional memory for the pages that training
changes before the file is written: none for unchanged rows, and at most the size of the saved tensors.

A fork does not freeze memory shared between processes (mapped files, ``share_memory_()``), so such memory is
copied before the fork. Tables with rows in files provide a snapshot themselves (``ExternalTable.snapshot``).

The child only reads memory and writes a file. It takes no lock that a parent thread may hold, and does not
communicate with devices or ranks. It closes the parent's sockets, so peers notice if the parent dies.

In Python 3.11 and older, the interpreter may wait forever for a lock in the child if another thread was
starting during the fork (python/cpython#112275). The child therefore reports to the parent when it runs. A
child that does not report is killed, and the parent forks again.
"""

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshrec.checkpoint.agreement import CheckpointError, describe
from meshrec.checkpoint.data_file import TensorPart, write_data_file
from meshrec.durable import name_full_disk, remove_named, write_durably
from meshrec.tables.streamed import StreamedPart
from meshrec.tables.table import TableSnapshot

# Option of prctl(2), from linux/prctl.h.
_PR_SET_PDEATHSIG = 1
# Seconds until a child must report. It usually takes milliseconds, but seconds on a loaded machine.
_START_TIMEOUT = 10.0
# In a program that provokes the hang, 18 of 56 forks hung, so three in a row are rare.
_TRIES = 3


class Snapshot:
    """Forked process writing a data file. Create it with `start`.

    Args:
        pid: process ID of the child.
        note: file written by the child after success.
    """

    def __init__(self, pid: int, note: Path) -> None:
        self._pid, self._note = pid, note
        # The child's exit status from waitpid; None while the child runs.
        self._status: int | None = None
        # Table snapshots, which stay open until the child ends.
        self._frozen: SnapshotParts | None = None

    @classmethod
    def start(cls, path: Path, parts: Sequence[TensorPart], note: Path) -> "Snapshot":
        """Fork a process that writes ``parts`` to ``path``.

        When the file is on disk, the child writes the positions of the parts to the file ``note``. Tensors
        that are not in contiguous CPU memory, or are shared between processes, are copied before the fork.

        Args:
            path: new data file.
            parts: pieces to write.
            note: file written by the child after success.

        Raises:
            CheckpointError: no child started within the timeout.
        """
        # Before the fork, because copying needs threads and devices, which the child must not use.
        frozen = SnapshotParts(parts)
        try:
            return cls._fork(path, frozen, note)
        except BaseException:
            frozen.close()
            raise

    @classmethod
    def _fork(cls, path: Path, frozen: "SnapshotParts", note: Path) -> "Snapshot":
        """Fork the writer process for `start`, which describes the arguments.

        If the child does not report in time that it runs, kill it and fork again, up to `_TRIES` times.

        Raises:
            CheckpointError: no child has reported.
        """
        # Looked up before the fork, because the lookup takes locks. None: the system lacks prctl(2).
        prctl = getattr(ctypes.CDLL(None), "prctl", None)
        parent = os.getpid()
        # The child inherits the buffers, and would write their content a second time.
        sys.stdout.flush()
        sys.stderr.flush()
        # Try again if a child hangs in the interpreter; see the module docstring.
        for _ in range(_TRIES):
            ready, started_pipe = os.pipe()
            with warnings.catch_warnings():
                # Python 3.12 warns about forks of threaded processes; the child takes no locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    pid = os.fork()
                except OSError:
                    os.close(ready)
                    os.close(started_pipe)
                    raise
            if pid == 0:
                _write_and_exit(parent, prctl, started_pipe, path=path, parts=frozen.parts, note=note)
            # Otherwise ``poll`` would not notice if the child dies, because the pipe would stay open here.
            os.close(started_pipe)
            snapshot = cls(pid, note)
            poll = select.poll()  # unlike select, it takes descriptors above 1023
            poll.register(ready, select.POLLIN)
            has_started = bool(poll.poll(1000 * _START_TIMEOUT))  # also true if it died; see `wait`
            os.close(ready)
            if has_started:
                snapshot._frozen = frozen
                return snapshot
            # The child has not reported: it hangs, or the machine is very slow.
            snapshot.kill()
        raise CheckpointError(
            f"the background writer did not start: {_TRIES} processes were silent for "
            f"{_START_TIMEOUT:.0f} s each. Check the machine's load and free memory; the next save "
            "tries again."
        )

    @property
    def is_running(self) -> bool:
        """Whether the file is still being written."""
        if self._status is None:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                self._end(status)
        return self._status is None

    def wait(self) -> None:
        """Wait for the writer to end.

        Raises:
            CheckpointError: the file could not be written; the error has the reason.
        """
        if self._status is None:
            self._end(os.waitpid(self._pid, 0)[1])
        if self._status != 0:
            reason = "it was killed"
            # The child cannot raise in the parent, so it writes the reason to a file.
            failure = failure_of(self._note)
            if failure.exists():
                reason = failure.read_text()
                remove_named(failure.parent, [failure.name])
            raise CheckpointError(f"the background writer failed: {reason}")

    def kill(self) -> None:
        """Kill the process if it is running."""
        if self.is_running:
            os.kill(self._pid, signal.SIGKILL)
            self._end(os.waitpid(self._pid, 0)[1])

    def _end(self, status: int) -> None:
        """Record the child's exit status, and close the table snapshots."""
        self._status = status
        if self._frozen is not None:
            self._frozen.close()


class SnapshotParts:
    """Tensor pieces whose values stay the same in a forked process while the parent trains.

    Tensors whose memory a fork does not freeze are copied, or replaced by a snapshot of their table; see the
    module docstring.

    Args:
        parts: pieces to write.

    Attributes:
        parts: the same pieces, with tensors that may be read after a fork.
    """

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        # Snapshots by ``id(table)``, until `close`. All parts from a table use the same snapshot.
        self._snapshots: dict[int, TableSnapshot] = {}
        try:
            shared = shared_memory()
            self.parts = [part._replace(tensor=self._fork_safe(part.tensor, shared)) for part in parts]
        except BaseException:
            self.close()
            raise

    def _fork_safe(self, tensor: Tensor, shared: Sequence[tuple[int, int]]) -> Tensor:
        """Return a tensor with the same values that may be read in a forked process."""
        if isinstance(tensor, StreamedPart):
            # All parts of a table must come from the same snapshot, or they would be from different moments.
            number = id(tensor.table)
            if number not in self._snapshots:
                self._snapshots[number] = tensor.table.snapshot()
            return tensor.frozen(self._snapshots[number])
        # `copy` is the tensor itself if that is in contiguous CPU memory already.
        copy = tensor.cpu().contiguous()
        address = copy.data_ptr()
        # `cpu` and `contiguous` have copied the tensor already unless `copy` is the tensor itself.
        is_shared = any(first < address + copy.nbytes and address < end for first, end in shared)
        return copy.clone() if is_shared and copy is tensor else copy

    def close(self) -> None:
        """Close all table snapshots. To be called when the child has ended, or if no child started."""
        while self._snapshots:
            self._snapshots.popitem()[1].close()


def shared_memory() -> list[tuple[int, int]]:
    """Return the address ranges (start, end) of this process that other processes may share."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux: shared mappings are unknown
        return []
    maps = [line.split(maxsplit=2)[:2] for line in lines]
    return [
        (int(start, 16), int(end, 16))
        for addresses, permissions in maps
        # "s" is for shared mappings, "p" for private mappings.
        if permissions.endswith("s")
        for start, end in [addresses.split("-")]
    ]


def failure_of(note: Path) -> Path:
    """Return the path of the file to which a failed writer process writes the reason."""
    return note.with_suffix(".failed")


def _write_and_exit(
    parent: int, prctl: Any, started_pipe: int, *, path: Path, parts: Sequence[TensorPart], note: Path
) -> None:
    """Write the data file and the note, and end the process. Runs in the child, and never returns.

    Args:
        parent: parent process ID.
        started_pipe: write end of the pipe on which the child reports that it runs.
        note: file to write after success.
    """
    code = 1
    try:
        os.write(started_pipe, b".")
        gc.disable()  # a finalizer might wait for a lock held by a parent thread
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # prctl kills the child when the parent dies, but the parent may have died before.
        if os.getppid() != parent:
            os._exit(1)
        # Signals to the process group, such as Ctrl-C, are the parent's to handle: it may finish this save.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Peers must see the parent's sockets close when the parent dies.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.nice(5)  # training has priority
        torch.set_num_threads(1)  # a fork does not copy the thread pool
        written = write_data_file(path, parts, _InlineExecutor())
        write_durably(note, json.dumps(written.to_json()).encode())
        code = 0
    except BaseException as error:
        _write_reason(note, error)
    finally:
        # Not sys.exit: exit handlers and buffers belong to the parent.
        os._exit(code)


def _write_reason(note: Path, error: BaseException) -> None:
    """Write the reason for a failure to a file next to the note, where the parent's `wait` reads it."""
    with contextlib.suppress(OSError):  # the exit code also reports the failure
        if isinstance(error, OSError):
            name_full_disk(error, [note.parent])
        failure_of(note).write_text(describe(error))


class _InlineExecutor(Executor):
    """Executor that runs functions in the calling thread, because a forked child has no other threads."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call ``function`` at once, and return a completed future. Errors are raised here."""
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future
