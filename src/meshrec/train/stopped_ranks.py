"""Detect ranks on this machine that are stopped, for example by SIGSTOP."""

import time
from collections.abc import Mapping
from pathlib import Path

# Exists only on Linux.
_PROC = Path("/proc")


class StoppedRanks:
    """Detector of ranks that are stopped for too long.

    Other ranks notice a stopped rank only in a collective, by a timeout. While they load data or plan, there
    may be no collective for hours, but ``/proc`` always shows the process state. Without ``/proc``, nothing
    is detected.

    Args:
        timeout: seconds for which a rank may be stopped.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # For how long a rank has been stopped, in seconds, by rank. Running ranks are missing.
        self._seconds: dict[int, float] = {}
        self._polled = time.monotonic()
        # Maximum time that counts between two polls, in case this process itself was stopped meanwhile.
        self._longest = max(1.0, timeout / 10)

    def poll(self, processes: Mapping[int, int]) -> list[int]:
        """Return the ranks that have been stopped for longer than the timeout."""
        # Ctrl-Z stops this process together with the ranks. This time must not count.
        passed = min(time.monotonic() - self._polled, self._longest)
        self._polled = time.monotonic()
        before = self._seconds
        # A rank seen for the first time starts at 0, because it may have been stopped only just now.
        self._seconds = {
            rank: before.get(rank, -passed) + passed
            for rank, process in processes.items()
            if _is_stopped(process)
        }
        return [rank for rank, seconds in self._seconds.items() if seconds > self._timeout]


def _is_stopped(process: int) -> bool:
    """Return whether a process is stopped by a signal."""
    try:
        status = (_PROC / str(process) / "stat").read_text(errors="replace")
    except OSError:  # the process has just ended
        return False
    # After the name in parentheses comes the state. A process stopped by a debugger has "t".
    return status.rpartition(")")[2].split()[:1] == ["T"]
