"""The hash index with a Python dict, the mix of IDs and the distinct IDs of a batch, in plain torch: the
reference for the kernels, and the fallback without them.

Shape legend: N IDs or slots.
"""

import heapq
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

from meshrec.ops.library import implement

_STEP = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_ALL = (1 << 64) - 1


def mix(ids_N: Tensor, seed: int) -> Tensor:
    """Return 64 pseudo-random bits for each ID; each seed gives another permutation of all 2^64 values.

    The finalizer of splitmix64: Steele, Lea, Flood, "Fast splittable pseudorandom number generators" (2014).

    Args:
        ids_N: int64.
        seed: any integer; its low 64 bits count.

    Returns: int64 [N].
    """
    mixed = ids_N + _signed(_STEP * (seed + 1))
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(_FIRST)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(_SECOND)
    return mixed ^ _shifted(mixed, 31)


def unmix(keys_N: Tensor, seed: int) -> Tensor:
    """Return the IDs whose mix the keys are."""
    ids = _unshifted(keys_N, 31) * _signed(pow(_SECOND, -1, 1 << 64))
    ids = _unshifted(ids, 27) * _signed(pow(_FIRST, -1, 1 << 64))
    return _unshifted(ids, 30) - _signed(_STEP * (seed + 1))


def unique(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs in ascending order, and the position of each ID among them, int64 [N]."""
    distinct, inverse = torch.unique(ids_N, return_inverse=True)
    return distinct, inverse


def _signed(bits: int) -> int:
    return ((bits & _ALL) ^ (1 << 63)) - (1 << 63)


def _shifted(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)


def _unshifted(mixed: Tensor, by: int) -> Tensor:
    """Invert ``x ^ (x >> by)``."""
    found = mixed
    for _ in range(64 // by):
        found = mixed ^ _shifted(found, by)
    return found


def index_mix(ids_N: Tensor, seed: int, inverse: bool) -> Tensor:
    """Return the mix of IDs, or the IDs of a mix."""
    return unmix(ids_N, seed) if inverse else mix(ids_N, seed)


def index_order(ids_N: Tensor) -> Tensor:
    """Return the positions of distinct IDs in ascending order, int64 [N]."""
    return ids_N.argsort()


def index_unique(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Implement the op ``index_unique``; see ``unique``."""
    return unique(ids_N)


def index_find(memory: list[Tensor], ids_N: Tensor, seed: int) -> Tensor:
    """Return the slots of IDs in an index of the kernels, -1 where there is none.

    Args:
        memory: the tensors that `csrc/index/shard.h` describes: header, buckets, tags, free slots.
        ids_N: int64.
        seed: the seed of the index.
    """
    header, buckets = memory[0], memory[1].flatten()
    shard_bits, room = int(header[3]), int(header[4])
    keys = mix(ids_N, seed)
    shards = _shifted(keys, 64 - shard_bits) if shard_bits else torch.zeros_like(keys)
    _, before, after, moved = header[8:].view(-1, 4)[shards].unbind(1)
    fractions = keys << shard_bits
    old, now = _scaled(fractions, before), _scaled(fractions, after)
    at = shards * room + torch.where(old >= moved, now, old)
    slots, searched = torch.full_like(keys, -1), torch.arange(len(keys), device=keys.device)
    while len(searched):
        bytes_N = buckets.view(-1, 64)[at[searched]]
        extra, count = bytes_N[:, 63].long() >> 3, bytes_N[:, 63].long() & 7
        low, high = bytes_N[:, :56].contiguous().view(torch.int64), bytes_N[:, 56:63].long()
        equal = ((low ^ keys[searched, None]) << extra[:, None]) == 0
        equal &= torch.arange(7, device=keys.device) < count[:, None]
        found, entry = equal.max(1)
        own = (high << extra[:, None]) | (_shifted(low, 1) >> (63 - extra[:, None]))
        own = own.gather(1, entry[:, None])[:, 0]
        slots[searched] = torch.where(found, own, slots[searched])
        at += 1
        searched = searched[~found & (count == 7)]
    return slots


def index_mix_parts(ids_N: Tensor, begins: list[int], ends: list[int], seeds: list[int]) -> Tensor:
    """Return IDs of which some parts are mixed, each with a seed of its own, and the others as they are.

    Args:
        ids_N: int64.
        begins: where each part begins, ascending.
        ends: where it ends.
        seeds: the seed of its mix.
    """
    found = ids_N.clone()
    for begin, end, seed in zip(begins, ends, seeds, strict=True):
        found[begin:end] = mix(ids_N[begin:end], seed)
    return found


def index_find_parts(
    memory: list[Tensor],
    seeds: list[int],
    ids_N: Tensor,
    begins: list[int],
    ends: list[int],
    indexes: list[int],
    firsts: list[int],
    mixes: list[int],
) -> tuple[Tensor, Tensor]:
    """Replace the IDs of some parts by their slots, and count in each part the IDs that have no slot.

    Args:
        memory: the four tensors of each index, see ``index_find``.
        seeds: the seed of each index.
        ids_N: int64.
        begins: where each part begins, ascending.
        ends: where it ends.
        indexes: the index that has its IDs.
        firsts: what is added to its IDs.
        mixes: the seed with which its IDs are mixed before; empty: they are not.
    """
    found, absent = ids_N.clone(), ids_N.new_zeros(len(begins))
    for part, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        own = mix(ids_N[begin:end], mixes[part]) if mixes else ids_N[begin:end]
        index = indexes[part]
        slots = index_find(memory[4 * index : 4 * index + 4], own + firsts[part], seeds[index])
        found[begin:end] = slots
        absent[part] = (slots < 0).sum()
    return found, absent


def _scaled(fractions: Tensor, sizes: Tensor) -> Tensor:
    """Return floor(fraction * size / 2^64) of unsigned fractions."""
    low = (fractions & 0xFFFFFFFF) * sizes
    return _shifted(_shifted(fractions, 32) * sizes + _shifted(low, 32), 32)


class Status(IntEnum):
    """Why a call changed nothing, or returned nothing."""

    NO_MEMORY = -1
    DONE = 0
    NOT_ASCENDING = 1
    PRESENT = 2
    FULL = 3
    NO_BUCKETS = 4
    CROWDED = 5
    ABSENT = 6
    REPEATS = 7
    FREE = 8


class NaiveIndex:
    """The slots of IDs, in a Python dict; see ``HashIndex``."""

    def __init__(self, max_slots: int) -> None:
        self._max_slots = max_slots
        self._slots: dict[int, int] = {}
        self._ids: list[int | None] = []  # by slot; None where it is free
        self._free: list[int] = []  # a heap of the free slots below len(_ids)

    @property
    def num_live(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        # A dict's entry of 24 bytes at two thirds of its room, two int objects of 32, and the list's pointer.
        return 100 * len(self._slots) + 8 * len(self._ids)

    def find(self, ids_N: Tensor) -> Tensor:
        slots = [self._slots.get(each, -1) for each in ids_N.tolist()]
        return torch.tensor(slots, dtype=torch.int64)

    def insert(self, ids_N: Tensor, given_N: Tensor | None = None) -> Tensor | Status:
        if bool((ids_N[1:] <= ids_N[:-1]).any()):
            return Status.NOT_ASCENDING
        ids = ids_N.tolist()
        if any(each in self._slots for each in ids):
            return Status.PRESENT
        end = len(self._slots) + len(ids) if given_N is None else max(given_N.tolist(), default=-1) + 1
        if end > self._max_slots:
            return Status.FULL
        slots = self._lowest_free(len(ids)) if given_N is None else given_N.tolist()
        for slot in range(len(self._ids), max(slots, default=-1) + 1):
            self._ids.append(None)
            if given_N is not None:
                heapq.heappush(self._free, slot)
        for each, slot in zip(ids, slots, strict=True):
            self._ids[slot], self._slots[each] = each, slot
        if given_N is not None:
            self._free = [slot for slot in sorted(self._free) if self._ids[slot] is None]
        return torch.tensor(slots, dtype=torch.int64)

    def _lowest_free(self, count: int) -> list[int]:
        slots = [heapq.heappop(self._free) for _ in range(min(count, len(self._free)))]
        return slots + list(range(len(self._ids), len(self._ids) + count - len(slots)))

    def remove(self, ids_N: Tensor) -> Tensor | Status:
        ids = ids_N.tolist()
        if any(each not in self._slots for each in ids):
            return Status.ABSENT
        if len(set(ids)) < len(ids):
            return Status.REPEATS
        slots = [self._slots.pop(each) for each in ids]
        for slot in slots:
            self._ids[slot] = None
            heapq.heappush(self._free, slot)
        return torch.tensor(slots, dtype=torch.int64)

    def ids_of(self, slots_N: Tensor) -> Tensor | Status:
        ids = [self._ids[slot] if 0 <= slot < len(self._ids) else None for slot in slots_N.tolist()]
        return Status.FREE if None in ids else torch.tensor(ids, dtype=torch.int64)

    @property
    def num_slots(self) -> int:
        return len(self._ids)

    def marked(self, marks: Tensor, most: int) -> tuple[Tensor, Tensor]:
        ids, slots = self.items()
        chosen = marks[slots] & (ids <= most)
        return ids[chosen], slots[chosen]

    def items(self) -> tuple[Tensor, Tensor]:
        ids = sorted(self._slots)
        slots = [self._slots[each] for each in ids]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)


def free(indexes: Sequence[NaiveIndex], slots: Sequence[Tensor]) -> list[Tensor | Status]:
    """Remove the IDs of slots in indexes; see ``compiled.free``."""
    found = [index.ids_of(own) for index, own in zip(indexes, slots, strict=True)]
    for number, own in enumerate(slots):
        if isinstance(found[number], Tensor) and len(set(own.tolist())) < len(own):
            found[number] = Status.REPEATS
    if not all(isinstance(own, Tensor) for own in found):
        return [own if isinstance(own, Status) else Status.DONE for own in found]
    for index, ids in zip(indexes, found, strict=True):
        assert isinstance(ids, Tensor)
        index.remove(ids)
    return found


implement([index_mix, index_order, index_unique, index_find, index_mix_parts, index_find_parts])
