"""Reading ahead from an iterator in a background thread."""

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterable, Iterator
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class _Error(NamedTuple):
    """Queue entry after an error: the consumer raises it."""

    error: BaseException


class _End:
    """Queue entry after the last item."""


class Prefetch(Generic[T]):
    """Iterator and context manager that reads ahead in a background thread; see `prefetch`."""

    def __init__(self, iterable: Iterable[T], depth: int) -> None:
        # Items read ahead. The thread fills the queue, and waits while it is full.
        self._queue: queue.Queue[T | _Error | _End] = queue.Queue(depth)
        # Set once, by `close` or the finalizer: the thread ends, and iteration stops.
        self._stop = threading.Event()
        # The thread references the queue, not this object, so garbage collection of the iterator stops the
        # thread.
        self._finalizer = weakref.finalize(self, _shut, self._queue, self._stop)
        # A daemon, so an abandoned iterator does not keep the process alive.
        self._thread = threading.Thread(
            target=_fill, args=(iter(iterable), self._queue, self._stop), name="meshrec-prefetch", daemon=True
        )
        self._thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        # Closed: no thread fills the queue any more.
        if self._stop.is_set():
            raise StopIteration
        item = self._queue.get()
        if isinstance(item, _End):
            self.close()
            raise StopIteration
        if isinstance(item, _Error):
            self.close()
            raise item.error
        return item

    def close(self) -> None:
        """Stop the thread, wait for it, and close the underlying iterator."""
        self._finalizer()
        # A thread cannot join itself.
        if self._thread is not threading.current_thread():
            self._thread.join()

    def __enter__(self) -> "Prefetch[T]":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prefetch(iterable: Iterable[T], depth: int = 2) -> Prefetch[T]:
    """Iterate over ``iterable`` in a background thread that reads up to ``depth`` items ahead.

    An error in the iterable is raised in the consumer, after the items before it. At the end, a generator is
    closed in the background thread.

    Args:
        iterable: what to read. Only the background thread iterates over it.
        depth: maximum items that wait for the consumer.

    Raises:
        ValueError: ``depth`` is below 1.

    Example::

        with prefetch(range(3)) as items:
            assert list(items) == [0, 1, 2]
    """
    if depth < 1:
        raise ValueError(f"depth must be >= 1, got {depth}. Without reading ahead, use the iterator itself.")
    return Prefetch(iterable, depth)


def _fill(iterator: Iterator[T], items: "queue.Queue[T | _Error | _End]", stop: threading.Event) -> None:
    """Run the background thread: put items into the queue until the iterator ends or ``stop`` is set."""
    last: _Error | _End = _End()
    try:
        try:
            for item in iterator:
                # This cannot block forever: `_shut` empties the queue after it sets ``stop``.
                items.put(item)
                if stop.is_set():
                    break
        finally:
            close = getattr(iterator, "close", None)
            if close is not None:
                close()
    except BaseException as error:  # including KeyboardInterrupt: the consumer decides
        last = _Error(error)
    if not stop.is_set():
        items.put(last)


def _shut(items: "queue.Queue[T | _Error | _End]", stop: threading.Event) -> None:
    """Make the background thread stop."""
    stop.set()
    with contextlib.suppress(queue.Empty):  # unblock a pending put; the thread then sees stop
        while True:
            items.get_nowait()
