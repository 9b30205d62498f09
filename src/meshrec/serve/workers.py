"""Several server processes on one socket: how they start, change models together, restart and stop."""

import contextlib
import json
import logging
import mmap
import multiprocessing
import os
import shutil
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

from meshrec.durable import scratch_folder
from meshrec.export.archive import prepare_for_exported
from meshrec.export.manifest import COMPILED
from meshrec.serve.options import ServerOptions, listen
from meshrec.serve.peers import Peers

_log = logging.getLogger(__name__)
_SHARED_METRICS = "PROMETHEUS_MULTIPROC_DIR"
"""Environment variable with the folder in which workers share their metrics."""
_SECONDS_OF_A_BAD_START = 5.0
_NOBODY = -1
"""The index of a worker that has ended."""
_HANDLED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def serve(models: Mapping[str, Path], options: ServerOptions, *, workers: int = 1) -> None:
    """Run a server until SIGTERM or SIGINT; SIGHUP reloads them. Call it from a program's main thread.

    Args:
        models: folders of packages, by name.
        options: options of the server.
        workers: the number of processes, which share the pages of the weights.

    Raises:
        ValueError: the address is not available, or there are fewer workers than one.
    """
    if workers < 1:
        raise ValueError(f"workers must be at least 1, got {workers}.")
    bound = listen(options)
    with scratch_folder("meshrec-serve") as scratch, _environment(scratch, workers):
        if not all((folder / COMPILED).exists() for folder in models.values()):
            prepare_for_exported()  # once for the workers and for the processes that try packages out
        if workers > 1:
            _Supervisor(models, options, bound, workers).run()
            return
        from meshrec.serve.server import Server

        server = Server(models, options, bound)
        _log.info("serving %s at %s", ", ".join(models), server.url)
        server.run()


@contextlib.contextmanager
def _environment(scratch: Path, workers: int) -> Iterator[None]:
    """Put all temporary files of the server into one folder, which the next server removes after SIGKILL."""
    changes = {"TMPDIR": str(scratch)}  # read by torch, which extracts programs there
    if workers > 1:
        metrics = scratch / "metrics"
        metrics.mkdir()
        changes[_SHARED_METRICS] = str(metrics)  # read when the workers import prometheus_client
    before = {name: os.environ.get(name) for name in changes}
    os.environ.update(changes)
    tempfile.tempdir = None  # Python keeps what TMPDIR was
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
    process: BaseProcess
    pipe: Connection
    began: float


class _Task(NamedTuple):
    """A change that all workers make: the change, who is not done, the errors, and who asked."""

    wish: dict[str, Any]
    left: set[int]
    errors: list[str]
    asker: int
    ticket: int


