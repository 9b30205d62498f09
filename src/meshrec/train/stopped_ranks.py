"""Detect ranks on this machine that are stopped, for example by SIGSTOP."""

import os
import time
from pathlib import Path

from meshrec.comms.joining import STORE_VARIABLE

_PROC = Path("/proc")


class StoppedRanks:
    """Watches the rank processes started by this process, and finds those that are stopped for too long.

    Other ranks notice a stopped rank only in a collective, by a timeout. While they load data or plan, there
    may be no collective for hours, but ``/proc`` always shows the process state. Without ``/proc``, nothing
    is detected.

    Args:
        timeout: seconds for which a rank may be stopped.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # For how long a rank has been stopped, in seconds, by (process, rank). Running ranks are missing.
        self._seconds: dict[tuple[int, int], float] = {}
        self._polled = time.monotonic()
        # Maximum time that counts between two polls, in case this process itself was stopped meanwhile.
        self._longest = max(1.0, timeout / 10)

    def poll(self) -> list[tuple[int, int]]:
        """Return (process ID, rank) for every rank that has been stopped for longer than the timeout."""
        # Ctrl-Z stops this process together with the ranks. This time must not count.
        passed = min(time.monotonic() - self._polled, self._longest)
        self._polled = time.monotonic()
        before = self._seconds
        # A rank seen for the first time starts at 0, because it may have been stopped only just now.
        self._seconds = {child: before.get(child, -passed) + passed for child in _stopped_children()}
        return [child for child, seconds in self._seconds.items() if seconds > self._timeout]


def _stopped_children() -> list[tuple[int, int]]:
    """Return (process ID, rank) for every stopped child process that is a rank in this launch."""
    children = []
    for path in _PROC.glob("self/task/*/children"):
        for word in _read_text(path).split():
            state = _read_text(_PROC / word / "stat").rpartition(")")[2].split()[:1]
            if state == ["T"]:  # a process stopped by a debugger has "t"
                rank = _rank_of(_read_text(_PROC / word / "environ"))
                if rank is not None:
                    children.append((int(word), rank))
    return children


def _rank_of(environment: str) -> int | None:
    """Return a process's rank, or None if the process is not a rank in this launch.

    Args:
        environment: content of ``/proc/PID/environ``.
    """
    values = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    # The store path is unique to a launch, so it identifies the ranks in this launch.
    if STORE_VARIABLE not in values or values[STORE_VARIABLE] != os.environ.get(STORE_VARIABLE):
        return None
    return int(values["RANK"]) if "RANK" in values else None


def _read_text(path: Path) -> str:
    """Return the content of a file in ``/proc``, or an empty string if the process has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has just ended
        return ""
