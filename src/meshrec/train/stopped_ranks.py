"""Detection of stopped ranks on this machine, for example after SIGSTOP."""

import os
import time
from pathlib import Path

from meshrec.comms.joining import STORE_VARIABLE

_PROC = Path("/proc")


class StoppedRanks:
    """Watches the rank processes started by this process.

    Waiting ranks notice a stopped rank only in a collective. While they load data or plan, there may be none
    for hours, but ``/proc`` always shows the process state. Without ``/proc``, nothing is detected.

    Args:
        timeout: seconds for which a rank may be stopped.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # Seconds stopped so far, by (process, rank).
        self._seconds: dict[tuple[int, int], float] = {}
        self._polled = time.monotonic()
        # Maximum time per poll that counts, in case this process itself was stopped.
        self._longest = max(1.0, timeout / 10)

    def poll(self) -> list[tuple[int, int]]:
        """Return (process, rank) for ranks stopped longer than the timeout."""
        # Ctrl-Z stops this process along with the ranks; that time must not count.
        passed = min(time.monotonic() - self._polled, self._longest)
        self._polled = time.monotonic()
        before = self._seconds
        self._seconds = {child: before.get(child, -passed) + passed for child in _stopped_children()}
        return [child for child, seconds in self._seconds.items() if seconds > self._timeout]


def _stopped_children() -> list[tuple[int, int]]:
    """Return (process, rank) for stopped child processes that are ranks in this launch."""
    children = []
    for path in _PROC.glob("self/task/*/children"):
        for word in _read_text(path).split():
            state = _read_text(_PROC / word / "stat").rpartition(")")[2].split()[:1]
            if state == ["T"]:  # a debugger's is "t"
                rank = _rank_of(_read_text(_PROC / word / "environ"))
                if rank is not None:
                    children.append((int(word), rank))
    return children


def _rank_of(environment: str) -> int | None:
    """Return a process's rank from the environment; None if it is not a rank in this launch."""
    values = dict(entry.partition("=")[::2] for entry in environment.split("\0"))
    # The store path is unique to a launch, so it tells this launch's ranks from another's.
    if STORE_VARIABLE not in values or values[STORE_VARIABLE] != os.environ.get(STORE_VARIABLE):
        return None
    return int(values["RANK"]) if "RANK" in values else None


def _read_text(path: Path) -> str:
    """Return a file's text; empty if the process it belongs to has ended."""
    try:
        return path.read_text(errors="replace")
    except OSError:  # it has just ended
        return ""