class _Supervisor:
    """The parent of the workers. It never runs an operator of torch, so it can fork at any time."""

    def __init__(
        self, models: Mapping[str, Path], options: ServerOptions, bound: socket.socket, num: int
    ) -> None:
        self._models, self._options, self._bound, self._num = models, options, bound, num
        self._workers: dict[int, _Worker] = {}
        self._tasks: dict[int, _Task] = {}
        self._wishes: dict[str, tuple[str, int | None]] = {}
        self._num_tasks = 0
        self._loaded = mmap.mmap(-1, num)
        self._is_stopping = False
        self._wake, self._woken = multiprocessing.Pipe()

    def run(self) -> None:
        """Run the workers until a signal has ended all of them."""
        before = {number: signal.signal(number, self._on_signal) for number in _HANDLED}
        try:
            for index in range(self._num):
                self._start(index)
            while self._workers:
                self._turn()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            self._bound.close()

    def _start(self, index: int) -> None:
        here, there = multiprocessing.Pipe()
        peers = Peers(there, self._loaded, index)
        ends = [here, self._wake, self._woken, *(worker.pipe for worker in self._workers.values())]
        process = multiprocessing.get_context("fork").Process(
            target=_work,
            args=(self._models, self._options, self._bound, peers),
            kwargs={"num_workers": self._num, "wishes": dict(self._wishes), "ends": ends},
        )
        # A signal between the fork and the worker's own handlers would run the parent's in the worker.
        signal.pthread_sigmask(signal.SIG_BLOCK, _HANDLED)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDLED)
        there.close()
        self._workers[index] = _Worker(process, here, time.monotonic())

    def _on_signal(self, number: int, _: Any) -> None:
        self._wake.send_bytes(bytes([number]))

    def _turn(self) -> None:
        pipes: dict[Any, int] = {worker.pipe: index for index, worker in self._workers.items()}
        ready = wait([self._woken, *pipes])  # the pipe of a worker that ended is at its end
        if self._woken in ready:
            self._pass_on(self._woken.recv_bytes()[0])
        for pipe, index in pipes.items():
            if pipe in ready:
                self._hear(index)

    def _pass_on(self, number: int) -> None:
        if number != signal.SIGHUP:
            self._is_stopping, number = True, signal.SIGTERM
            self._bound.close()
        else:  # all deltas again
            self._wishes = {m: wish for m, wish in self._wishes.items() if wish[0] == "unload"}
        for worker in self._workers.values():
            if worker.process.pid is not None and worker.process.is_alive():
                os.kill(worker.process.pid, number)

    def _hear(self, index: int) -> None:
        try:
            said = json.loads(self._workers[index].pipe.recv_bytes())
        except (EOFError, OSError):
            self._ended(index)
            return
        if "action" in said:
            self._num_tasks += 1
            wish = {name: said[name] for name in ("action", "model", "delta")}
            task = _Task(wish, set(self._workers), [], index, said["ticket"])
            self._tasks[self._num_tasks] = task
            for each in list(self._workers):
                self._say(each, {"task": self._num_tasks, **wish})
        else:
            self._done(said["task"], index, said["error"])

    def _done(self, number: int, index: int, error: str | None) -> None:
        task = self._tasks[number]
        task.left.discard(index)
        if error is not None:
            task.errors.append(error)
        if not task.left:
            del self._tasks[number]
            if not task.errors:
                self._wishes[task.wish["model"]] = task.wish["action"], task.wish["delta"]
            self._say(task.asker, {"ticket": task.ticket, "error": task.errors[0] if task.errors else None})

    def _say(self, index: int, what: dict[str, Any]) -> None:
        if index in self._workers:
            try:
                self._workers[index].pipe.send_bytes(json.dumps(what).encode())
            except OSError:
                return  # it has ended, as its sentinel will tell

    def _ended(self, index: int) -> None:
        worker = self._workers.pop(index)
        worker.process.join()
        worker.pipe.close()
        # Its gauges tell of something that is gone. `mark_process_dead` of prometheus_client does this too,
        # but is not imported here: the package settles at its import how a process keeps values.
        for file in Path(os.environ[_SHARED_METRICS]).glob(f"gauge_live*_{worker.process.pid}.db"):
            file.unlink(missing_ok=True)
        for number, task in list(self._tasks.items()):
            if task.asker == index:  # the next worker of this index has tickets of its own
                self._tasks[number] = task._replace(asker=_NOBODY)
            if index in task.left:
                self._done(number, index, "a worker ended meanwhile. Try again.")
        if self._is_stopping:
            return
        _log.error(
            "worker %d ended with exit code %s; another takes its place", index, worker.process.exitcode
        )
        if time.monotonic() - worker.began < _SECONDS_OF_A_BAD_START:
            time.sleep(1.0)
        self._start(index)


def _work(
    models: Mapping[str, Path],
    options: ServerOptions,
    bound: socket.socket,
    peers: Peers,
    *,
    num_workers: int,
    wishes: dict[str, tuple[str, int | None]],
    ends: Sequence[Connection],
) -> None:
    """Run a worker, from its first line to its end.

    ``ends`` are the parent's ends of all pipes, which the worker closes. It notices that the parent was
    killed when its own pipe has no other end left, so no worker may keep one open.
    """
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    # SIGHUP waits until the server handles it: its default would end a worker that starts during a reload.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGTERM, signal.SIGINT))
    for end in ends:
        end.close()
    from meshrec.serve.models import Wish
    from meshrec.serve.server import Server

    parent = os.getppid()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // num_workers))
    try:
        server = Server(models, options, bound, peers, {m: Wish(*wish) for m, wish in wishes.items()})
    except OSError as error:  # such as a full disk; the parent tries again
        _log.error("a worker cannot start: %s", error)
        sys.exit(1)
    _log.info("serving %s at %s (process %d)", ", ".join(models), server.url, os.getpid())
    server.run()
    if os.getppid() != parent:  # it was killed, and can remove nothing
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)
