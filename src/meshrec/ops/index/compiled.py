"""The hash index of the kernels: its memory, and the calls that change it.

The memory is four tensors, which a forked process sees as they were, and whose form is that of [Note: the
hash index] in csrc/index/shard.h. Address space is reserved for all slots where the system allows it, so that
an index takes memory only where it is written to. Elsewhere the tensors are copied to larger ones as they
fill.
"""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops.index.naive import Status
from meshrec.ops.library import c_entry_points
from meshrec.ops.memory import reserve_pages
from meshrec.ops.pages_ahead import GrowingPart

_BUCKET_BYTES, _TAG_BYTES = 64, 3
_HEADER_WORDS, _SHARD_WORDS, _LEAST_BUCKETS = 8, 4, 8
_NUM_LIVE, _NUM_SLOTS, _MAX_SLOTS, _SHARD_BITS, _ROOM, _SLOT_ROOM = range(6)
_SLOTS_PER_SHARD, _MOST_SHARD_BITS = 1 << 20, 4
_FIRST_SLOTS, _FIRST_BUCKETS = 1 << 12, 64
_BUCKETS_PER_ID = 25 / 126  # see buckets_for in csrc/index/shard.h
_PAGE_BUCKETS = (1 << 21) // _BUCKET_BYTES
_pointers = ctypes.c_void_p * 4


class GiveArgs(ctypes.Structure):
    """The arguments of ``meshrec_index_give`` for one index, as in csrc/index/hash_index.h."""

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
        ("found", ctypes.c_void_p),
        ("num_found", ctypes.c_int64),
    )


