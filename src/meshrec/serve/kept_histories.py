"""Keys and values of users' histories that are kept between requests, within a limit of bytes."""

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from meshrec.data.samples import Ints

_OVERHEAD = 1024
"""Bytes that an entry takes beside its arrays."""


class _KeptHistory(NamedTuple):
    version: str
    history: tuple[Ints, ...]
    rows: Tensor

    @property
    def num_bytes(self) -> int:
        arrays = sum(each.nbytes for each in self.history)
        return _OVERHEAD + arrays + self.rows.numel() * self.rows.element_size()


class KeptHistories:
    """Keys and values of the tokens of users' histories, by user; the least recently used leave first.

    Safe to call from several threads.

    Args:
        max_bytes: the limit of what all entries take together. A larger history is not kept at all.

    Raises:
        ValueError: the limit is negative.
    """

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes is {max_bytes}; it must be 0, which keeps nothing, or more.")
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[Hashable, _KeptHistory] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """The bytes that are kept."""
        return self._num_bytes

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, user: Hashable, history: Sequence[Ints], version: str) -> Tensor | None:
        """Return the rows that were kept for a history or for its beginning; None if there are none.

        A history of other items or times than before, or weights of another version, drop what was kept.

        Args:
            user: the key of the user.
            history: what the rows depend on: the arrays of items, times, ... of the whole history.
            version: the version of the weights.
        """
        with self._lock:
            entry = self._entries.get(user)
            if entry is None:
                return None
            begins = len(entry.history) == len(history) and all(
                np.array_equal(now[: len(then)], then)
                for now, then in zip(history, entry.history, strict=True)
            )
            if entry.version != version or not begins:
                self._drop(user)
                return None
            self._entries.move_to_end(user)
            return entry.rows

    def keep(self, user: Hashable, history: Sequence[Ints], version: str, rows: Tensor) -> None:
        """Keep the rows of a history instead of what was kept of the user."""
        entry = _KeptHistory(version, tuple(each.copy() for each in history), rows.clone())
        with self._lock:
            self._drop(user)
            if entry.num_bytes > self._max_bytes:
                return
            self._entries[user] = entry
            self._num_bytes += entry.num_bytes
            while self._num_bytes > self._max_bytes:
                self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Remove everything, as where a model is loaded again."""
        with self._lock:
            self._entries.clear()
            self._num_bytes = 0

    def _drop(self, user: Hashable) -> None:
        entry = self._entries.pop(user, None)
        self._num_bytes -= 0 if entry is None else entry.num_bytes
