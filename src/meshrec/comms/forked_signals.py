"""Imported by the fork server alone: its forks receive the signals that the server blocks."""

import os
import signal

from meshrec.comms.fork_server import SIGNALS

os.register_at_fork(after_in_child=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS))
