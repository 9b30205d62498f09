"""Worker processes that accept connections from the same socket, and the parent process which supervises
them.

The parent starts the workers, forwards signals and model changes to all of them, and replaces workers that
end. For the messages between worker and parent, see ``peers.py``.
"""

import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

from meshrec.durable import abandon_scratch, remove_named, scratch_folder
from meshrec.export.archive import import_readers
from meshrec.export.manifest import COMPILED
from meshrec.serve.options import ServerOptions, listen
from meshrec.serve.peers import ParentLink

_log = logging.getLogger(__name__)
# Environment variable for the folder in which workers share metrics.
_SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
# A worker which ends sooner is restarted after a pause, so that a failing start does not spin.
_SECONDS_OF_A_BAD_START = 5.0
# `_Task.requester` once the worker which requested the change has ended.
_NO_WORKER = -1
# Signals that the parent passes on to the workers. The first two stop the server, SIGHUP reloads models.
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(models: Mapping[str, Path], options: ServerOptions, *, workers: int = 1) -> None:
    """Run a server until SIGTERM or SIGINT; SIGHUP reloads the models. Call from the main thread.

    Args:
        models: package folders by model name.
        options: server options.
        workers: number of processes. They share the memory for the weights.

    Raises:
        ValueError: the address is not available, or ``workers`` is below 1.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    # Before the fork, so that all workers accept connections from the same socket.
    listener = listen(options)
    with scratch_folder("meshrec-serve") as scratch, _server_environment(scratch, workers):
        if not all((folder / COMPILED).exists() for folder in models.values()):
            import_readers()  # before the fork: workers and trial processes inherit it
        if workers > 1:
            _Supervisor(models, options, listener, workers).run()
            return
        from meshrec.serve.server import Server

        server = Server(models, options, listener)
        _log.info("serving %s at %s", ", ".join(models), server.url)
        server.run()


@contextlib.contextmanager
def _server_environment(scratch: Path, workers: int) -> Iterator[None]:
    """Set environment variables so that all temporary files of the server are in one folder, within the
    context.

    If the server is killed, the next server removes the folder.
    """
    changes = {"TMPDIR": str(scratch)}  # torch extracts programs there
    if workers > 1:
        metrics = scratch / "metrics"
        metrics.mkdir()
        changes[_SHARED_METRICS] = str(metrics)  # read when the workers import prometheus_client
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    tempfile.tempdir = None  # Python caches TMPDIR
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        tempfile.tempdir = None


class _Worker(NamedTuple):
    """Running worker: the process, the parent's end of the pipe, and the ``time.monotonic`` start time."""

    process: BaseProcess
    pipe: Connection
    start_time: float


ErrorArguments = list[Any]
"""Arguments of a `RequestError`: message, status and headers."""


class _Task(NamedTuple):
    """Model change which the workers are applying.

    Attributes:
        change: message with action, model and delta.
        pending: indices of the workers which have not reported an outcome.
        errors: errors that workers have reported.
        requester: index of the worker which requested the change, and gets the outcome.
        ticket: number with which that worker identifies its request; see `ParentLink`.
    """

    change: dict[str, Any]
    pending: set[int]
    errors: list[ErrorArguments]
    requester: int
    ticket: int


