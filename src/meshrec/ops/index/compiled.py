"""Hash index in the compiled kernels: the memory, and the C calls that modify it.

The memory is four tensors, laid out as in [Note: the hash index] in csrc/index/shard.h. A forked process sees
them unchanged. Where the system allows it, address space is reserved for all slots, and only the pages
written to use memory. Elsewhere the tensors start small and are copied to larger ones as they fill.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.index.naive import Status
from meshrec.ops.library import c_functions
from meshrec.ops.memory import reserve_pages
from meshrec.ops.prefault import GrowingRegion

# Layout constants in csrc/index/shard.h and csrc/index/hash_index.h; both sides must agree.
_BUCKET_BYTES, _TAG_BYTES = 64, 3
_HEADER_WORDS, _SHARD_WORDS, _MIN_BUCKETS = 8, 4, 8
# Positions in the header. The bucket capacity is per shard.
_NUM_LIVE, _NUM_SLOTS, _MAX_SLOTS, _SHARD_BITS, _BUCKET_CAPACITY, _SLOT_CAPACITY = range(6)
# One shard per million slots, at most 16: threads work on different shards.
_SLOTS_PER_SHARD, _MAX_SHARD_BITS = 1 << 20, 4
# Where address space cannot be reserved, memory starts at this size and doubles.
_INITIAL_SLOTS, _INITIAL_BUCKETS = 1 << 12, 64
_BUCKETS_PER_ID = 25 / 126  # see buckets_for in csrc/index/shard.h
_PAGE_BUCKETS = (1 << 21) // _BUCKET_BYTES  # buckets per huge page
# Addresses: header, buckets, tags, free slots.
_pointers = ctypes.c_void_p * 4


# Order and types must equal those in C, because ctypes cannot check them.
class AssignArgs(ctypes.Structure):
    """Arguments for an index in a ``meshrec_index_give`` call; C struct in csrc/index/hash_index.h."""

    _fields_ = (
        ("memory", _pointers),
        ("seed", ctypes.c_uint64),
        ("ids", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("mixes", ctypes.c_int64),
        ("mix_seed", ctypes.c_uint64),
        ("first", ctypes.c_uint64),
        ("slots", ctypes.c_void_p),
        ("num_absent", ctypes.c_int64),
        ("assigned", ctypes.c_void_p),
        ("num_assigned", ctypes.c_int64),
    )


class FreeArgs(ctypes.Structure):
    """Arguments for an index in a ``meshrec_index_free`` call; C struct in csrc/index/hash_index.h."""

    _fields_ = (
        ("memory", _pointers),
        ("seed", ctypes.c_uint64),
        ("slots", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("status", ctypes.c_int64),
    )


_seed, _address, _count = ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64
# Any: without it, no CompiledIndex is made.
_library: Any = c_functions(
    index_give=(_count, [ctypes.POINTER(AssignArgs), _count]),
    index_insert=(_count, [_pointers, _seed, _address, _count, _address, _address]),
    index_remove=(_count, [_pointers, _seed, _address, _count, _address]),
    index_free=(_count, [ctypes.POINTER(FreeArgs), _count]),
    index_ids_of=(_count, [_pointers, _seed, _address, _count, _address]),
    index_items=(_count, [_pointers, _seed, _address, _address]),
    index_marked=(_count, [_pointers, _seed, _address, _count, _address, _address]),
    index_num_bytes=(_count, [_pointers]),
)
is_compiled: bool = _library is not None
"""Whether the compiled library has the hash index."""


class CompiledIndex:
    """Map from IDs to slots, stored and searched by the compiled kernels.

    ``HashIndex`` documents the methods. Failed calls return a ``Status`` and change nothing.

    Attributes:
        memory: header, buckets, tags and free slots, which ``torch.ops.meshrec.index_find`` reads. Replaced
            by new tensors when the index outgrows them.
        seed: seed for the hash that spreads IDs over buckets.
    """

    def __init__(self, max_slots: int, seed: int) -> None:
        """Reserve or allocate memory for an empty index.

        Args:
            max_slots: maximum slot count, below 2^32.
        """
        self.seed = seed
        shard_bits = min(_MAX_SHARD_BITS, (max_slots // _SLOTS_PER_SHARD).bit_length() - 1)
        # bit_length() of 0 is 0, which would give -1 for a small index.
        shard_bits = max(0, shard_bits)
        header = torch.zeros(_HEADER_WORDS + (_SHARD_WORDS << shard_bits), dtype=torch.int64)
        header[_MAX_SLOTS], header[_SHARD_BITS] = max_slots, shard_bits
        # Per shard: no keys, then the bucket count before and after a resize, and the resize's progress.
        header[_HEADER_WORDS:].view(-1, _SHARD_WORDS)[:, 1:] = _MIN_BUCKETS
        # The header first: _reallocate reads and updates it.
        self.memory = [header, *(torch.empty(0, dtype=torch.uint8) for _ in range(3))]
        # Read header words through ctypes: tensor indexing takes 2 us per word, and every lookup reads
        # several words per table.
        self._words = (ctypes.c_int64 * _HEADER_WORDS).from_address(header.data_ptr())
        # 25 % headroom over an even split. A shard outgrowing it moves the index to new memory.
        share = max_slots if shard_bits == 0 else (max_slots >> shard_bits) * 5 // 4 + _INITIAL_SLOTS
        bucket_capacity = int(share * _BUCKETS_PER_ID) * 9 // 8 + _INITIAL_BUCKETS
        # Shards grow evenly. Stagger their starts within a huge page, so they do not all reach the next
        # page in the same step.
        bucket_capacity += -bucket_capacity % _PAGE_BUCKETS + (_PAGE_BUCKETS >> shard_bits)
        # Not reset when the index moves to larger memory: `growing_regions` is read once, for a new table.
        self._is_reserved = self._reallocate(bucket_capacity, max_slots, reserved=True)
        if not self._is_reserved:
            self._reallocate(_INITIAL_BUCKETS, min(max_slots, _INITIAL_SLOTS), reserved=False)

    @property
    def num_live(self) -> int:
        """Number of IDs with a slot."""
        return int(self._words[_NUM_LIVE])

    @property
    def num_slots(self) -> int:
        """Highest slot ever assigned, plus 1."""
        return int(self._words[_NUM_SLOTS])

    @property
    def num_bytes(self) -> int:
        """Memory in use, in bytes."""
        return int(_library.meshrec_index_num_bytes(self._addresses))

    @property
    def growing_regions(self) -> list[GrowingRegion]:
        """Memory regions that grow in place as slots are assigned; empty if growth copies the tensors."""
        _, buckets, tags, _ = self.memory
        if not self._is_reserved:
            return []
        # A growing shard writes from the end of the next eighth downward.
        row_bytes = _BUCKET_BYTES * _BUCKETS_PER_ID * 9 / 8 / len(buckets)
        regions = [
            GrowingRegion(buckets, row_bytes, shard * self._bucket_capacity * _BUCKET_BYTES)
            for shard in range(len(buckets))
        ]
        return [*regions, GrowingRegion(tags, _TAG_BYTES)]

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot for each ID, or -1 for an ID without a slot: int64 [N]."""
        slots: Tensor = operators.index_find(self.memory, ids_N, self.seed)
        return slots

    def insert(self, ids_N: Tensor, given_N: Tensor | None = None) -> Tensor | Status:
        """Insert IDs, and return their slots. If that fails, return a status and change nothing.

        Args:
            ids_N: int64, contiguous, distinct and ascending.
            given_N: free slots to assign to the IDs, int64 [N]. None: the lowest free slots.
        """
        num_live, num_slots, max_slots, _, _, slot_capacity = self.memory[0][:_HEADER_WORDS].tolist()[:6]
        # Grow the slot capacity first, because the kernel cannot: it only gets addresses. The capacity
        # doubles, so that copies stay rare.
        needed = max(num_slots, num_live + len(ids_N))
        if given_N is not None and len(given_N):
            needed = max(needed, int(given_N.max()) + 1)
        if slot_capacity < needed <= max_slots:
            self._reallocate(
                self._bucket_capacity, min(max_slots, max(needed, 2 * slot_capacity)), reserved=False
            )
        slots = torch.empty_like(ids_N)
        # A null pointer selects the lowest free slots.
        given = None if given_N is None else given_N.data_ptr()
        # NO_BUCKETS means a shard overflowed although the index has free slots: double all shards and retry.
        while True:
            status = _library.meshrec_index_insert(
                self._addresses, self.seed, ids_N.data_ptr(), len(ids_N), given, slots.data_ptr()
            )
            if status != Status.NO_BUCKETS:
                return Status(status) if status else slots
            self._reallocate(2 * self._bucket_capacity, int(self.memory[0][_SLOT_CAPACITY]), reserved=False)

    def remove(self, ids_N: Tensor) -> Tensor | Status:
        """Remove IDs, and return their slots. If that fails, return a status and change nothing."""
        slots = torch.empty_like(ids_N)
        status = _library.meshrec_index_remove(
            self._addresses, self.seed, ids_N.data_ptr(), len(ids_N), slots.data_ptr()
        )
        return Status(status) if status else slots

    def ids_of(self, slots_N: Tensor) -> Tensor | Status:
        """Return the ID stored in each slot, int64 [N]; a status if any slot holds no ID."""
        ids = torch.empty_like(slots_N)
        status = _library.meshrec_index_ids_of(
            self._addresses, self.seed, slots_N.data_ptr(), len(slots_N), ids.data_ptr()
        )
        return Status(status) if status else ids

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all IDs in ascending order, and their slots: both int64 [num_live]."""
        # The match count is unknown before the scan, so allocate the maximum.
        ids, slots = torch.empty(2, self.num_live, dtype=torch.int64)
        _library.meshrec_index_items(self._addresses, self.seed, ids.data_ptr(), slots.data_ptr())
        # The kernel returns items in hash order.
        ids, order = ids.sort()
        return ids, slots[order]

    def marked(self, marks: Tensor, max_id: int) -> tuple[Tensor, Tensor]:
        """Return the IDs that have a marked slot, and these slots; see ``HashIndex.marked``."""
        ids, slots = torch.empty(2, self.num_live, dtype=torch.int64)
        # The kernel returns how many entries it has written.
        count = _library.meshrec_index_marked(
            self._addresses, self.seed, marks.data_ptr(), max_id, ids.data_ptr(), slots.data_ptr()
        )
        return ids[:count], slots[:count]

    def assign_args(
        self, ids_N: Tensor, slots_N: Tensor, results: Tensor, mix_seed: int | None, first: int
    ) -> AssignArgs:
        """Return the C arguments with which ``assign`` inserts IDs into this index.

        Args:
            slots_N: slot per ID, -1 if it has none, int64, contiguous. The kernel replaces every -1.
            results: output buffer, int64 [3, number of IDs without a slot]. The kernel writes a column per
                distinct inserted ID: the ID as inserted, the slot, and the number of occurrences.
            mix_seed: seed with which the kernel hashes the IDs before insertion. None: no hashing.
            first: number to add to the IDs, after the hash if any.
        """
        # ctypes takes unsigned integers, while Python seeds may be negative.
        word = (1 << 64) - 1
        return AssignArgs(
            self._addresses,
            self.seed & word,
            ids_N.data_ptr(),
            len(ids_N),
            int(mix_seed is not None),
            (mix_seed or 0) & word,
            first & word,
            slots_N.data_ptr(),
            results.shape[1],
            results.data_ptr(),
            0,
        )

    @property
    def _bucket_capacity(self) -> int:
        """Bucket capacity per shard."""
        return int(self._words[_BUCKET_CAPACITY])

    def _reallocate(self, bucket_capacity: int, slot_capacity: int, *, reserved: bool) -> bool:
        """Allocate tensors for another capacity, copy the contents, and switch to them.

        Args:
            reserved: only reserve address space. Where the system cannot, return False and change nothing.
        """
        header, buckets, tags, free = self.memory
        num_shards, old_words = 1 << int(header[_SHARD_BITS]), -(-int(header[_SLOT_CAPACITY]) // 64)
        num_words = -(-slot_capacity // 64)
        free_bytes = 8 * (num_words + num_words // 64 + 1)
        sizes: list[tuple[int, ...]] = [
            (num_shards, bucket_capacity, _BUCKET_BYTES),
            (_TAG_BYTES * slot_capacity + 1,),
        ]
        sizes.append((free_bytes,))
        # Allocate everything first, so that a failure changes nothing.
        new = []
        for size in sizes:
            memory = (
                reserve_pages(size, torch.uint8, None) if reserved else torch.zeros(size, dtype=torch.uint8)
            )
            if memory is None:
                return False
            new.append(memory)
        if buckets.numel():
            # A shard's buckets stay at the start of the shard; only the distance between shards grows.
            new[0][:, : self._bucket_capacity] = buckets
            new[1][: len(tags)] = tags
            new[2][: 8 * old_words] = free[: 8 * old_words]
            # The free list is a bitmap with a summary bit per word. The summary moves, as it follows the
            # bitmap.
            summary = free[8 * old_words :]
            new[2][8 * num_words :][: len(summary)] = summary
        # The header itself is not replaced: self._words points into it.
        header[_BUCKET_CAPACITY], header[_SLOT_CAPACITY] = bucket_capacity, slot_capacity
        self.memory = [header, *new]
        # Cached: every C call passes these addresses.
        self._addresses = _pointers(*(tensor.data_ptr() for tensor in self.memory))
        return True


def assign(arguments: Sequence[AssignArgs]) -> list[int]:
    """Insert the IDs without a slot into several indexes, and write their slots.

    Args:
        arguments: results from ``CompiledIndex.assign_args``, for distinct indexes.

    Returns:
        Number of distinct IDs inserted per index, or -1 for an index that did not change because it is full
            or must first be copied to larger memory.
    """
    array = (AssignArgs * len(arguments))(*arguments)
    _library.meshrec_index_give(array, len(arguments))
    # ctypes has copied the arguments into the array, so the results are there.
    return [item.num_assigned for item in array]


def free(indexes: Sequence[CompiledIndex], slots: Sequence[Tensor]) -> list[Tensor | Status]:
    """Free slots in several indexes: remove the IDs that have these slots.

    Args:
        indexes: distinct indexes.
        slots: slots to free in every index, int64 [N], contiguous.

    Returns:
        Removed IDs per index, int64 [N], if all slots are valid. Otherwise no index changes, and the result
            is a status per index. ``Status.SUCCESS`` then means that the slots of this index were valid.
    """
    ids = [torch.empty_like(index_slots) for index_slots in slots]
    arguments = (FreeArgs * len(indexes))()
    for item, index, index_slots, out in zip(arguments, indexes, slots, ids, strict=True):
        item.memory, item.seed = index._addresses, index.seed
        item.slots, item.count, item.ids = index_slots.data_ptr(), len(index_slots), out.data_ptr()
        # Stays if the call runs out of memory before it has checked this index.
        item.status = Status.NO_MEMORY
    _library.meshrec_index_free(arguments, len(indexes))
    statuses = [Status(item.status) for item in arguments]
    # SUCCESS is 0, hence false.
    return list(statuses) if any(statuses) else list(ids)
