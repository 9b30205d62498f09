"""Pool of processes in a torch.distributed process group, which stay alive between calls.

To start a process and import torch takes seconds. Tests sharing a pool wait for this only once.
"""

import contextlib
import gc
import importlib
import importlib.util
import inspect
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context, util
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from meshrec.comms.fork_server import start_fork_server
from meshrec.durable import make_scratch, remove_scratch


class _Call(NamedTuple):
    """A function call, as sent to a rank."""

    module: str
    """Name of the function's module."""
    file: str
    """File of this module."""
    name: str
    """Qualified name of the function."""
    args: tuple[Any, ...]


class _Outcome(NamedTuple):
    """The answer of a rank to a call."""

    result: Any
    """Value returned by the function; None after an error."""
    error: str | None
    """Traceback or reason if the call failed; otherwise None."""
    num_groups: int = 0
    """Number of process groups on the rank after the call. 0 if the function has destroyed the default group,
    or if the rank died."""
    error_type: str | None = None
    """Name of the type of the error that the function raised, if any; "RuntimeError" for its subclasses."""


# Modules imported once, before ranks fork. torch._dynamo is listed because an optimizer's first step imports
# it, which takes nearly a second.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "meshrec.distributed.sharded_tables",
    "meshrec.checkpoint",
)
# Process groups per rank above which the pool starts new processes: every gloo group has a thread waking
# up 100 times a second. Destroying groups instead would not help, because torch's caches keep meshes alive.
_MAX_GROUPS = 12
# Waits until the pool's process has ended, and then resumes stopped ranks, so that they end, too.
_WATCHER = 'cat > /dev/null; kill -CONT "$@" 2> /dev/null'


class RankError(RuntimeError):
    """A function failed on at least one rank. The message has a traceback per failed rank."""


