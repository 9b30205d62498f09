"""The cache of a table's rows in memory, and the choice of rows to evict."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops import records
from meshrec.ops.index import HashIndex
from meshrec.ops.memory import empty_pages
from meshrec.tables.table import RowPart

_MOST_CHANCES = 3
_SERIAL_ELEMENTS = 1 << 15
"""The number of elements from which torch copies with several threads."""
_BYTES_PER_SLOT = 16 + 8 + 1 + 4 + 8 + 1
"""Bytes of a slot besides its row: the index, the key, and the notes of the clock."""


def slot_bytes(part_bytes: int) -> int:
    """Return the memory that a cached row takes, in all: its parts, its key and the cache's notes."""
    return part_bytes + _BYTES_PER_SLOT


class Misses(NamedTuple):
    """The rows that enter the cache, and the evicted rows that make room for them."""

    keys: Tensor
    """int64 [M], ascending: the keys whose rows were not in memory."""
    slots: Tensor
    """int64 [M]: their slots."""
    old_keys: Tensor
    """int64 [E], ascending: the keys whose changed rows leave memory."""
    old_rows: list[Tensor]
    """The parts of these rows."""


class RowCache:
    """Slots of memory for rows, indexed by key.

    A clock chooses who leaves: each use of a row by a batch gives it one more chance, up to three. New keys
    take slots in ascending order, so the same calls give the same slots. Slots of batches in flight are
    pinned.

    Args:
        parts: the parts of a row.
        width: the number of columns.
        num_slots: the number of rows in memory.
    """

    def __init__(self, parts: Sequence[RowPart], width: int, *, num_slots: int) -> None:
        shapes = [(num_slots,) if part.per_row else (num_slots, width) for part in parts]
        self.memory = [
            empty_pages(shape, part.dtype, None) for shape, part in zip(shapes, parts, strict=True)
        ]
        self.keys = torch.full((num_slots,), -1, dtype=torch.int64)
        """The key of each slot; -1: none."""
        self.dirty = torch.zeros(num_slots, dtype=torch.bool)
        """Whether the row of each slot may differ from the file's."""
        self.pins = torch.zeros(num_slots, dtype=torch.int32)
        self.released: deque[Tensor] = deque()
        """The slots of batches that are gone, whose pins are to be taken away."""
        self._counts = torch.zeros(num_slots, dtype=torch.uint8)
        self._stamps = torch.full((num_slots,), -1, dtype=torch.int64)
        self._index = HashIndex(num_slots, name="the cache of rows")
        self._hand, self._batch = 0, 0

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot of each key, int64; -1 where its row is not in memory."""
        return self._index.find(keys.contiguous())

    def use(self, slots: Tensor) -> Tensor:
        """Return the slots of a new batch once each, without -1. Each is pinned, and has one more chance."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        self._batch += 1
        used = records.used(slots, self._stamps, self._batch)
        self.pins[used] += 1
        self._counts[used] = (self._counts[used] + 1).clamp_(max=_MOST_CHANCES)
        return used

    def admit(self, keys: Tensor) -> Misses | None:
        """Give slots to keys without one, int64 [M] and ascending, and pin them.

        Return None if too many slots are pinned.
        """
        num_free = len(self.keys) - self._index.num_live
        victims = keys[:0]
        if (wanted := len(keys) - num_free) > 0:
            stays = self.pins if num_free == 0 else self.pins.masked_fill(self.keys < 0, 1)
            victims, self._hand = records.victims(self._counts, stays, self._hand, wanted)
            if len(victims) < wanted:
                return None
        leaving = victims[self.dirty[victims]]
        old_keys, order = self.keys[leaving].sort()
        leaving = leaving[order]
        old_rows = [_copied(part, leaving) for part in self.memory]
        self._index.remove(self.keys[victims])
        self.keys[victims] = -1
        slots = self._index.insert(keys)
        self.dirty[slots] = False
        self.keys[slots] = keys
        self._counts[slots] = 0
        self._stamps[slots] = self._batch
        self.pins[slots] += 1
        return Misses(keys, slots, old_keys, old_rows)

    def forget(self, misses: Misses) -> None:
        """Free the slots of rows that could not be read. Their pins stay until the batch is done."""
        self.drop(misses.keys[self.keys[misses.slots] == misses.keys])

    def drop(self, keys: Tensor) -> None:
        """Free the slots of those keys that have one, without writing their rows to the file."""
        slots = self.find(keys)
        here = slots >= 0
        self._index.remove(keys[here])
        self.keys[slots[here]] = -1
        self.dirty[slots[here]] = False

    @property
    def trace(self) -> int:
        """A fingerprint of the slots that the cache has given out so far."""
        return self._hand * 1_000_003 + self._batch

    def pinned(self) -> Tensor:
        """Return the slots that batches in flight use."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        return ((self.pins > 0) & (self.keys >= 0)).nonzero()[:, 0]

    @property
    def num_pinned(self) -> int:
        """The number of slots that batches in flight use."""
        return int((self.pins > 0).sum())


def _copied(part: Tensor, slots: Tensor) -> Tensor:
    """Copy the rows of some slots in this thread."""
    # Threads that read and write rows keep the processors busy. One of torch's own may wait milliseconds for
    # a processor.
    found = part.new_empty(len(slots), *part.shape[1:])
    rows = max(1, (_SERIAL_ELEMENTS - 1) // max(1, part[:1].numel()))
    for to, some in zip(found.split(rows), slots.split(rows), strict=True):
        torch.index_select(part, 0, some, out=to)
    return found
