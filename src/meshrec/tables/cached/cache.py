"""Cache of table rows in memory. The CLOCK algorithm, an approximation of LRU, selects the rows to evict.

A *slot* is a row position in the cache. A *row part* is the weight or an optimizer state tensor of a row. A
*dirty* row was trained since it was read, so it may differ from the row in the file.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops import records
from meshrec.ops.index import HashIndex
from meshrec.ops.memory import empty_pages
from meshrec.tables.index import Pin
from meshrec.tables.table import RowPart

# Small, so that a row which was popular long ago leaves after at most three passes of the hand.
_MOST_CHANCES = 3  # greatest reference count per row
_SERIAL_ELEMENTS = 1 << 15
"""Number of elements from which a torch copy uses several threads."""
_BYTES_PER_SLOT = 16 + 8 + 1 + 4 + 8 + 1
"""Bytes per slot in addition to the row: index, key, dirty flag, pins, stamp, and reference count."""


def slot_bytes(part_bytes: int) -> int:
    """Return the bytes of memory that the cache takes per row, including bookkeeping such as the index."""
    return part_bytes + _BYTES_PER_SLOT


class Misses(NamedTuple):
    """Rows that have just entered the cache (M rows), and the dirty rows they replaced (E rows)."""

    keys: Tensor
    """Keys of the entering rows, ascending, int64 [M]."""
    slots: Tensor
    """Slots assigned to these keys, int64 [M]. The caller must copy the rows into these slots."""
    old_keys: Tensor
    """Keys of the evicted dirty rows, ascending, int64 [E]. The caller must write the rows to the file."""
    old_rows: list[Tensor]
    """Copies of the evicted dirty rows, one tensor with E rows per row part."""


class RowCache:
    """A fixed number of rows in memory (slots), found by key.

    The cache assigns slots and selects victims, but does not read or write the file. Slots used by batches in
    flight are pinned and cannot be evicted. The CLOCK algorithm selects victims. Every batch that uses a row
    increments the row's reference count, up to three. A hand moves over the slots, decrements the counts, and
    evicts unpinned rows with count 0. New keys get slots in ascending key order. So the same calls give the
    same slots on every rank.

    Args:
        parts: row parts, such as the weight and optimizer state.
        width: column count.
        num_slots: number of rows in memory.

    Attributes:
        memory: one tensor per row part, indexed by slot.
        pins: how many batches in flight use a slot, int32 [num_slots].
    """

    def __init__(self, parts: Sequence[RowPart], width: int, *, num_slots: int) -> None:
        # Parts with a single value per row are one-dimensional.
        shapes = [(num_slots,) if part.per_row else (num_slots, width) for part in parts]
        self.memory = [
            empty_pages(shape, part.dtype, None) for shape, part in zip(shapes, parts, strict=True)
        ]
        self.keys = torch.full((num_slots,), -1, dtype=torch.int64)
        """Key of the row in a slot, int64; -1 for a free slot."""
        self.dirty = torch.zeros(num_slots, dtype=torch.bool)
        """Whether the row in a slot may differ from the file. Set by ``FileTable``, cleared on eviction."""
        self.pins = torch.zeros(num_slots, dtype=torch.int32)
        self.released: deque[Tensor] = deque()
        """Slots of finished batches, one tensor per batch. Pins may be released in any thread (by garbage
        collection), so they are only listed here, and removed from ``pins`` by the next ``use``."""
        # CLOCK state by slot: reference count, and number of the last batch that used the slot.
        self._counts = torch.zeros(num_slots, dtype=torch.uint8)
        self._stamps = torch.full((num_slots,), -1, dtype=torch.int64)
        self._index = HashIndex(num_slots, name="the cache of rows")
        # The slot at which the next search for victims starts, and the number of batches so far.
        self._hand, self._batch = 0, 0

    def find(self, keys: Tensor) -> Tensor:
        """Return the slot per key, int64 [N]; -1 for keys that are not in the cache."""
        return self._index.find(keys.contiguous())

    def use(self, slots: Tensor) -> Tensor:
        """Register a new batch: pin the slots used by it, and increment their reference counts.

        Args:
            slots: result of ``find`` for the batch, int64 [N]; may repeat, and -1 is ignored.

        Returns:
            The distinct slots, int64. They stay pinned until the caller adds them to ``released``.
        """
        # First, so that this batch can evict rows of batches that have ended.
        while self.released:
            self.pins[self.released.popleft()] -= 1
        self._batch += 1
        # Stamps give the distinct slots without a sort: a slot with this batch's stamp is listed already.
        used = records.newly_used(slots, self._stamps, self._batch)
        self.pins[used] += 1
        self._counts[used] = (self._counts[used] + 1).clamp_(max=_MOST_CHANCES)
        return used

    def admit(self, keys: Tensor) -> Misses | None:
        """Assign slots to keys that are not in the cache, and pin the slots. Evicts other rows if necessary.

        Args:
            keys: distinct keys, ascending, int64 [M].

        Returns:
            The assigned slots, and the evicted dirty rows. None if too many slots are pinned; then only the
                CLOCK state has changed.
        """
        # Evict only as many rows as do not fit into free slots.
        num_free = len(self.keys) - self._index.num_live
        victims = keys[:0]
        if (num_victims := len(keys) - num_free) > 0:
            # A free slot cannot be a victim, so treat it as pinned.
            stays = self.pins if num_free == 0 else self.pins.masked_fill(self.keys < 0, 1)
            victims, self._hand = records.select_victims(self._counts, stays, self._hand, num_victims)
            if len(victims) < num_victims:
                return None
        # The file already has the other victims.
        dirty_victims = victims[self.dirty[victims]]
        old_keys, order = self.keys[dirty_victims].sort()
        dirty_victims = dirty_victims[order]
        # Copy now, because the slots are reused before the writer thread writes the rows.
        old_rows = [_copy_rows(part, dirty_victims) for part in self.memory]
        # Before the insert, which takes the slots that are free.
        self._index.remove(self.keys[victims])
        self.keys[victims] = -1
        slots = self._index.insert(keys)
        self.dirty[slots] = False
        self.keys[slots] = keys
        # The next batch that uses the row increments the count, so rows used by a single batch leave first.
        self._counts[slots] = 0
        self._stamps[slots] = self._batch
        self.pins[slots] += 1
        return Misses(keys, slots, old_keys, old_rows)

    def forget(self, misses: Misses) -> None:
        """Free the slots assigned to rows whose read from the file has failed.

        The slots stay pinned until the batch is released.
        """
        # A slot may have been freed and reassigned since.
        self.drop(misses.keys[self.keys[misses.slots] == misses.keys])

    def drop(self, keys: Tensor) -> None:
        """Free the slots of some keys, int64, without writing the rows. Keys without a slot are ignored."""
        slots = self.find(keys)
        here = slots >= 0
        self._index.remove(keys[here])
        self.keys[slots[here]] = -1
        self.dirty[slots[here]] = False

    @property
    def trace(self) -> int:
        """Fingerprint of the calls so far.

        Ranks that hold different columns of the same rows compare their fingerprints. If they differ, a row
        may be in different slots on these ranks.
        """
        # Both numbers depend on all earlier calls, so a rank that has missed a call has another fingerprint.
        return self._hand * 1_000_003 + self._batch

    def pinned(self) -> Tensor:
        """Return the slots used by batches in flight, int64."""
        while self.released:
            self.pins[self.released.popleft()] -= 1
        return ((self.pins > 0) & (self.keys >= 0)).nonzero()[:, 0]


class RowsInFlight(Pin):
    """Pin that keeps the cache slots used by a batch from getting other rows.

    The batch's rows may still be on their way from the file to these slots; see ``wait``.

    Args:
        band: table number, first row and end row of the table's rectangle.
        cache: the cache.
        used: distinct slots used by the batch, int64.
        arrival: future which finishes when the rows are in the cache, or an error for ``wait`` to raise.
    """

    def __init__(
        self, band: tuple[int, int, int], cache: RowCache, used: Tensor, arrival: "Future[None] | Exception"
    ) -> None:
        # ``_released`` is the cache's list, emptied by the next ``RowCache.use``.
        self._used, self._released, self._arrival = used, cache.released, arrival
        self.band, self.trace = band, cache.trace

    def wait(self) -> None:
        """Wait until all rows of the batch are in the cache.

        Raises:
            RowFileError: rows cannot be read, or victims cannot be written.
            ValueError: the cache has no room for the batch.
        """
        if isinstance(self._arrival, Exception):
            raise self._arrival
        self._arrival.result()

    def release(self) -> None:
        """Release the slots. The cache removes the pins when the next batch starts."""
        if not self.is_released:
            self.is_released = True
            self._released.append(self._used)

    def __del__(self) -> None:
        self.release()  # for a batch dropped without an update


def _copy_rows(part: Tensor, slots: Tensor) -> Tensor:
    """Copy the rows in some slots, in the calling thread only."""
    # Torch's worker threads compete with the reader and writer threads, and may wait milliseconds for a
    # processor. Copies of few elements run in the calling thread.
    copied = part.new_empty(len(slots), *part.shape[1:])
    rows = max(1, (_SERIAL_ELEMENTS - 1) // max(1, part[:1].numel()))
    for to, some in zip(copied.split(rows), slots.split(rows), strict=True):
        torch.index_select(part, 0, some, out=to)
    return copied
