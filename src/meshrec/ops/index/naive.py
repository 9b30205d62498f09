"""Hash index as a Python dict, ID hashing, and distinct IDs, in plain torch.

The reference for the kernels, and the fallback without them. Shape legend: N IDs or slots.
"""

import heapq
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from meshrec.ops.library import implement

# Constants of splitmix64.
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1, _MULTIPLIER_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_WORD = (1 << 64) - 1


def mix(ids_N: Tensor, seed: int) -> Tensor:
    """Hash IDs to pseudo-random 64-bit keys. For any seed, different IDs have different keys.

    The splitmix64 finalizer: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).

    Args:
        seed: any integer; only the low 64 bits matter.

    Returns:
        Keys, int64 [N].
    """
    mixed = ids_N + _signed(_GAMMA * (seed + 1))
    mixed = (mixed ^ _shift_right(mixed, 30)) * _signed(_MULTIPLIER_1)
    mixed = (mixed ^ _shift_right(mixed, 27)) * _signed(_MULTIPLIER_2)
    return mixed ^ _shift_right(mixed, 31)


def unmix(keys_N: Tensor, seed: int) -> Tensor:
    """Invert `mix`: return the IDs that have the given keys, int64 [N]."""
    # The steps of `mix` in reverse order. Odd factors have an inverse modulo 2^64.
    ids = _invert_xorshift(keys_N, 31) * _signed(pow(_MULTIPLIER_2, -1, 1 << 64))
    ids = _invert_xorshift(ids, 27) * _signed(pow(_MULTIPLIER_1, -1, 1 << 64))
    return _invert_xorshift(ids, 30) - _signed(_GAMMA * (seed + 1))


def _signed(bits: int) -> int:
    """Return the int64 with the same low 64 bits as an integer of any size."""
    return ((bits & _WORD) ^ (1 << 63)) - (1 << 63)


