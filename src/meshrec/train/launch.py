"""Start the ranks of a run on this machine, through PyTorch's elastic launcher."""

import contextlib
import logging
import math
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from meshrec.comms.joining import STORE_VARIABLE
from meshrec.durable import scratch_folder
from meshrec.interpreter import interpreter_arguments
from meshrec.train.run_folder import RunFolder
from meshrec.train.stopped_ranks import StoppedRanks

RANK_TIMEOUT = 120.0
"""Seconds that ranks wait for a rank that does not answer."""
_SHUTDOWN_SECONDS = 120
# How long the other ranks have to end by themselves once one has failed.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.2
# Until a rank listens for signals itself, Ctrl-C ends it without a traceback.
_RANK_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from meshrec.__main__ import command; command()"
)


class LaunchResult(NamedTuple):
    """Result of a launch.

    Attributes:
        code: exit code; 128 + n if signal n stopped the launcher.
        error: error of the rank that failed first; None without a failure.
    """

    code: int
    error: str | None


def launch(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    folder: RunFolder,
    max_restarts: int,
    environment: Mapping[str, str],
    rank_timeout: float = RANK_TIMEOUT,
) -> LaunchResult:
    """Run ``meshrec ARGUMENTS`` in ``num_ranks`` processes, and wait for them.

    Ctrl-C and SIGTERM are passed on: the ranks stop at the next step. Ranks share this machine's cores unless
    OMP_NUM_THREADS is set. After a failure, ranks that do not end by themselves are killed, because a hanging
    process would block the others.

    Args:
        arguments: command line of the ranks.
        num_ranks: number of ranks.
        folder: run folder, which receives errors, logs and process IDs.
        max_restarts: restarts after a failure before giving up.
        environment: additional environment variables for the ranks.
        rank_timeout: seconds after which a stopped rank (SIGSTOP) is killed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Without this limit, every rank would start a thread per core.
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    # The launcher's children inherit os.environ, so it is changed here and restored below.
    before = dict(os.environ)
    # Filled by the watch thread, and read only after that thread has ended.
    silent: set[int] = set()
    # Only this user may enter the folder: see [Note: who can reach the ranks of a run].
    with scratch_folder("meshrec-ranks") as store:
        config = _config(num_ranks, max_restarts, store)
        os.environ.update(
            {
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
                STORE_VARIABLE: str(store),
                **environment,
            }
        )
        try:
            with _killing_stragglers(folder, num_ranks, rank_timeout, silent):
                elastic_launch(config, sys.executable)(*interpreter_arguments(_RANK_PROGRAM), *arguments)
        except ChildFailedError as failed:
            return LaunchResult(1, first_error(folder, num_ranks, signals_of(failed), silent))
        except SignalException as stopped:
            return LaunchResult(128 + int(stopped.sigval), None)
        finally:
            os.environ.clear()
            os.environ.update(before)
    return LaunchResult(0, None)


def _config(num_ranks: int, max_restarts: int, scratch: Path) -> Any:
    """Return torch's ``LaunchConfig`` for ranks on this machine."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from meshrec.train.rendezvous import BACKEND

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend=BACKEND,
        max_restarts=max_restarts,
        monitor_interval=0.1,
        # Without a folder, torch makes one among the temporary files, and leaves it there.
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch / "logs")),
    )
    if hasattr(config, "shutdown_timeout"):  # from torch 2.12 on; before, ranks get 30 seconds
        config.shutdown_timeout = _SHUTDOWN_SECONDS
    return config


def signals_of(failed: Any) -> dict[int, int]:
    """Return signal numbers by rank, for the ranks in a ``ChildFailedError`` that a signal killed."""
    return {rank: -failure.exitcode for rank, failure in failed.failures.items() if failure.exitcode < 0}


