"""The seconds that this process has been blocked in collectives, to find the rank that others wait for."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BlockedTime:
    """The seconds for which collectives have blocked this process since it began.

    On a GPU they block the device and not the process, so they do not count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0


blocked_time = BlockedTime()
"""One per process: ranks are processes. The waits of a forward pass add to it directly, because ``blocked``
costs two Python calls.
"""


def blocked_seconds() -> float:
    """Return the seconds for which collectives have blocked this process so far."""
    return blocked_time.seconds


@contextmanager
def blocked() -> Iterator[None]:
    """Count the time inside as time that a collective blocks this process."""
    began = time.perf_counter()
    try:
        yield
    finally:
        blocked_time.seconds += time.perf_counter() - began
