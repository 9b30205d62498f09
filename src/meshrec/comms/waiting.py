"""The seconds that this process has been blocked in collectives, to find the rank that others wait for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class _Blocked:
    """The sum since the process began. One per process: ranks are processes."""

    def __init__(self) -> None:
        self.seconds = 0.0


_blocked = _Blocked()


def blocked_seconds() -> float:
    """Return the seconds for which collectives have blocked this process so far.

    On a GPU they block the device and not the process, so that they do not count.
    """
    return _blocked.seconds


@contextmanager
def blocked() -> Iterator[None]:
    """Count the time inside as time that a collective blocks this process."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _blocked.seconds += time.perf_counter() - began
