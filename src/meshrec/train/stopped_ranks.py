"""Detection of ranks on this machine that are stopped, for example by SIGSTOP."""

import os
import time
from pathlib import Path

from meshrec.comms.joining import STORE_VARIABLE

_PROC = Path("/proc")


class StoppedRanks:
    """A watch over the ranks that this process has started.

    Waiting ranks notice a stopped one only in a collective, and for hours there may be none, while they load
    data or plan. The system knows at any time. On systems without ``/proc``, no stopped rank is found.

    Args:
        timeout: seconds for which a rank may be stopped.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._seconds: dict[tuple[int, int], float] = {}
        self._polled = time.monotonic()
        self._longest = max(1.0, timeout / 10)

    def poll(self) -> list[tuple[int, int]]:
        """Return (process, rank) of each rank that has been stopped for longer than the timeout."""
        # If this process was stopped itself, as Ctrl-Z stops all together, that time does not count.
        passed = min(time.monotonic() - self._polled, self._longest)
        self._polled = time.monotonic()
        before = self._seconds
        self._seconds = {each: before.get(each, -passed) + passed for each in _stopped_children()}
        return [each for each, seconds in self._seconds.items() if seconds > self._timeout]


def _stopped_children() -> list[tuple[int, int]]:
    """Return (process, rank) of our child processes that are stopped ranks of this launch."""
    found = []
    for path in _PROC.glob("self/task/*/children"):
        for word in _read(path).split():
            state = _read(_PROC / word / "stat").rpartition(")")[2].split()[:1]
            if state == ["T"]:  # a debugger's is "t"
                rank = _rank_of(_read(_PROC / word / "environ"))
                if rank is not None:
                    found.append((int(word), rank))
    return found


def _rank_of(environment: str) -> int | None:
    """Return the rank of a process by its environment; None if it is not a rank of this launch."""
    values = dict(each.partition("=")[::2] for each in environment.split("\0"))
    if STORE_VARIABLE not in values or values[STORE_VARIABLE] != os.environ.get(STORE_VARIABLE):
        return None
    return int(values["RANK"]) if "RANK" in values else None


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has just ended
        return ""
