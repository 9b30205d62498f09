"""Writing while training continues: a forked process keeps the memory as it was at the fork.

The kernel shares the pages of both processes until one of them writes to a page, and then copies that page.
So a snapshot takes the time to copy the page tables, and as much memory as training changes until the file is
written: none for untouched rows, at most the size of the saved tensors. What a fork does not freeze is frozen
before it: memory that processes share (mapped files, ``share_memory_()``) is copied, and tables that keep
their rows themselves give a snapshot (``SideTable.snapshot``).

The child only reads memory and writes its file. It takes no lock of the parent's threads, and talks to no
device and no other rank. It closes the parent's sockets, so that peers notice if the parent dies.

One lock it cannot avoid: Python itself waits for it in the child if another thread was just starting
(python/cpython#112275, in 3.11 and older). So a child reports that it has begun. One that does not is killed,
and another one is forked.
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
from meshrec.checkpoint.data_file import TensorPart, Written, write_data_file
from meshrec.durable import write_durably
from meshrec.tables.streamed import StreamedPart
from meshrec.tables.table import RowsSnapshot

_PR_SET_PDEATHSIG = 1
_SECONDS_TO_BEGIN = 10.0
_TRIES = 3


class Snapshot:
    """A process that writes one file."""

    def __init__(self, pid: int, note: Path) -> None:
        self._pid, self._note = pid, note
        self._status: int | None = None
        self._frozen: FrozenParts | None = None

    @classmethod
    def start(cls, path: Path, parts: Sequence[TensorPart], note: Path) -> "Snapshot":
        """Start to write ``parts`` to ``path``. When the file is on disk, ``note`` says where each part is in
        it.

        Tensors that are not contiguous CPU memory are copied first, in the parent: the child must not run
        anything that needs threads. So are those in memory that processes share.

        Raises:
            CheckpointError: no child began to work.
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
        sys.stdout.flush()
        sys.stderr.flush()
        for _ in range(_TRIES):
            ready, begun = os.pipe()
            with warnings.catch_warnings():
                # From Python 3.12 on: a child of a process with threads must take none of their locks.
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
            has_begun = bool(poll.poll(1000 * _SECONDS_TO_BEGIN))  # or is dead, see `wait`
            os.close(ready)
            if has_begun:
                snapshot._frozen = frozen
                return snapshot
            snapshot.kill()
        raise CheckpointError(
            f"the background writer did not begin: {_TRIES} processes did nothing for "
            f"{_SECONDS_TO_BEGIN:.0f} s each. Look at the machine's load and free memory; the next save "
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
        """Wait until the writer has ended.

        Raises:
            CheckpointError: the file could not be written; the error says why.
        """
        if self._status is None:
            self._end(os.waitpid(self._pid, 0)[1])
        if self._status != 0:
            reason = "it was killed"
            failure = failure_of(self._note)
            if failure.exists():
                reason = failure.read_text()
                failure.unlink(missing_ok=True)
            raise CheckpointError(f"the background writer failed: {reason}")

    def kill(self) -> None:
        """Kill the process if it still runs."""
        if self.is_running:
            os.kill(self._pid, signal.SIGKILL)
            self._end(os.waitpid(self._pid, 0)[1])

    def _end(self, status: int) -> None:
        self._status = status
        if self._frozen is not None:
            self._frozen.close()


class FrozenParts:
    """The parts of a file, with snapshots of those that a fork would not keep as they are.

    See the module's docstring.
    """

    def __init__(self, parts: Sequence[TensorPart]) -> None:
        self._snapshots: dict[int, RowsSnapshot] = {}
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
        found = tensor.cpu().contiguous()
        begin = found.data_ptr()
        is_shared = any(first < begin + found.nbytes and begin < end for first, end in shared)
        return found.clone() if is_shared and found is tensor else found

    def close(self) -> None:
        """Close the snapshots of tables."""
        while self._snapshots:
            self._snapshots.popitem()[1].close()


def shared_memory() -> list[tuple[int, int]]:
    """Return the addresses, first and end, of memory that other processes see this one write to."""
    try:
        lines = Path("/proc/self/maps").read_text(errors="replace").splitlines()
    except OSError:  # not Linux: a fork shares what it does not copy, and nothing tells
        return []
    maps = [line.split(maxsplit=2)[:2] for line in lines]
    return [
        (int(begin, 16), int(end, 16))
        for addresses, permissions in maps
        if permissions.endswith("s")
        for begin, end in [addresses.split("-")]
    ]


def read_note(note: Path) -> Written:
    """Read the note of a finished writer."""
    return Written.from_json(json.loads(note.read_text()))


def failure_of(note: Path) -> Path:
    """Return the path of the file in which a failed writer says why."""
    return note.with_suffix(".failed")


def _write_and_exit(
    parent: int, prctl: Any, begun: int, *, path: Path, parts: Sequence[TensorPart], note: Path
) -> None:
    code = 1
    try:
        os.write(begun, b".")
        gc.disable()  # it might free what waits for the parent's threads
        if prctl is not None:
            prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        os.nice(5)
        torch.set_num_threads(1)  # the parent's threads are not here
        written = write_data_file(path, parts, _Inline())
        write_durably(note, json.dumps(written.to_json()).encode())
        code = 0
    except BaseException as error:
        _leave_reason(note, error)
    finally:
        os._exit(code)


def _leave_reason(note: Path, error: BaseException) -> None:
    with contextlib.suppress(OSError):  # the exit code tells, too
        failure_of(note).write_text(describe(error))


class _Inline(Executor):
    """An executor without threads, because the writer is already in the background."""

    def submit(self, function: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call the function now."""
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future


def _prctl() -> Any:
    """Return prctl(2), looked up before the fork; None if the system has none."""
    return getattr(ctypes.CDLL(None), "prctl", None)