def _shift_right(bits: Tensor, by: int) -> Tensor:
    """Shift right and fill with zeros, as if int64 were unsigned."""
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _invert_xorshift(mixed: Tensor, by: int) -> Tensor:
    """Return the x for which ``x ^ (x >> by)`` is the given value."""
    bits = mixed
    # Each pass recovers ``by`` more bits, starting at the top bits, which the shift left unchanged.
    for _ in range(64 // by):
        bits = mixed ^ _shift_right(bits, by)
    return bits


def index_mix(ids_N: Tensor, seed: int, inverse: bool) -> Tensor:
    """Return ``mix(ids_N, seed)``, or with ``inverse``, ``unmix(ids_N, seed)``. Reference for the kernel.

    Args:
        ids_N: int64.
        seed: any int64.
        inverse: whether ``ids_N`` are keys to map back to IDs.
    """
    return unmix(ids_N, seed) if inverse else mix(ids_N, seed)


def index_order(ids_N: Tensor) -> Tensor:
    """Return the permutation that sorts distinct IDs in ascending order (argsort), int64 [N]."""
    return ids_N.argsort()


def index_unique(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs in ascending order, and the index of each ID among them, int64 [N]."""
    distinct, inverse = torch.unique(ids_N, return_inverse=True)
    return distinct, inverse


def index_find(memory: list[Tensor], ids_N: Tensor, seed: int) -> Tensor:
    """Return the slot for each ID, searched in the memory of a compiled index; -1 for an ID without a slot.

    [Note: the hash index] in csrc/index/shard.h describes the memory layout.

    Args:
        memory: header, buckets, tags and free slots.
        ids_N: int64.
        seed: index seed.
    """
    header, buckets = memory[0], memory[1].flatten()
    shard_bits, room = int(header[3]), int(header[4])
    keys = mix(ids_N, seed)
    shards = _shift_right(keys, 64 - shard_bits) if shard_bits else torch.zeros_like(keys)
    # Eight header words, then four words per shard.
    _, before, after, moved = header[8:].view(-1, 4)[shards].unbind(1)
    # The high bits select the shard. The remaining bits, as a fraction of 2^64, select the bucket.
    fractions = keys << shard_bits
    old, new = _scale_fraction(fractions, before), _scale_fraction(fractions, after)
    # While a shard grows in place, buckets from ``moved`` on already have their new position.
    bucket = shards * room + torch.where(old >= moved, new, old)
    slots, pending = torch.full_like(keys, -1), torch.arange(len(keys), device=keys.device)
    while len(pending):
        # A bucket is a cache line: 7 entries with 8 low bytes (key remainder and slot) and 1 high byte, then
        # a byte with the entry count (3 bits) and the extra slot bit count (5 bits).
        bytes_N = buckets.view(-1, 64)[bucket[pending]]
        extra, count = bytes_N[:, 63].long() >> 3, bytes_N[:, 63].long() & 7
        low, high = bytes_N[:, :56].contiguous().view(torch.int64), bytes_N[:, 56:63].long()
        # The highest ``extra`` bits of ``low`` belong to the slot. The shift drops them.
        equal = ((low ^ keys[pending, None]) << extra[:, None]) == 0
        equal &= torch.arange(7, device=keys.device) < count[:, None]
        # At most one entry matches.
        is_match, entry = equal.max(1)
        # Two shifts, because ``extra`` may be 0, and a shift by 64 is undefined.
        entry_slots = (high << extra[:, None]) | (_shift_right(low, 1) >> (63 - extra[:, None]))
        entry_slots = entry_slots.gather(1, entry[:, None])[:, 0]
        slots[pending] = torch.where(is_match, entry_slots, slots[pending])
        bucket += 1
        # A full bucket may have overflowed into the next one.
        pending = pending[~is_match & (count == 7)]
    return slots


def index_mix_parts(ids_N: Tensor, starts: list[int], ends: list[int], seeds: list[int]) -> Tensor:
    """Hash the IDs in some spans with a seed per span, and copy the IDs outside the spans.

    Args:
        starts: start position per span, ascending.
        ends: end position per span, exclusive.
    """
    mixed = ids_N.clone()
    for start, end, seed in zip(starts, ends, seeds, strict=True):
        mixed[start:end] = mix(ids_N[start:end], seed)
    return mixed


def index_find_parts(
    memory: list[Tensor],
    seeds: list[int],
    ids_N: Tensor,
    starts: list[int],
    ends: list[int],
    indexes: list[int],
    firsts: list[int],
    mixes: list[int],
) -> tuple[Tensor, Tensor]:
    """Replace the IDs inside some spans by their slots, and count the IDs without a slot in each span.

    An ID is searched as ``mix(id, mixes[span]) + firsts[span]``, or as ``id + firsts[span]`` without
    ``mixes``.

    Args:
        memory: four tensors per index, see ``index_find``.
        starts: start position per span, ascending.
        ends: end position per span, exclusive.
        indexes: number of the index to search, per span.
        firsts: number to add to the IDs after the mix, per span.
        mixes: mix seed per span; empty: no mix.

    Returns:
        Slots inside spans (-1 for an ID without a slot) and unchanged IDs elsewhere, int64 [N]; and per span
            the number of IDs without a slot, int64.
    """
    result, absent = ids_N.clone(), ids_N.new_zeros(len(starts))
    for part, (start, end) in enumerate(zip(starts, ends, strict=True)):
        ids = mix(ids_N[start:end], mixes[part]) if mixes else ids_N[start:end]
        index = indexes[part]
        slots = index_find(memory[4 * index : 4 * index + 4], ids + firsts[part], seeds[index])
        result[start:end] = slots
        absent[part] = (slots < 0).sum()
    return result, absent


def _scale_fraction(fractions: Tensor, sizes: Tensor) -> Tensor:
    """Return floor(fraction * size / 2^64), with the fractions read as unsigned integers."""
    # The product has up to 96 bits, so multiply the two halves of the fraction separately.
    low = (fractions & 0xFFFFFFFF) * sizes
    return _shift_right(_shift_right(fractions, 32) * sizes + _shift_right(low, 32), 32)


class Status(IntEnum):
    """Outcome of a call: SUCCESS, or the reason why it changed nothing. As in csrc/index/hash_index.h."""

    NO_MEMORY = -1
    SUCCESS = 0
    NOT_ASCENDING = 1
    PRESENT = 2
    FULL = 3
    NO_BUCKETS = 4
    CROWDED = 5
    ABSENT = 6
    REPEATS = 7
    FREE = 8


class NaiveIndex:
    """Map from IDs to slots as a Python dict; the index without compiled kernels.

    ``HashIndex`` documents the methods. Failed calls return a ``Status`` and change nothing.
    """

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._slots: dict[int, int] = {}
        self._ids: list[int | None] = []  # by slot; None where it is free
        self._free: list[int] = []  # a heap with the free slots below len(_ids)

    @property
    def num_live(self) -> int:
        """Number of IDs with a slot."""
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Approximate memory in bytes."""
        # A dict entry (24 bytes, two thirds full), two int objects (32 bytes), and a list pointer.
        return 100 * len(self._slots) + 8 * len(self._ids)

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot for each ID, or -1 for an ID without a slot: int64 [N]."""
        slots = [self._slots.get(id, -1) for id in ids_N.tolist()]
        return torch.tensor(slots, dtype=torch.int64)

    def insert(self, ids_N: Tensor, given_N: Tensor | None = None) -> Tensor | Status:
        """Insert IDs, and return their slots. If that fails, return a status and change nothing.

        Args:
            ids_N: int64, distinct and ascending.
            given_N: free slots to assign to the IDs, int64 [N]. None: the lowest free slots.
        """
        # All checks come first: a failed call changes nothing.
        if bool((ids_N[1:] <= ids_N[:-1]).any()):
            return Status.NOT_ASCENDING
        ids = ids_N.tolist()
        if any(id in self._slots for id in ids):
            return Status.PRESENT
        # Without given slots, the lowest free slots are filled first, so the count of IDs is what matters.
        end = len(self._slots) + len(ids) if given_N is None else max(given_N.tolist(), default=-1) + 1
        if end > self._max_slots:
            return Status.FULL
        slots = self._lowest_free(len(ids)) if given_N is None else given_N.tolist()
        # Make room up to the highest slot.
        for slot in range(len(self._ids), max(slots, default=-1) + 1):
            self._ids.append(None)
            if given_N is not None:
                heapq.heappush(self._free, slot)
        for id, slot in zip(ids, slots, strict=True):
            self._ids[slot], self._slots[id] = id, slot
        if given_N is not None:
            # Given slots may lie anywhere, so rebuild the heap from the slots still free.
            self._free = [slot for slot in sorted(self._free) if self._ids[slot] is None]
        return torch.tensor(slots, dtype=torch.int64)

    def _lowest_free(self, count: int) -> list[int]:
        """Return the lowest free slots: first those that were freed, then new slots after the highest."""
        # The heap only has slots below len(_ids), so these are the lowest.
        slots = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        return slots + list(range(len(self._ids), len(self._ids) + count - len(slots)))

    def remove(self, ids_N: Tensor) -> Tensor | Status:
        """Remove IDs, and return their slots. If that fails, return a status and change nothing."""
        ids = ids_N.tolist()
        if any(id not in self._slots for id in ids):
            return Status.ABSENT
        if len(set(ids)) < len(ids):
            return Status.REPEATS
        slots = [self._slots.pop(id) for id in ids]
        for slot in slots:
            self._ids[slot] = None
            heapq.heappush(self._free, slot)
        return torch.tensor(slots, dtype=torch.int64)

    def ids_of(self, slots_N: Tensor) -> Tensor | Status:
        """Return the ID stored in each slot, int64 [N]; ``Status.FREE`` if any slot holds no ID."""
        ids = [self._ids[slot] if 0 <= slot < len(self._ids) else None for slot in slots_N.tolist()]
        return Status.FREE if None in ids else torch.tensor(ids, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        """Highest slot ever assigned, plus 1."""
        return len(self._ids)

    def marked(self, marks: Tensor, max_id: int) -> tuple[Tensor, Tensor]:
        """Return the IDs that have a marked slot, and these slots; see ``HashIndex.marked``."""
        ids, slots = self.items()
        selected = marks[slots] & (ids <= max_id)
        return ids[selected], slots[selected]

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all IDs in ascending order, and their slots: both int64 [num_live]."""
        ids = sorted(self._slots)
        slots = [self._slots[id] for id in ids]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)


def free(indexes: Sequence[NaiveIndex], slots: Sequence[Tensor]) -> list[Tensor | Status]:
    """Free slots in several indexes; see ``compiled.free``."""
    results = [index.ids_of(index_slots) for index, index_slots in zip(indexes, slots, strict=True)]
    # Check all indexes before any of them changes.
    for number, index_slots in enumerate(slots):
        if isinstance(results[number], Tensor) and len(set(index_slots.tolist())) < len(index_slots):
            results[number] = Status.REPEATS
    if not all(isinstance(ids, Tensor) for ids in results):
        return [ids if isinstance(ids, Status) else Status.SUCCESS for ids in results]
    for index, ids in zip(indexes, results, strict=True):
        assert isinstance(ids, Tensor)
        index.remove(ids)
    return results


implement([index_mix, index_order, index_unique, index_find, index_mix_parts, index_find_parts])