class RankPool:
    """Pool of single-threaded processes (ranks) in a gloo process group, on which to run functions.

    ``run(function, *args)`` calls a module-level function on every rank, and returns the results by rank.
    Ranks import the function by file and name, so tests can pass functions defined in a test file. Arguments
    and results are pickled. The pool starts new processes after functions have created many process groups or
    destroyed the default group, and after errors that may leave ranks out of step. Between calls all
    processes are stopped (SIGSTOP), with any threads that functions have started.

    Args:
        world_size: Number of ranks.
        timeout_seconds: Maximum wait in ``run`` for the next answer. Collectives time out after half this
            time, so ``run`` can raise their error.
        preload: Modules to import before ranks fork, in addition to ``PRELOADED``. Only the first pool in a
            process applies this argument.

    Example::

        >>> import torch.distributed as dist
        >>> with RankPool(2) as pool:  # doctest: +SKIP
        ...     pool.run(dist.get_rank)
        [0, 1]
    """

    def __init__(
        self, world_size: int, *, timeout_seconds: float = 60.0, preload: Sequence[str] = ()
    ) -> None:
        self.world_size = world_size
        self._timeout = timeout_seconds
        self._preload = [*PRELOADED, *preload]
        self._start()
        # At exit multiprocessing waits for processes that it has terminated: stopped ones would never end.
        util.Finalize(None, self._signal, (signal.SIGCONT,), exitpriority=0)

    def _start(self) -> None:
        """Start all processes. Does not wait until they have joined the process group."""
        # Holds the file in which the ranks meet. Removed by ``_kill``.
        self._folder = make_scratch("meshrec-pool")
        # The server process imports torch once, and ranks fork from it. It starts no threads, which would be
        # lost in a fork.
        context = get_context("forkserver")
        start_fork_server(self._preload)
        pairs = [context.Pipe() for _ in range(self.world_size)]
        # One pipe and process per rank, from ``_start`` until ``_kill``, which empties the lists.
        self._pipes: list[Connection] = [mine for mine, _ in pairs]
        store = str(self._folder / "store")
        self._processes = [
            context.Process(
                target=_serve, args=(theirs, rank, self.world_size, store, self._timeout), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        # Close the ranks' ends here, so a rank's death closes its pipe.
        for _, theirs in pairs:
            theirs.close()
        pids = [str(process.pid) for process in self._processes]
        # From ``_start`` until ``_kill``.
        self._watcher = subprocess.Popen(["sh", "-c", _WATCHER, "sh", *pids], stdin=subprocess.PIPE)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank, and return the results by rank.

        Args:
            function: Module-level function.
            args: Arguments, which are pickled.

        Raises:
            RankError: The function raised an error on a rank, or a rank died or timed out. Unless all ranks
                raised the same type of error, the next call starts new processes.
        """
        task = _Call(function.__module__, _file_of(function), function.__qualname__, args)
        if not self._processes:
            self._start()
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            pipe.send(task)
        outcomes: dict[int, _Outcome] = {}
        lost = False
        while len(outcomes) < self.world_size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in outcomes]
            # A closed pipe counts as ready, too, so a dead rank is noticed at once.
            ready = connection.wait(open_pipes, self._timeout)
            if not ready:
                lost = True
                missing = [rank for rank in range(self.world_size) if rank not in outcomes]
                outcomes |= {rank: _Outcome(None, "no answer in time") for rank in missing}
            for rank in [rank for rank, pipe in enumerate(self._pipes) if pipe in ready]:
                try:
                    outcomes[rank] = self._pipes[rank].recv()
                except EOFError:
                    lost = True
                    self._processes[rank].join(1.0)
                    code = self._processes[rank].exitcode
                    outcomes[rank] = _Outcome(None, f"the process ended with exit code {code}")
        groups = [outcome.num_groups for outcome in outcomes.values()]
        # After a timeout, a late answer could be mistaken for the next call's. After an error on some ranks,
        # or in a collective (a RuntimeError), collectives of the next call could fail.
        error_types = {outcome.error_type for outcome in outcomes.values()}
        is_out_of_step = len(error_types) > 1 or "RuntimeError" in error_types
        if lost or is_out_of_step or min(groups) == 0 or max(groups) > _MAX_GROUPS:
            self._kill()
        else:
            # Idle, a process with ten groups takes a hundredth of a core, and a test session has thirty.
            self._signal(signal.SIGSTOP)
        errors = [
            f"rank {rank}:\n{outcomes[rank].error}" for rank in sorted(outcomes) if outcomes[rank].error
        ]
        if errors:
            raise RankError("\n".join(errors))
        return [outcomes[rank].result for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop all processes. A later call to ``run`` would start new ones."""
        self._signal(signal.SIGCONT)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5.0)
        self._kill()

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to all processes that still run."""
        for process in self._processes:
            if process.is_alive():
                assert process.pid is not None
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def _kill(self) -> None:
        """Kill all processes that still run, and remove the folder with the FileStore that they shared."""
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        if self._processes:
            self._watcher.communicate()
        self._processes, self._pipes = [], []
        remove_scratch(self._folder)

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_of(function: Callable[..., Any]) -> str:
    """Return the path of the file that defines a function. Ranks import this file to call the function."""
    # For functions defined in a notebook cell, inspect returns a file that does not exist.
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main if function.__module__ == "__main__" and main else inspect.getfile(function)


def _serve(pipe: Connection, rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    """Main function of a rank: run the calls arriving in a pipe, until it is closed or sends None."""
    import torch
    import torch.distributed as dist

    # Collections skip the million objects of the forkserver, and copy none of their pages.
    gc.freeze()
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(  # type: ignore[attr-defined]
            store, world_size
        ),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_seconds / 2),
    )
    modules: dict[str, ModuleType] = {}
    with contextlib.suppress(EOFError):
        while (task := pipe.recv()) is not None:
            try:
                result = getattr(_module(task, modules), task.name)(*task.args)
                error, error_type = None, None
            except BaseException as raised:  # DCP's CheckpointException is not an Exception
                kind = RuntimeError if isinstance(raised, RuntimeError) else type(raised)
                result, error, error_type = None, traceback.format_exc(), kind.__name__
            pipe.send(_Outcome(result, error, len(dist.distributed_c10d._world.pg_map), error_type))
    if dist.is_initialized():
        dist.destroy_process_group()


def _module(task: _Call, modules: dict[str, ModuleType]) -> ModuleType:
    """Import the module that defines a called function.

    A module whose name leads to the right file is imported by name. Results can be pickled only if their
    class is in an importable module. Otherwise the file is loaded directly.
    """
    if task.file not in modules:
        modules[task.file] = _imported(task) or _from_file(task.file)
    return modules[task.file]


def _imported(task: _Call) -> ModuleType | None:
    """Return the module that defines a called function if it is loaded or importable by name, else None."""
    # A test file may be loaded under another name than in a new process.
    loaded = [m for m in sys.modules.values() if getattr(m, "__file__", None) == task.file]
    if loaded:
        return loaded[0]
    try:
        spec = importlib.util.find_spec(task.module)
    except (ImportError, ValueError):
        return None
    is_same_file = spec is not None and spec.origin == task.file
    return importlib.import_module(task.module) if is_same_file else None


def _from_file(file: str) -> ModuleType:
    """Load a file as a module, under a name derived from the file name."""
    spec = importlib.util.spec_from_file_location(f"rank_pool_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
