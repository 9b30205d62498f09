"""Start the ranks of a run on this machine, watch them, and start them again after a failure."""

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from meshrec.comms.fork_server import SIGNALS
from meshrec.comms.joining import RESTARTS_VARIABLE, STORE_VARIABLE
from meshrec.durable import scratch_folder
from meshrec.train.rank_processes import RankProcesses
from meshrec.train.run_folder import RunFolder
from meshrec.train.stopped_ranks import StoppedRanks

RANK_TIMEOUT = 120.0
"""Seconds to wait for a rank without an answer."""
# Seconds that ranks have to end after a signal, for example to write a last checkpoint.
_SHUTDOWN_SECONDS = 120.0
# Seconds that the other ranks have to end by themselves once a rank has failed.
_GRACE_SECONDS = 10.0
# Interval at which the launcher looks for failed and stopped ranks.
_POLL_SECONDS = 0.1


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
    # Without this limit, every rank would start as many threads as there are cores.
    threads = str(max(1, (os.cpu_count() or 1) // num_ranks))
    # Only this user may enter the folder. See [Note: who can reach the ranks of a run] in comms/joining.py.
    with scratch_folder("meshrec-ranks") as store, _received_signals() as signals:
        variables = {
            **os.environ,
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", threads),
            STORE_VARIABLE: str(store),
            "WORLD_SIZE": str(num_ranks),
            "LOCAL_WORLD_SIZE": str(num_ranks),
            # Expected of every launcher, and not used: the ranks meet in the folder.
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "0",
            **environment,
        }
        for restart in range(max_restarts + 1):
            ranks = RankProcesses(arguments, {**variables, RESTARTS_VARIABLE: str(restart)}, num_ranks)
            unresponsive_ranks = _wait(ranks, folder, rank_timeout, signals)
            if signals:
                return LaunchResult(128 + signals[0], None)
            if not ranks.failures():
                return LaunchResult(0, None)
        killed = {rank: -code for rank, code in ranks.failures().items() if code < 0}
        return LaunchResult(1, first_error(folder, num_ranks, killed, unresponsive_ranks))


@contextmanager
def _received_signals() -> Iterator[list[int]]:
    """Context manager that catches signals to this process, and gives the list of their numbers.

    Signals that this process ignores stay ignored, for example SIGHUP under ``nohup``. Outside the main
    thread, in which alone Python handles signals, no signal is caught.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    # Also keep handlers that a library has installed in C, because Python could not restore them.
    before = {number: handler for number, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, lambda number, _: received.append(number))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait(ranks: RankProcesses, folder: RunFolder, rank_timeout: float, signals: Sequence[int]) -> set[int]:
    """Pass on signals until all ranks have ended, and return the ranks that were killed for not answering.

    After a failure, the other ranks receive SIGTERM. Ranks are killed `_SHUTDOWN_SECONDS` after a signal;
    `_GRACE_SECONDS` after another rank has written an error, unless they have written one, too; and if they
    are stopped (SIGSTOP) for longer than ``rank_timeout``.

    Args:
        signals: list to which a signal handler appends the numbers of signals to this process.
    """
    unresponsive_ranks: set[int] = set()
    stopped = StoppedRanks(rank_timeout)
    # Signals passed on so far, and the time (of time.monotonic) at which all ranks are killed.
    num_sent, end = 0, math.inf
    while running := ranks.running():
        ranks.wait(_POLL_SECONDS)
        pending = signals[num_sent:]
        num_sent += len(pending)
        # Only after the first failure: from then on, `end` is finite.
        if ranks.failures() and end == math.inf:
            pending = [*pending, signal.SIGTERM]
        for number in pending:
            ranks.send(number)
            end = min(end, time.monotonic() + _SHUTDOWN_SECONDS)
        if time.monotonic() > end:
            ranks.send(signal.SIGKILL)
        late = {*stopped.poll(running), *_stragglers(folder, ranks.num_ranks, ranks.started)} & set(running)
        ranks.send(signal.SIGKILL, late)
        unresponsive_ranks |= late
    return unresponsive_ranks


def _stragglers(folder: RunFolder, num_ranks: int, started: float) -> list[int]:
    """Return the ranks without an error, if another rank failed at least `_GRACE_SECONDS` ago."""
    failed_at = {rank: _modified_time(folder.error(rank)) for rank in range(num_ranks)}
    failed_at = {rank: at for rank, at in failed_at.items() if started <= at < math.inf}
    if not failed_at or time.time() - min(failed_at.values()) < _GRACE_SECONDS:
        return []
    return [rank for rank in range(num_ranks) if rank not in failed_at]


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
    # The earliest error file: the first failure causes the others.
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
