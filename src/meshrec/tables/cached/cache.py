"""Cache of table rows in memory, with CLOCK eviction."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops import records
from meshrec.ops.index import HashIndex
from meshrec.ops.memory import empty_pages
from meshrec.tables.table import RowPart

_MOST_CHANCES = 3  # maximum reference count per row
_SERIAL_ELEMENTS = 1 << 15
"""Element count from which torch copies with several threads."""
_BYTES_PER_SLOT = 16 + 8 + 1 + 4 + 8 + 1
"""Bytes per slot in addition to the row: index, key, dirty flag, pins, stamp, and reference count."""


def slot_bytes(part_bytes: int) -> int:
    """Return the memory per cached row in bytes: parts, key, and bookkeeping."""
    return part_bytes + _BYTES_PER_SLOT


class Misses(NamedTuple):
    """Rows entering the cache, and the dirty rows replaced by them."""

    keys: Tensor
    """int64 [M], ascending: keys of entering rows."""
    slots: Tensor
    """int64 [M]: slots assigned to these keys."""
    old_keys: Tensor
    """int64 [E], ascending: keys of evicted rows to write to the file."""
    old_rows: list[Tensor]
    """Copies of these rows, one tensor per part."""


class RowCache:
    """Rows in memory, in slots found by key with an index.

    The CLOCK policy selects victims: every batch using a row increments the row's reference count, up to
    three. New keys take slots in ascending order, so equal calls give equal slots. Slots used by batches
    in flight are pinned.

    Args:
        parts: row parts.
        width: column count.
        num_slots: row count in memory.
    """

    def __init__(self, parts: Sequence[RowPart], width: int, *, num_slots: int) -> None:
        shapes = [(num_slots,) if part.per_row else (num_slots, width) for part in parts]
        self.memory = [
            empty_pages(shape, part.dtype, None) for shape, part in zip(shapes, parts, strict=True)
        ]
        self.keys = torch.full((num_slots,), -1, dtype=torch.int64)
        """Key per slot; -1: free."""
        self.dirty = torch.zeros(num_slots, dtype=torch.bool)
        """Whether the row in a slot may differ from the file."""
        self.pins = torch.zeros(num_slots, dtype=torch.int32)
        self.released: deque[Tensor] = deque()
        """Slots from finished batches. The pins are removed at the next ``use``."""
        # CLOCK state by slot: reference count, and number of the last batch using the slot.
        self._counts = torch.zeros(num_slots, dtype=torch.uint8)
        self._stamps = torch.full((num_slots,), -1, dtype=torch.int64)
        self._index = HashIndex(num_slots, name="the cache of rows")
        self._hand, self._batch = 0, 0

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot per key, int64; -1 for rows not in memory."""
        return self._index.find(keys.contiguous())

    def use(self, slots: Tensor) -> Tensor:
        """Register a new batch. Returns its distinct slots, without -1; they are pinned until released."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        self._batch += 1
        used = records.newly_used(slots, self._stamps, self._batch)
        self.pins[used] += 1
        self._counts[used] = (self._counts[used] + 1).clamp_(max=_MOST_CHANCES)
        return used

    def admit(self, keys: Tensor) -> Misses | None:
        """Assign slots to keys without one, and pin them. Evicts rows if necessary.

        Args:
            keys: int64 [M], ascending.

        Returns:
            The rows to read and to write. None if too many slots are pinned; nothing has changed then.
        """
        num_free = len(self.keys) - self._index.num_live
        victims = keys[:0]
        if (num_victims := len(keys) - num_free) > 0:
            # Free slots are not victims: mask them as pinned.
            stays = self.pins if num_free == 0 else self.pins.masked_fill(self.keys < 0, 1)
            victims, self._hand = records.select_victims(self._counts, stays, self._hand, num_victims)
            if len(victims) < num_victims:
                return None
        leaving = victims[self.dirty[victims]]
        old_keys, order = self.keys[leaving].sort()
        leaving = leaving[order]
        # Copy before the slots are reused; the writer thread reads the copy.
        old_rows = [_copy_rows(part, leaving) for part in self.memory]
        self._index.remove(self.keys[victims])
        self.keys[victims] = -1
        slots = self._index.insert(keys)
        self.dirty[slots] = False
        self.keys[slots] = keys
        # A new row has no chance yet; the next use gives it the first.
        self._counts[slots] = 0
        self._stamps[slots] = self._batch
        self.pins[slots] += 1
        return Misses(keys, slots, old_keys, old_rows)

    def forget(self, misses: Misses) -> None:
        """Free slots for rows that could not be read. Pins stay until the batch releases them."""
        self.drop(misses.keys[self.keys[misses.slots] == misses.keys])

    def drop(self, keys: Tensor) -> None:
        """Free slots for keys, where present, without writing the rows to the file."""
        slots = self.find(keys)
        here = slots >= 0
        self._index.remove(keys[here])
        self.keys[slots[here]] = -1
        self.dirty[slots[here]] = False

    @property
    def trace(self) -> int:
        """Fingerprint of the slots assigned so far."""
        return self._hand * 1_000_003 + self._batch

    def pinned(self) -> Tensor:
        """Return the slots used by batches in flight, int64."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        return ((self.pins > 0) & (self.keys >= 0)).nonzero()[:, 0]

    @property
    def num_pinned(self) -> int:
        """Count of slots used by batches in flight."""
        return int((self.pins > 0).sum())


def _copy_rows(part: Tensor, slots: Tensor) -> Tensor:
    """Copy the rows at some slots in the calling thread only."""
    # Reader and writer threads keep the processors busy, and a torch thread may wait milliseconds for
    # a processor.
    copied = part.new_empty(len(slots), *part.shape[1:])
    rows = max(1, (_SERIAL_ELEMENTS - 1) // max(1, part[:1].numel()))
    for to, some in zip(copied.split(rows), slots.split(rows), strict=True):
        torch.index_select(part, 0, some, out=to)
    return copied