class FreeArgs(ctypes.Structure):
    """The arguments of ``meshrec_index_free`` for one index, as in csrc/index/hash_index.h."""

    _fields_ = (
        ("memory", _pointers),
        ("seed", ctypes.c_uint64),
        ("slots", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("status", ctypes.c_int64),
    )


def _kernels() -> ctypes.CDLL | None:
    library = c_entry_points()
    if library is None or not hasattr(library, "meshrec_index_insert"):
        return None
    memory, seed, address, count = _pointers, ctypes.c_uint64, ctypes.c_void_p, ctypes.c_int64
    for name, arguments in (
        ("give", [ctypes.POINTER(GiveArgs), count]),
        ("insert", [memory, seed, address, count, address, address]),
        ("remove", [memory, seed, address, count, address]),
        ("free", [ctypes.POINTER(FreeArgs), count]),
        ("ids_of", [memory, seed, address, count, address]),
        ("items", [memory, seed, address, address]),
        ("marked", [memory, seed, address, count, address, address]),
        ("num_bytes", [memory]),
    ):
        function = getattr(library, f"meshrec_index_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int64
    return library


_library = _kernels()
is_compiled: bool = _library is not None
"""Whether there are kernels for the hash index."""


class CompiledIndex:
    """The slots of IDs, found and changed by the kernels; see ``HashIndex``.

    Attributes:
        memory: what ``torch.ops.meshrec.index_find`` reads.
        seed: the seed of the mix.
    """

    def __init__(self, max_slots: int, seed: int) -> None:
        self.seed = seed
        shard_bits = min(_MOST_SHARD_BITS, (max_slots // _SLOTS_PER_SHARD).bit_length() - 1)
        shard_bits = max(0, shard_bits)
        header = torch.zeros(_HEADER_WORDS + (_SHARD_WORDS << shard_bits), dtype=torch.int64)
        header[_MAX_SLOTS], header[_SHARD_BITS] = max_slots, shard_bits
        # No key, and twice the same number of buckets, all of which are in use.
        header[_HEADER_WORDS:].view(-1, _SHARD_WORDS)[:, 1:] = _LEAST_BUCKETS
        self.memory = [header, *(torch.empty(0, dtype=torch.uint8) for _ in range(3))]
        # The header's words without a tensor, which takes 2 us a word: each lookup reads some of each table.
        self._words = (ctypes.c_int64 * _HEADER_WORDS).from_address(header.data_ptr())
        # A quarter more than the share of each shard: with more than that an index gets new memory.
        share = max_slots if shard_bits == 0 else (max_slots >> shard_bits) * 5 // 4 + _FIRST_SLOTS
        room = int(share * _BUCKETS_PER_ID) * 9 // 8 + _FIRST_BUCKETS
        # Shards grow evenly. Each begins at another place of a huge page, so that they do not all reach their
        # next page in the same step.
        room += -room % _PAGE_BUCKETS + (_PAGE_BUCKETS >> shard_bits)
        self._is_reserved = self._set_room(room, max_slots, reserved=True)
        if not self._is_reserved:
            self._set_room(_FIRST_BUCKETS, min(max_slots, _FIRST_SLOTS), reserved=False)

    @property
    def num_live(self) -> int:
        return int(self._words[_NUM_LIVE])

    @property
    def num_slots(self) -> int:
        return int(self._words[_NUM_SLOTS])

    @property
    def num_bytes(self) -> int:
        assert _library is not None
        return int(_library.meshrec_index_num_bytes(self._addresses))

    @property
    def parts(self) -> list[GrowingPart]:
        """The memory that grows with the slots; none where it is copied as it fills."""
        _, buckets, tags, _ = self.memory
        if not self._is_reserved:
            return []
        # A shard that grows begins at the end of its next eighth.
        row_bytes = _BUCKET_BYTES * _BUCKETS_PER_ID * 9 / 8 / len(buckets)
        shards = [
            GrowingPart(buckets, row_bytes, shard * self._room * _BUCKET_BYTES)
            for shard in range(len(buckets))
        ]
        return [*shards, GrowingPart(tags, _TAG_BYTES)]

    def find(self, ids_N: Tensor) -> Tensor:
        slots: Tensor = torch.ops.meshrec.index_find.default(self.memory, ids_N, self.seed)
        return slots

    def insert(self, ids_N: Tensor, given_N: Tensor | None = None) -> Tensor | Status:
        """Insert IDs; return their slots, or why nothing has changed.

        Args:
            ids_N: int64, contiguous.
            given_N: the slots that the IDs get, which must be free; None: the lowest free ones.
        """
        assert _library is not None
        num_live, num_slots, max_slots, _, _, slot_room = self.memory[0][:_HEADER_WORDS].tolist()[:6]
        wanted = max(num_slots, num_live + len(ids_N))
        if given_N is not None and len(given_N):
            wanted = max(wanted, int(given_N.max()) + 1)
        if slot_room < wanted <= max_slots:
            self._set_room(self._room, min(max_slots, max(wanted, 2 * slot_room)), reserved=False)
        slots = torch.empty_like(ids_N)
        given = None if given_N is None else given_N.data_ptr()
        while True:
            status = _library.meshrec_index_insert(
                self._addresses, self.seed, ids_N.data_ptr(), len(ids_N), given, slots.data_ptr()
            )
            if status != Status.NO_BUCKETS:
                return Status(status) if status else slots
            self._set_room(2 * self._room, int(self.memory[0][_SLOT_ROOM]), reserved=False)

    def remove(self, ids_N: Tensor) -> Tensor | Status:
        """Remove IDs; return the slots that they had, or why nothing has changed."""
        assert _library is not None
        slots = torch.empty_like(ids_N)
        status = _library.meshrec_index_remove(
            self._addresses, self.seed, ids_N.data_ptr(), len(ids_N), slots.data_ptr()
        )
        return Status(status) if status else slots

    def ids_of(self, slots_N: Tensor) -> Tensor | Status:
        """Return the IDs of slots, or why there is none."""
        assert _library is not None
        ids = torch.empty_like(slots_N)
        status = _library.meshrec_index_ids_of(
            self._addresses, self.seed, slots_N.data_ptr(), len(slots_N), ids.data_ptr()
        )
        return Status(status) if status else ids

    def items(self) -> tuple[Tensor, Tensor]:
        assert _library is not None
        ids, slots = torch.empty(2, self.num_live, dtype=torch.int64)
        _library.meshrec_index_items(self._addresses, self.seed, ids.data_ptr(), slots.data_ptr())
        ids, order = ids.sort()
        return ids, slots[order]

    def marked(self, marks: Tensor, most: int) -> tuple[Tensor, Tensor]:
        assert _library is not None
        ids, slots = torch.empty(2, self.num_live, dtype=torch.int64)
        count = _library.meshrec_index_marked(
            self._addresses, self.seed, marks.data_ptr(), most, ids.data_ptr(), slots.data_ptr()
        )
        return ids[:count], slots[:count]

    def give_args(
        self, ids_N: Tensor, slots_N: Tensor, found: Tensor, mix_seed: int | None, first: int
    ) -> GiveArgs:
        """Return what ``give`` takes for this index; ``found``: int64 [3, number of IDs without a slot]."""
        word = (1 << 64) - 1
        return GiveArgs(
            self._addresses,
            self.seed & word,
            ids_N.data_ptr(),
            len(ids_N),
            int(mix_seed is not None),
            (mix_seed or 0) & word,
            first & word,
            slots_N.data_ptr(),
            found.shape[1],
            found.data_ptr(),
            0,
        )

    @property
    def _room(self) -> int:
        return int(self._words[_ROOM])

    def _set_room(self, room: int, slot_room: int, *, reserved: bool) -> bool:
        """Give the index memory for so many buckets of a shard and so many slots, and copy what it has.

        Args:
            room: the buckets of a shard.
            slot_room: the number of slots.
            reserved: return False where the system does not reserve the address space.
        """
        header, buckets, tags, free = self.memory
        num_shards, old_words = 1 << int(header[_SHARD_BITS]), -(-int(header[_SLOT_ROOM]) // 64)
        num_words = -(-slot_room // 64)
        free_bytes = 8 * (num_words + num_words // 64 + 1)
        sizes: list[tuple[int, ...]] = [(num_shards, room, _BUCKET_BYTES), (_TAG_BYTES * slot_room + 1,)]
        sizes.append((free_bytes,))
        new = []
        for size in sizes:
            memory = (
                reserve_pages(size, torch.uint8, None) if reserved else torch.zeros(size, dtype=torch.uint8)
            )
            if memory is None:
                return False
            new.append(memory)
        if buckets.numel():
            new[0][:, : self._room] = buckets
            new[1][: len(tags)] = tags
            new[2][: 8 * old_words] = free[: 8 * old_words]
            summary = free[8 * old_words :]
            new[2][8 * num_words :][: len(summary)] = summary
        header[_ROOM], header[_SLOT_ROOM] = room, slot_room
        self.memory = [header, *new]
        self._addresses = _pointers(*(each.data_ptr() for each in self.memory))
        return True


def give(arguments: Sequence[GiveArgs]) -> list[int]:
    """Insert the IDs without a slot in indexes, each of which occurs once, and write their slots.

    Returns:
        For each index, the number of distinct IDs that it has inserted; -1 where nothing has changed, because
        the index needs other memory first, or has no room.
    """
    assert _library is not None
    all_of_them = (GiveArgs * len(arguments))(*arguments)
    _library.meshrec_index_give(all_of_them, len(arguments))
    return [each.num_found for each in all_of_them]


def free(indexes: Sequence[CompiledIndex], slots: Sequence[Tensor]) -> list[Tensor | Status]:
    """Remove the IDs of slots in indexes, each of which occurs once.

    Returns:
        The IDs of each index. If a slot is refused, no index has changed, and there is a status for each:
        ``Status.DONE`` where the slots of the index itself are right.
    """
    assert _library is not None
    ids = [torch.empty_like(own) for own in slots]
    arguments = (FreeArgs * len(indexes))()
    for each, index, own, to in zip(arguments, indexes, slots, ids, strict=True):
        each.memory, each.seed = index._addresses, index.seed
        each.slots, each.count, each.ids = own.data_ptr(), len(own), to.data_ptr()
        each.status = Status.NO_MEMORY
    _library.meshrec_index_free(arguments, len(indexes))
    found = [Status(each.status) for each in arguments]
    return list(found) if any(found) else list(ids)
