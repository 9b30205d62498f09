"""In-memory row cache, and victim selection."""

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
"""Copies with at least this many elements use several threads in torch."""
_BYTES_PER_SLOT = 16 + 8 + 1 + 4 + 8 + 1
"""Bytes per slot in addition to the row: index, key, dirty flag, pins, stamp, and count."""


def slot_bytes(part_bytes: int) -> int:
    """Return the total memory per cached row: parts, key, and bookkeeping."""
    return part_bytes + _BYTES_PER_SLOT


class Misses(NamedTuple):
    """Rows entering the cache, and their victims."""

    keys: Tensor
    """int64 [M], ascending: keys without a row in memory."""
    slots: Tensor
    """int64 [M]: their slots."""
    old_keys: Tensor
    """int64 [E], ascending: keys of dirty victims."""
    old_rows: list[Tensor]
    """The dirty victims' parts."""


class RowCache:
    """Slots for rows in memory, indexed by key.

    A clock selects victims: whenever a batch uses a row, the row gets another chance, up to three. New keys
    take slots in ascending order, so the same calls give the same slots. Slots used by batches in flight are
    pinned.

    Args:
        parts: row parts.
        width: number of columns.
        num_slots: rows in memory.
    """

    def __init__(self, parts: Sequence[RowPart], width: int, *, num_slots: int) -> None:
        shapes = [(num_slots,) if part.per_row else (num_slots, width) for part in parts]
        self.memory = [
            empty_pages(shape, part.dtype, None) for shape, part in zip(shapes, parts, strict=True)
        ]
        self.keys = torch.full((num_slots,), -1, dtype=torch.int64)
        """Key by slot; -1: none."""
        self.dirty = torch.zeros(num_slots, dtype=torch.bool)
        """Whether the row may differ from the file, by slot."""
        self.pins = torch.zeros(num_slots, dtype=torch.int32)
        self.released: deque[Tensor] = deque()
        """Slots from finished batches, whose pins are removed at the next use."""
        # Clock state by slot: chances left, and the last batch that used the slot.
        self._counts = torch.zeros(num_slots, dtype=torch.uint8)
        self._stamps = torch.full((num_slots,), -1, dtype=torch.int64)
        self._index = HashIndex(num_slots, name="the cache of rows")
        self._hand, self._batch = 0, 0

    def find(self, keys: Tensor) -> Tensor:
        """Return slots by key, int64; -1 for rows not in memory."""
        return self._index.find(keys.contiguous())

    def use(self, slots: Tensor) -> Tensor:
        """Return a new batch's distinct slots, without -1. They are pinned and get another chance."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        self._batch += 1
        used = records.newly_used(slots, self._stamps, self._batch)
        self.pins[used] += 1
        self._counts[used] = (self._counts[used] + 1).clamp_(max=_MOST_CHANCES)
        return used

    def admit(self, keys: Tensor) -> Misses | None:
        """Assign slots to keys without a slot, int64 [M] and ascending, and pin them.

        Return None if too many slots are pinned.
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
        old_rows = [_copied(part, leaving) for part in self.memory]
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
        """Free the slots for unreadable rows. Their pins stay until the batch is done."""
        self.drop(misses.keys[self.keys[misses.slots] == misses.keys])

    def drop(self, keys: Tensor) -> None:
        """Free the keys' slots, if any, without writing the rows to the file."""
        slots = self.find(keys)
        here = slots >= 0
        self._index.remove(keys[here])
        self.keys[slots[here]] = -1
        self.dirty[slots[here]] = False

    @property
    def trace(self) -> int:
        """Fingerprint over the slots assigned by the cache so far."""
        return self._hand * 1_000_003 + self._batch

    def pinned(self) -> Tensor:
        """Return the slots used by batches in flight."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        return ((self.pins > 0) & (self.keys >= 0)).nonzero()[:, 0]

    @property
    def num_pinned(self) -> int:
        """Number of slots used by batches in flight."""
        return int((self.pins > 0).sum())


def _copied(part: Tensor, slots: Tensor) -> Tensor:
    """Copy slots' rows in this thread."""
    # Reader and writer threads keep the processors busy, and a torch thread may wait milliseconds for
    # a processor.
    copied = part.new_empty(len(slots), *part.shape[1:])
    rows = max(1, (_SERIAL_ELEMENTS - 1) // max(1, part[:1].numel()))
    for to, some in zip(copied.split(rows), slots.split(rows), strict=True):
        torch.index_select(part, 0, some, out=to)
    return copied