@contextmanager
def _killing_stragglers(
    folder: RunFolder, num_ranks: int, rank_timeout: float, silent: set[int]
) -> Iterator[None]:
    """Kill unresponsive ranks while in this context, and add them to ``silent``.

    Args:
        folder: run folder with errors and process IDs.
        num_ranks: number of ranks.
        rank_timeout: seconds after which a stopped rank is killed.
        silent: receives the killed ranks.
    """
    over, stopped = threading.Event(), StoppedRanks(rank_timeout)

    def watch() -> None:
        while not over.wait(_POLL_SECONDS):
            for rank in _stragglers(folder, num_ranks):
                # The process file may be missing or incomplete while a rank starts or ends.
                with contextlib.suppress(OSError, ValueError):
                    _kill(int(folder.process(rank).read_text()), rank)
                    folder.discard(folder.process(rank))
            for pid, rank in stopped.poll():
                with contextlib.suppress(OSError):
                    _kill(pid, rank)

    def _kill(pid: int, rank: int) -> None:
        silent.add(rank)
        os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=watch, name="stragglers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _stragglers(folder: RunFolder, num_ranks: int) -> list[int]:
    """Return ranks that still run `_GRACE_SECONDS` after another rank failed, except ranks started since."""
    failed_at = {rank: _modified_time(folder.error(rank)) for rank in range(num_ranks)}
    # Infinity if no rank has failed: the difference below is then negative.
    first = min(failed_at.values())
    if time.time() - first < _GRACE_SECONDS:
        return []
    waiting = [rank for rank, at in failed_at.items() if at == math.inf]
    return [rank for rank in waiting if _modified_time(folder.process(rank)) < first]


def _modified_time(path: Path) -> float:
    """Return a file's modification time; infinity if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def first_error(
    folder: RunFolder,
    num_ranks: int,
    signals: Mapping[int, int] | None = None,
    silent: Sequence[int] | set[int] = (),
) -> str:
    """Return the error that explains why a launch failed: the earliest one that is not a consequence.

    Errors about a lost connection to another rank are consequences, used only if there is no other error.

    Args:
        folder: run folder.
        num_ranks: number of ranks.
        signals: signals that killed ranks, by rank.
        silent: ranks killed because they no longer answered.
    """
    errors = []
    for rank in range(num_ranks):
        path = folder.error(rank)
        if path.is_file():
            errors.append((path.stat().st_mtime, rank, _error_in(path.read_text())))
    causes = [entry for entry in errors if not _is_lost_peer(entry[2])]
    if not causes and silent:
        ranks = ", ".join(map(str, sorted(silent)))
        logs = ", ".join(str(folder.log(rank)) for rank in sorted(silent))
        return (
            f"rank {ranks} stopped answering. The others waited for it (--rank-timeout), then it was "
            f"killed. Its log is {logs}"
        )
    # The launcher itself ends the other ranks with SIGTERM after a failure, so that signal explains nothing.
    killed = {rank: number for rank, number in (signals or {}).items() if number != signal.SIGTERM}
    if not causes and killed:
        rank, number = min(killed.items())
        return (
            f"rank {rank} was killed by signal {number} ({signal.Signals(number).name})"
            f"{_signal_hint(number)}. Its log is {folder.log(rank)}"
        )
    if not errors:
        return f"a rank ended without an error. Its log is one of {folder.path / 'log_rank*.txt'}"
    _, rank, error = min(causes or errors)
    name, _, message = error.partition(": ")
    if name.rpartition(".")[2] in MESSAGES:
        return message
    return f"rank {rank}: {error} (the traceback is in {folder.error(rank)})"


MESSAGES = (
    "ValueError",
    "DataError",
    "InputError",
    "LossError",
    "OutOfMemoryError",
    "CheckpointError",
    "DamagedCheckpointError",
)
"""Errors whose message is enough for users who do not know the code."""


def _signal_hint(number: int) -> str:
    """Return a probable reason for a signal; empty if there is none."""
    return ", as the system does when memory runs out" if number == signal.SIGKILL else ""


def _is_lost_peer(error: str) -> bool:
    """Return whether an error only says that another rank is gone."""
    words = ("CollectiveError", "Connection closed by peer", "Timed out waiting", "Connection reset")
    return any(word in error for word in words)


def _error_in(text: str) -> str:
    """Return the error at the end of a traceback: all lines after the last call."""
    lines = text.strip().splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith(("Traceback", "  File ", "    "))]
    if not calls or calls[-1] + 1 == len(lines):  # cut off, as on a full disk
        return "it failed, and its traceback could not be written: is the disk full?"
    return "\n".join(lines[calls[-1] + 1 :])
