"""A lock for objects that are copied and pickled."""

import threading
from typing import Any


class UpdateLock:
    """A lock whose copies are new locks: copies of a table have nothing to wait for in each other."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[Any, ...]:
        return UpdateLock, ()
