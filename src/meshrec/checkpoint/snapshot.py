"""Write a checkpoint while training continues: a forked process keeps the memory as it was.

The kernel shares pages between both processes, and copies a page when either writes to it. So a snapshot
costs the time to copy page tables, and as much memory as training changes before the file is written: nothing
for untouched rows, at most the size of the saved tensors. A fork does not freeze everything. Memory shared
between processes (mapped files, ``share_memory_()``) is copied before the fork, and tables with rows outside
RAM provide a snapshot (``ExternalTable.snapshot``).

The child only reads memory and writes a file. It takes no lock of the parent's threads, and does not
communicate with devices or ranks. It closes the parent's sockets, so that peers notice if the parent dies.

Python itself may wait for a lock in the child if another thread was just starting (python/cpython#112275, in
3.11 and older). So the child reports after the start. A child which does not report is killed and forked
again.
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

_PR_SET_PDEATHSIG = 1
# Seconds. A healthy child reports within milliseconds; a loaded machine may take seconds.
_START_TIMEOUT = 10.0
_TRIES = 3


class Snapshot:
    """Process which writes a data file."""

    def __init__(self, pid: int, note: Path) -> None:
        self._pid, self._note = pid, note
        # Exit status, from the first waitpid which reaps the child; None while it runs.
        self._status: int | None = None
        # Keeps table snapshots open until the child ends.
        self._frozen: FrozenParts | None = None

    @classmethod
    def start(cls, path: Path, parts: Sequence[TensorPart], note: Path) -> "Snapshot":
        """Start writing ``parts`` to ``path`` in a forked process.

        When the file is on disk, the child writes ``note`` with the parts' file positions. Tensors outside
        contiguous CPU memory are copied in the parent, because the child must not run code which needs
        threads. Memory shared between processes is copied as well.

        Args:
            path: new data file.
            parts: pieces to write.
            note: file written by the child after success.

        Raises:
            CheckpointError: no child started.
        """
        frozen = FrozenParts(parts)
        try:
            return cls._forked(path, frozen, note)
        except BaseException:
            frozen.close()
            raise

    @classmethod
    def _forked(cls, path: Path, frozen: "FrozenParts", note: Path) -> "Snapshot":
        prctl = _prctl()
        parent = os.getpid()
        # Otherwise the child could write buffered output a second time.
        sys.stdout.flush()
        sys.stderr.flush()
        for _ in range(_TRIES):
            ready, begun = os.pipe()
            with warnings.catch_warnings():
                # Python 3.12 warns about forks of threaded processes; the child takes no locks.
                warnings.simplefilter("ignore", DeprecationWarning)
                try:
                    pid = os.fork()
                except OSError:
                    os.close(ready)
                    os.close(begun)
                    raise
            if pid == 0:
                _write_and_exit(parent, prctl, begun, path=path, parts=frozen.parts, note=note)
            os.close(begun)
            snapshot = cls(pid, note)
            poll = select.poll()  # unlike select, it takes descriptors above 1023
            poll.register(ready, select.POLLIN)
            has_started = bool(poll.poll(1000 * _START_TIMEOUT))  # also true if it died; see `wait`
            os.close(ready)
            if has_started:
                snapshot._frozen = frozen
                return snapshot
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
        self._status = status
        if self._frozen is not None:
            self._frozen.close()


class FrozenParts:
    """Data file pieces, with snapshots or copies where a fork would not freeze memory.

    See the module docstring.
    """

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        # By table id: a table's parts share a snapshot, until `close`.
        self._snapshots: dict[int, TableSnapshot] = {}
        try:
            shared = shared_memory()
            self.parts = [part._replace(tensor=self._frozen(part.tensor, shared)) for part in parts]
        except BaseException:
            self.close()
            raise

    def _frozen(self, tensor: Tensor, shared: Sequence[tuple[int, int]]) -> Tensor:
        if isinstance(tensor, StreamedPart):
            number = id(tensor.table)
            if number not in self._snapshots:
                self._snapshots[number] = tensor.table.snapshot()
            return tensor.frozen(self._snapshots[number])
        copy = tensor.cpu().contiguous()
        address = copy.data_ptr()
        is_shared = any(first < address + copy.nbytes and address < end for first, end in shared)
        return copy.clone() if is_shared and copy is tensor else copy

    def close(self) -> None:
        """Close all table snapshots."""
        while self._snapshots:
            self._snapshots.popitem()[1].close()


def shared_memory() -> list[tuple[int, int]]:
    """Return address ranges (start, end) of memory which this process shares with other processes."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux: shared mappings are unknown
        return []
    maps = [line.split(maxsplit=2)[:2] for line in lines]
    return [
        (int(start, 16), int(end, 16))
        for addresses, permissions in maps
        if permissions.endswith("s")
        for start, end in [addresses.split("-")]
    ]


def failure_of(note: Path) -> Path:
    """Return the path at which a failed writer reports the reason."""
    return note.with_suffix(".failed")


def _write_and_exit(
    parent: int, prctl: Any, begun: int, *, path: Path, parts: Sequence[TensorPart], note: Path
) -> None:
    code = 1
    try:
        os.write(begun, b".")
        gc.disable()  # a finalizer might wait for parent threads
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        # The parent may have died before prctl took effect.
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # Peers must see the parent's sockets close when the parent dies.
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        # Training has priority.
        os.nice(5)
        torch.set_num_threads(1)  # a fork does not copy the thread pool
        written = write_data_file(path, parts, _Inline())
        write_durably(note, json.dumps(written.to_json()).encode())
        code = 0
    except BaseException as error:
        _leave_reason(note, error)
    finally:
        os._exit(code)


def _leave_reason(note: Path, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the exit code reports the failure, too
        if isinstance(error, OSError):
            name_full_disk(error, [note.parent])
        failure_of(note).write_text(describe(error))


class _Inline(Executor):
    """Executor without threads: the writer already runs in the background."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def _prctl() -> Any:
    """Return prctl(2), resolved before the fork; None if the system lacks it."""
    return getattr(ctypes.CDLL(None), "prctl", None)
