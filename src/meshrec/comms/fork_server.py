"""Python's fork server, which imports torch once for all processes that a program starts."""

import atexit
import os
import signal
from collections.abc import Sequence
from functools import cache
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

from meshrec.durable import make_scratch, remove_scratch

SIGNALS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""Signals that end a process, and that terminals and other launchers send to all processes of a command."""


def start_fork_server(preload: Sequence[str]) -> None:
    """Start the fork server of :mod:`multiprocessing`, unless it is running.

    The working directory of this process changes for a moment, also for its other threads.

    Args:
        preload: modules which the server imports before it forks; those that fail to import are ignored. They
            must not start threads, whose locks could be held in a fork.
    """
    forkserver.set_forkserver_preload(["meshrec.comms.forked_signals", *preload])
    # The server starts with `python -c`, which imports from its current folder: here, one that stays empty.
    # O_PATH (Linux) needs no permission to read the folder.
    before = os.open(os.curdir, getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY)
    os.chdir(_empty_folder(os.getpid()))
    try:
        # Otherwise the server's start would start it, and unblock signals.
        resource_tracker.ensure_running()
        # Processes inherit the mask. The server must outlive a signal to all processes of a command, because
        # it reports the exit codes of its forks. It ends when this process and all forks have ended.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    finally:
        os.fchdir(before)
        os.close(before)


@cache
def _empty_folder(process: int) -> Path:
    """Return a folder that exists until this process ends."""
    folder = make_scratch("meshrec-empty")
    atexit.register(remove_scratch, folder)
    return folder
