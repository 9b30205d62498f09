"""Imported by the fork server alone: its forks receive the signals that the server blocks."""

import os
import signal

from meshrec.comms.fork_server import SIGNALS

_SERVER = os.getpid()


def _unblock() -> None:
    """Unblock the signals in a fork of the server, but not in later forks, which may block some."""
    if os.getppid() == _SERVER:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


os.register_at_fork(after_in_child=_unblock)
