"""Processes of the ranks on this machine, forked from a process that has imported torch.

To import torch and meshrec takes seconds of processor time. Python's fork server does it once, however many
ranks start, and when they restart. The server has a single thread, so that no lock is held in a fork.
"""

import contextlib
import importlib
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from multiprocessing import connection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from meshrec.comms.fork_server import start_fork_server
from meshrec.interpreter import START_PATH

# Only on Linux are processes safe to fork after they have loaded a system library for linear algebra.
_CONTEXT: Any = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
# Modules that ranks import, whatever their command. An optimizer's first step imports torch._dynamo.
_PRELOADED = ("torch._dynamo", "meshrec.runs.worker", "meshrec.cli.train", "meshrec.cli.screen")


class RankProcesses:
    """One process per rank, each running ``meshrec ARGUMENTS`` in a new session (setsid(2)).

    Args:
        arguments: command line arguments of every rank.
        environment: environment variables of every rank, without those that differ between ranks.
        num_ranks: number of ranks.

    Attributes:
        num_ranks: number of ranks.
        started: time just before the start of the first rank, in seconds since 1970.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], num_ranks: int) -> None:
        self.num_ranks, self.started = num_ranks, time.time()
        if _CONTEXT.get_start_method() == "forkserver":
            start_fork_server(_PRELOADED)
        # A server that was started earlier has other streams, so the ranks get those of this process.
        with _duplicate(1) as output, _duplicate(2) as errors:
            self._processes = [
                _CONTEXT.Process(
                    target=_run_rank,
                    args=(
                        list(arguments),
                        {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                        os.getcwd(),
                        START_PATH,
                        (output, errors),
                    ),
                )
                for rank in range(num_ranks)
            ]
            for process in self._processes:
                process.start()

    def running(self) -> dict[int, int]:
        """Return the process IDs of all ranks that have not ended, by rank."""
        return {
            rank: process.pid
            for rank, process in enumerate(self._processes)
            if process.exitcode is None and process.pid is not None
        }

    def failures(self) -> dict[int, int]:
        """Return the exit codes of all ranks that have failed, by rank. After signal n, the code is -n."""
        return {rank: process.exitcode for rank, process in enumerate(self._processes) if process.exitcode}

    def wait(self, seconds: float) -> None:
        """Wait until a rank ends, but at most for some seconds."""
        connection.wait([self._processes[rank].sentinel for rank in self.running()], seconds)

    def send(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to ranks and the processes that they have started.

        Args:
            number: signal number.
            ranks: receivers that have not ended; None: all of them.
        """
        for rank, pid in self.running().items():
            if ranks is None or rank in ranks:
                try:
                    os.killpg(pid, number)
                except ProcessLookupError:
                    # The rank has ended just now, or has been forked just now, and has no session yet.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)


def _duplicate(descriptor: int) -> Connection:
    """Return a copy of a descriptor that can be sent to a rank; of the null device if it is closed."""
    try:
        copy = os.dup(descriptor)
    except OSError:
        copy = os.open(os.devnull, os.O_WRONLY)
    return Connection(copy, readable=False)


def _run_rank(
    arguments: list[str],
    environment: dict[str, str],
    folder: str,
    path: list[str],
    streams: tuple[Connection, Connection],
) -> None:
    """Turn this process into a rank, which runs ``meshrec ARGUMENTS`` and ends.

    Args:
        path: value for ``sys.path``, without the folder of a recipe, which the rank adds itself.
    """
    os.setsid()  # signals of a terminal reach the ranks through the launcher
    with contextlib.suppress(OSError):  # the name that ps and top show; only Linux has the file
        Path("/proc/self/comm").write_text(f"meshrec rank {environment['RANK']}")
    for descriptor, stream in enumerate(streams, start=1):
        os.dup2(stream.fileno(), descriptor)
        stream.close()
    # The buffering was chosen for the streams of the server.
    for text in filter(None, (sys.stdout, sys.stderr)):
        text.reconfigure(line_buffering=os.isatty(text.fileno()))
    os.chdir(folder)
    # The server has the variables of the time at which it was started.
    os.environ.clear()
    os.environ.update(environment)
    # Values which the server has taken from its own variables.
    tempfile.tempdir = None
    threads = environment["OMP_NUM_THREADS"].partition(",")[0]
    if threads.isdecimal() and int(threads) > 0:  # OpenMP ignores other values as well
        torch.set_num_threads(int(threads))
    sys.path[:] = path
    sys.argv = ["meshrec", *arguments]
    # Until a rank handles signals itself, Ctrl-C ends it without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    importlib.import_module("meshrec.__main__").command()
