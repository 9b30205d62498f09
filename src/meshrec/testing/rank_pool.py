"""A pool of real ranks in one process group that stays alive between calls.

Starting a process that imports torch takes seconds; a pool pays that once for many tests.
"""

import contextlib
import importlib
import importlib.util
import inspect
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple


class _Call(NamedTuple):
    module: str
    file: str
    name: str
    args: tuple[Any, ...]


class _Outcome(NamedTuple):
    result: Any
    error: str | None
    num_groups: int = 0


# What ranks find loaded already. torch loads its compiler at an optimizer's first step: most of a second.
PRELOADED = (
    "torch",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "meshrec.distributed.sharded_tables",
    "meshrec.checkpoint",
)
# Each gloo group has a thread that wakes 100 times a second: processes with more groups than this make room
# for new ones. Destroying groups would not do, as torch's caches hold on to meshes.
_MOST_GROUPS = 12


class RankError(RuntimeError):
    """Error on some rank. The message holds the traceback of every rank that failed."""


class RankPool:
    """``world_size`` processes in one gloo process group, with one thread each.

    ``run(function, *args)`` calls a module-level function on every rank and returns the results by rank.
    Ranks find the function by its file and name, so tests can pass their own functions. Arguments and results
    are pickled. The pool starts new processes when functions have made many process groups or destroyed the
    default one.

    Args:
        world_size: number of processes.
        timeout_seconds: how long ``run`` waits for an answer. Collectives time out after half of it.
        preload: further modules to import before ranks fork. Only the first pool of a process applies it.
    """

    def __init__(
        self, world_size: int, *, timeout_seconds: float = 60.0, preload: Sequence[str] = ()
    ) -> None:
        self.world_size = world_size
        self._timeout = timeout_seconds
        self._preload = [*PRELOADED, *preload]
        self._start()

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # The server imports torch once; ranks fork from it before any thread exists.
        context = get_context("forkserver")
        context.set_forkserver_preload(self._preload)
        pairs = [context.Pipe() for _ in range(self.world_size)]
        self._pipes: list[Connection] = [mine for mine, _ in pairs]
        store = str(Path(self._folder.name) / "store")
        self._processes = [
            context.Process(
                target=_serve, args=(theirs, rank, self.world_size, store, self._timeout), daemon=True
            )
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self._processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results by rank.

        Raises:
            RankError: a rank raised, died, or did not answer in time. After a death or a timeout the next
                call starts new processes, because a late answer would be taken for that of the next call.
        """
        task = _Call(function.__module__, _file_of(function), function.__qualname__, args)
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(task)
        outcomes: dict[int, _Outcome] = {}
        lost = False
        while len(outcomes) < self.world_size:
            open_pipes = [pipe for rank, pipe in enumerate(self._pipes) if rank not in outcomes]
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
        if lost or min(groups) == 0 or max(groups) > _MOST_GROUPS:
            self._kill()
        errors = [
            f"rank {rank}:\n{outcomes[rank].error}" for rank in sorted(outcomes) if outcomes[rank].error
        ]
        if errors:
            raise RankError("\n".join(errors))
        return [outcomes[rank].result for rank in range(self.world_size)]

    def close(self) -> None:
        """Stop all processes."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(None)
        for process in self._processes:
            process.join(5.0)
        self._kill()

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join()
        for pipe in self._pipes:
            pipe.close()
        self._processes, self._pipes = [], []
        self._folder.cleanup()

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _file_of(function: Callable[..., Any]) -> str:
    """Return the file in which ranks find a function. A notebook's cells have files that are not there."""
    main = getattr(sys.modules["__main__"], "__file__", None)
    return main if function.__module__ == "__main__" and main else inspect.getfile(function)


def _serve(pipe: Connection, rank: int, world_size: int, store: str, timeout_seconds: float) -> None:
    import torch
    import torch.distributed as dist

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
                result, error = getattr(_module(task, modules), task.name)(*task.args), None
            except BaseException:  # checkpoint errors are no Exceptions
                result, error = None, traceback.format_exc()
            pipe.send(_Outcome(result, error, len(dist.distributed_c10d._world.pg_map)))
    if dist.is_initialized():
        dist.destroy_process_group()


def _module(task: _Call, modules: dict[str, ModuleType]) -> ModuleType:
    """Load the module of a task, by name if the name leads to the task's file, else from the file.

    Results can only be pickled back if their class has an importable module.
    """
    if task.file not in modules:
        modules[task.file] = _imported(task) or _from_file(task.file)
    return modules[task.file]


def _imported(task: _Call) -> ModuleType | None:
    loaded = [m for m in sys.modules.values() if getattr(m, "__file__", None) == task.file]
    if loaded:
        return loaded[0]
    try:
        spec = importlib.util.find_spec(task.module)
    except (ImportError, ValueError):
        return None
    found = spec is not None and spec.origin == task.file
    return importlib.import_module(task.module) if found else None


def _from_file(file: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"rank_pool_{Path(file).stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
