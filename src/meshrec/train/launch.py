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
"""Seconds to wait for a rank without an answer."""
# Seconds that ranks have to end after a signal, for example to write a last checkpoint.
_SHUTDOWN_SECONDS = 120
# Seconds that the other ranks have to end by themselves once a rank has failed.
_GRACE_SECONDS = 10.0
# Interval at which a thread looks for failed and stopped ranks.
_POLL_SECONDS = 0.2
# Program of a rank. Until a rank handles signals itself, Ctrl-C ends it without a traceback.
_RANK_PROGRAM = (
    "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "from meshrec.__main__ import command; command()"
)


class LaunchResult(NamedTuple):
    """Result of a launch.

    Attributes:
        code: exit code for the launcher. It is 0 after success, 1 after a failure, and 128 + n if signal n
            stopped the launcher.
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
    """Start a process per rank, which runs ``meshrec ARGUMENTS``, and wait until all processes have ended.

    Ctrl-C and SIGTERM are passed on to the ranks, which stop at the next training step. Ranks share this
    machine's cores evenly unless OMP_NUM_THREADS is set. After a failure, ranks that do not end by themselves
    are killed, because a hanging process would keep the launcher waiting.

    Args:
        arguments: command line arguments of every rank.
        num_ranks: number of ranks.
        folder: run folder, in which ranks write errors, logs and process IDs.
        max_restarts: number of times that all ranks are restarted after a failure.
        environment: additional environment variables for the ranks.
        rank_timeout: seconds after which a rank stopped by SIGSTOP is killed.
    """
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    # The launcher reports the first error itself; torch's own messages would repeat it with tracebacks.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # Without this limit, every rank would start as many threads as there are cores.
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    # The launcher's children inherit os.environ, so it is changed here and restored below.
    before = dict(os.environ)
    # Ranks killed by the watch thread. Read only after that thread has ended.
    unresponsive_ranks: set[int] = set()
    # Only this user may enter the folder. See [Note: who can reach the ranks of a run] in comms/joining.py.
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
            with _killing_stragglers(folder, num_ranks, rank_timeout, unresponsive_ranks):
                elastic_launch(config, sys.executable)(*interpreter_arguments(_RANK_PROGRAM), *arguments)
        except ChildFailedError as failed:
            return LaunchResult(1, first_error(folder, num_ranks, signals_of(failed), unresponsive_ranks))
        except SignalException as stopped:
            return LaunchResult(128 + int(stopped.sigval), None)
        finally:
            # Also removes variables that the launcher or torch has added.
            os.environ.clear()
            os.environ.update(before)
    return LaunchResult(0, None)


def _config(num_ranks: int, max_restarts: int, scratch: Path) -> Any:
    """Return torch's ``LaunchConfig`` for ranks on this machine.

    Args:
        num_ranks: number of ranks.
        max_restarts: number of restarts after a failure.
        scratch: folder for torch's logs.
    """
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
    """Return the number of the signal that killed a rank, by rank.

    Ranks which failed without a signal are not included.

    Args:
        failed: torch's ``ChildFailedError``.
    """
    return {rank: -failure.exitcode for rank, failure in failed.failures.items() if failure.exitcode < 0}


@contextmanager
def _killing_stragglers(
    folder: RunFolder, num_ranks: int, rank_timeout: float, unresponsive_ranks: set[int]
) -> Iterator[None]:
    """Context manager with a thread that watches the ranks, and kills unresponsive ranks.

    A rank is killed if it still runs `_GRACE_SECONDS` after another rank has failed, or if it is stopped
    (SIGSTOP) for longer than ``rank_timeout``.

    Args:
        folder: run folder with error files and process IDs.
        num_ranks: number of ranks.
        rank_timeout: seconds after which a stopped rank is killed.
        unresponsive_ranks: set to which the thread adds the killed ranks.
    """
    stop_event, stopped = threading.Event(), StoppedRanks(rank_timeout)

    def watch() -> None:
        """Kill unresponsive ranks, until ``stop_event`` is set."""
        while not stop_event.wait(_POLL_SECONDS):
            for rank in _stragglers(folder, num_ranks):
                # The file with the process ID may be missing or incomplete while a rank starts or ends.
                with contextlib.suppress(OSError, ValueError):
                    _kill(int(folder.process(rank).read_text()), rank)
                    folder.discard(folder.process(rank))
            # Ranks stopped by SIGSTOP never fail by themselves.
            for pid, rank in stopped.poll():
                with contextlib.suppress(OSError):
                    _kill(pid, rank)

    def _kill(pid: int, rank: int) -> None:
        """Kill a rank's process, and record the rank in ``unresponsive_ranks``."""
        os.kill(pid, signal.SIGKILL)
        unresponsive_ranks.add(rank)

    thread = threading.Thread(target=watch, name="stragglers", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop_event.set()
        thread.join()


def _stragglers(folder: RunFolder, num_ranks: int) -> list[int]:
    """Return the ranks that still run although another rank failed `_GRACE_SECONDS` ago or earlier.

    Ranks started after the failure, by a restart, are not returned.
    """
    # Infinity for a rank without an error file.
    failed_at = {rank: _modified_time(folder.error(rank)) for rank in range(num_ranks)}
    # If no rank has failed, this is infinity, and the difference below is negative.
    first = min(failed_at.values())
    if time.time() - first < _GRACE_SECONDS:
        return []
    # Ranks without an error file are still running, or have ended without an error.
    waiting = [rank for rank, at in failed_at.items() if at == math.inf]
    return [rank for rank in waiting if _modified_time(folder.process(rank)) < first]


def _modified_time(path: Path) -> float:
    """Return a file's modification time in seconds since 1970, or infinity if it does not exist."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def first_error(
    folder: RunFolder,
    num_ranks: int,
    signals: Mapping[int, int] | None = None,
    unresponsive_ranks: Sequence[int] | set[int] = (),
) -> str:
    """Return a message that explains why a launch failed, from the error files of the ranks.

    The earliest error is the cause. Errors about a lost connection to another rank are consequences, and are
    used only if nothing else explains the failure.

    Args:
        folder: run folder.
        num_ranks: number of ranks.
        signals: signals that killed ranks, by rank.
        unresponsive_ranks: ranks that the launcher killed because they no longer answered.
    """
    errors = []
    for rank in range(num_ranks):
        path = folder.error(rank)
        if path.is_file():
            errors.append((path.stat().st_mtime, rank, _error_in(path.read_text())))
    # The other ranks' errors follow from the first: their connections to the failed rank were closed.
    causes = [entry for entry in errors if not _is_lost_peer(entry[2])]
    if not causes and unresponsive_ranks:
        ranks = ", ".join(map(str, sorted(unresponsive_ranks)))
        logs = ", ".join(str(folder.log(rank)) for rank in sorted(unresponsive_ranks))
        return (
            f"rank {ranks} stopped answering. The others waited for it (--rank-timeout), then it was "
            f"killed. Its log is {logs}"
        )
    # After a failure, the launcher itself ends the other ranks by SIGTERM, so this signal is not a cause.
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
"""Error types whose message is enough for a user. For other errors, the message names the traceback file."""


def _signal_hint(number: int) -> str:
    """Return a probable reason for a signal, to append to a message; empty if no reason is known."""
    return ", as the system does when memory runs out" if number == signal.SIGKILL else ""


def _is_lost_peer(error: str) -> bool:
    """Return whether an error message only says that the connection to another rank was lost."""
    words = ("CollectiveError", "Connection closed by peer", "Timed out waiting", "Connection reset")
    return any(word in error for word in words)


def _error_in(text: str) -> str:
    """Return the error at the end of a traceback: all lines after the last stack frame."""
    lines = text.strip().splitlines()
    calls = [number for number, line in enumerate(lines) if line.startswith(("Traceback", "  File ", "    "))]
    if not calls or calls[-1] + 1 == len(lines):  # cut off, as on a full disk
        return "it failed, and its traceback could not be written: is the disk full?"
    return "\n".join(lines[calls[-1] + 1 :])
