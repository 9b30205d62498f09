"""The hash index with a Python dict, the mix of IDs and the distinct IDs of a batch, in plain torch: the
reference for the kernels, and the fallback without them.

Shape legend: N IDs or slots.
"""

import heapq

import torch
from torch import Tensor

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


class NaiveIndex:
    """The slots of IDs, in a Python dict; see ``HashIndex``."""

    def __init__(self, max_slots: int) -> None:
        self.max_slots = max_slots
        self._slots: dict[int, int] = {}
        self._ids: list[int | None] = []  # by slot; None where it is free
        self._free: list[int] = []  # a heap of the free slots below len(_ids)

    @property
    def num_live(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        # A dict's entry of 24 bytes at two thirds of its room, two int objects of 32, and the list's pointer.
        return 104 * len(self._slots) + 8 * len(self._ids)

    def find(self, ids_N: Tensor) -> Tensor:
        slots = [self._slots.get(each, -1) for each in ids_N.tolist()]
        return torch.tensor(slots, dtype=torch.int64)

    def insert(self, ids_N: Tensor) -> Tensor:
        slots = []
        for each in ids_N.tolist():
            slot = heapq.heappop(self._free) if self._free else len(self._ids)
            if slot == len(self._ids):
                self._ids.append(None)
            self._ids[slot], self._slots[each] = each, slot
            slots.append(slot)
        return torch.tensor(slots, dtype=torch.int64)

    def restore(self, ids_N: Tensor, slots_N: Tensor) -> None:
        self._slots = dict(zip(ids_N.tolist(), slots_N.tolist(), strict=True))
        self._ids = [None] * (max(self._slots.values(), default=-1) + 1)
        for each, slot in self._slots.items():
            self._ids[slot] = each
        self._free = [slot for slot, each in enumerate(self._ids) if each is None]

    def remove(self, ids_N: Tensor) -> Tensor:
        slots = []
        for each in ids_N.tolist():
            slot = self._slots.pop(each)
            self._ids[slot] = None
            heapq.heappush(self._free, slot)
            slots.append(slot)
        return torch.tensor(slots, dtype=torch.int64)

    def ids_of(self, slots_N: Tensor) -> Tensor:
        return torch.tensor([self._ids[slot] for slot in slots_N.tolist()], dtype=torch.int64)

    def is_live(self, slots_N: Tensor) -> Tensor:
        size = len(self._ids)
        live = [0 <= slot < size and self._ids[slot] is not None for slot in slots_N.tolist()]
        return torch.tensor(live, dtype=torch.bool)

    def items(self) -> tuple[Tensor, Tensor]:
        ids = sorted(self._slots)
        slots = [self._slots[each] for each in ids]
        return torch.tensor(ids, dtype=torch.int64), torch.tensor(slots, dtype=torch.int64)