class _Supervisor:
    """Parent of the workers: forwards signals and model changes, and replaces workers which end.

    The parent never runs a torch operator. Such an operator would start threads, but only a process without
    threads can fork safely.

    Args:
        listener: listening socket, which all workers inherit; closed at the end.
    """

    def __init__(
        self, models: Mapping[str, Path], options: ServerOptions, listener: socket.socket, num_workers: int
    ) -> None:
        self._models, self._options, self._listener, self._num_workers = (
            models,
            options,
            listener,
            num_workers,
        )
        self._workers: dict[int, _Worker] = {}  # running workers by index
        self._tasks: dict[int, _Task] = {}  # changes which a worker has not answered yet, by number
        # Last successful change per model, for workers which start later.
        self._changes: dict[str, tuple[str, int | None]] = {}
        # Number of the last change, which never decreases: a late answer cannot be taken for another
        # change's.
        self._num_tasks = 0
        # Shared with the workers: a byte per worker, 1 once it has loaded all models. Never reset, so that a
        # replacement worker knows that it is one.
        self._loaded = mmap.mmap(-1, num_workers)
        # Set by SIGTERM or SIGINT: workers which end are not replaced any more.
        self._is_stopping = False
        # Self-pipe: signal handlers write, `_handle_events` reads.
        self._wake, self._woken = multiprocessing.Pipe()

    def run(self) -> None:
        """Start the workers, and handle events until a signal has ended all workers."""
        # Restored when the server has stopped.
        before = {number: signal.signal(number, self._on_signal) for number in _HANDLED}
        try:
            for index in range(self._num_workers):
                self._start_worker(index)
            while self._workers:
                self._handle_events()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._listener.close()

    def _start_worker(self, index: int) -> None:
        """Fork a worker process. `index` is in [0, worker count)."""
        here, there = multiprocessing.Pipe()
        parent_link = ParentLink(there, self._loaded, index)
        ends = [here, self._wake, self._woken, *(worker.pipe for worker in self._workers.values())]
        # Forked, so that a worker starts with all modules imported. The parent has a single thread.
        process = multiprocessing.get_context("fork").Process(
            target=_run_worker,
            args=(self._models, self._options, self._listener, parent_link),
            kwargs={"num_workers": self._num_workers, "changes": dict(self._changes), "ends": ends},
        )
        # Between the fork and the worker's handlers, a signal would run the parent's handler in the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        # Only the worker keeps this end, so that the parent sees EOF when the worker ends.
        there.close()
        self._workers[index] = _Worker(process, here, time.monotonic())

    def _on_signal(self, number: int, _: Any) -> None:
        """Signal handler, which only wakes `_handle_events` with the signal number.

        Python may run a handler between any two instructions, so the work must not be done here.
        """
        self._wake.send_bytes(bytes([number]))

    def _handle_events(self) -> None:
        """Wait until a signal or a worker's message arrives, and handle it."""
        pipes: dict[Any, int] = {worker.pipe: index for index, worker in self._workers.items()}
        ready = wait([self._woken, *pipes])  # the pipe of an ended worker is readable (EOF)
        if self._woken in ready:
            self._forward_signal(self._woken.recv_bytes()[0])
        for pipe, index in pipes.items():
            if pipe in ready:
                self._receive(index)

    def _forward_signal(self, number: int) -> None:
        """Send SIGHUP (reload), or SIGTERM for any other signal (stop), to all workers."""
        if number != signal.SIGHUP:
            self._is_stopping, number = True, signal.SIGTERM
            # No replacement worker will need the socket. Workers have copies of it.
            self._listener.close()
        else:  # a reload applies all deltas again, which ends rollbacks
            self._changes = {m: change for m, change in self._changes.items() if change[0] == "unload"}
        for worker in self._workers.values():
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def _receive(self, index: int) -> None:
        """Handle a worker's message: a requested change, the outcome of a change, or the end of the pipe."""
        try:
            message = json.loads(self._workers[index].pipe.recv_bytes())
        except (EOFError, OSError):
            self._on_worker_exit(index)
            return
        if "action" in message:
            self._num_tasks += 1
            change = {name: message[name] for name in ("action", "model", "delta")}
            # Workers that start later get the change from `_changes`.
            task = _Task(change, set(self._workers), [], index, message["ticket"])
            self._tasks[self._num_tasks] = task
            for worker in list(self._workers):
                self._send_to(worker, {"task": self._num_tasks, **change})
        else:
            self._finish_change(message["task"], index, message["error"])

    def _finish_change(self, number: int, index: int, error: ErrorArguments | None) -> None:
        """Record that a worker has finished a change.

        Once all workers have finished, send the outcome to the worker which requested the change.
        """
        task = self._tasks[number]
        task.pending.discard(index)
        if error is not None:
            task.errors.append(error)
        if not task.pending:
            del self._tasks[number]
            # A change counts only if all workers made it. Workers which start later repeat it.
            if not task.errors:
                self._changes[task.change["model"]] = task.change["action"], task.change["delta"]
            self._send_to(
                task.requester, {"ticket": task.ticket, "error": task.errors[0] if task.errors else None}
            )

    def _send_to(self, index: int, message: dict[str, Any]) -> None:
        """Send a message to a worker, unless it has ended."""
        if index in self._workers:
            try:
                self._workers[index].pipe.send_bytes(json.dumps(message).encode())
            except OSError:
                return  # it ended; `_handle_events` will notice

    def _on_worker_exit(self, index: int) -> None:
        """Clean up after an ended worker, and start a replacement unless the server stops."""
        worker = self._workers.pop(index)
        # Collects the exit code, and leaves no zombie process.
        worker.process.join()
        worker.pipe.close()
        # Remove the gauges of the ended process. prometheus_client's `mark_process_dead` does the same, but
        # importing the package fixes how this process and its forks store values.
        shared = Path(os.environ[_SHARED_METRICS])  # in our scratch folder
        remove_named(shared, [path.name for path in shared.glob(f"gauge_live*_{worker.process.pid}.db")])
        for number, task in list(self._tasks.items()):
            if task.requester == index:  # the replacement worker has separate tickets
                self._tasks[number] = task._replace(requester=_NO_WORKER)
            if index in task.pending:
                self._finish_change(
                    number, index, ["a worker ended meanwhile. Try again.", 503, {"Retry-After": "1"}]
                )
        if self._is_stopping:
            return
        _log.error(
            "worker %d ended with exit code %s; starting a replacement", index, worker.process.exitcode
        )
        if time.monotonic() - worker.start_time < _SECONDS_OF_A_BAD_START:
            time.sleep(1.0)
        self._start_worker(index)


def _run_worker(
    models: Mapping[str, Path],
    options: ServerOptions,
    listener: socket.socket,
    parent_link: ParentLink,
    *,
    num_workers: int,
    changes: dict[str, tuple[str, int | None]],
    ends: Sequence[Connection],
) -> None:
    """Main function of a worker process.

    Args:
        changes: last load or unload per model, which this worker repeats. Values are the fields of a
            `ModelChange`. Contains only changes that succeeded in all workers.
        ends: the parent's ends of all pipes, inherited through the fork. The worker closes them. Otherwise
            workers would get no EOF on their pipes, by which they detect a killed parent.
    """
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    # SIGHUP stays blocked until the server handles it: the default action would end the worker.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    for end in ends:
        end.close()
    from meshrec.serve.models import ModelChange
    from meshrec.serve.server import Server

    parent = os.getppid()
    # Workers share the cores: a thread per core in each would make them wait for each other.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_workers))
    try:
        server = Server(
            models, options, listener, parent_link, {m: ModelChange(*change) for m, change in changes.items()}
        )
    except OSError as error:  # such as a full disk; the parent restarts the worker
        _log.error("a worker cannot start: %s", error)
        sys.exit(1)
    _log.info("serving %s at %s (process %d)", ", ".join(models), server.url, os.getpid())
    server.run()
    if os.getppid() != parent:  # a killed parent cannot remove the folder
        abandon_scratch(Path(os.environ["TMPDIR"]))
