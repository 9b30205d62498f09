"""Time this process spent blocked in collectives, to find the slowest rank."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BlockedTime:
    """Seconds blocked in collectives since process start.

    On a GPU, collectives block the device and not the process, so they do not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


blocked_time = BlockedTime()
"""Singleton: ranks are processes. Waits in the forward pass add to it directly, because ``blocked`` costs two
Python calls.
"""


def blocked_seconds() -> float:
    """Return the seconds this process has been blocked in collectives."""
    return blocked_time.seconds


@contextmanager
def blocked() -> Iterator[None]:
    """Count the time inside as blocked in a collective."""
    began = time.perf_counter()
    try:
        yield
    finally:
        blocked_time.seconds += time.perf_counter() - began
