"""The hash index: slots of any 64-bit IDs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.index.naive import NaiveIndex


class HashIndex:
    """The slots of IDs, for tables whose IDs nobody can number.

    IDs are int64, and all 2^64 values are valid: none is reserved. The same calls in the same order give the
    same slots, whatever the number of threads.

    Args:
        max_slots: the number of slots that there may ever be.
        seed: the seed of the mix that spreads the IDs.
        name: what messages call the index.
    """

    def __init__(self, max_slots: int, *, seed: int = 0, name: str = "the index") -> None:
        if not 0 < max_slots < 1 << 32:
            raise ValueError(f"{name}: max_slots is {max_slots}; it must lie in [1, 2^32).")
        self.max_slots, self.seed, self.name = max_slots, seed, name
        self._rows = NaiveIndex(max_slots)

    @property
    def num_live(self) -> int:
        """The number of IDs that have a slot."""
        return self._rows.num_live

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that the index takes."""
        return self._rows.num_bytes

    def find(self, ids_N: Tensor) -> Tensor:
        """Return the slot of each ID, -1 where it has none: int64 [N]. IDs may repeat."""
        return self._rows.find(self._checked(ids_N))

    def insert(self, ids_N: Tensor) -> Tensor:
        """Give new IDs the lowest free slots, in the order of the IDs.

        Args:
            ids_N: int64, distinct and ascending, none of them in the index.

        Returns:
            The slots, int64 [N].

        Raises:
            ValueError: the IDs are not ascending, one is in the index, or there are fewer free slots than
                IDs. Nothing has changed then.
        """
        ids_N = self._checked(ids_N)
        if bool((ids_N[1:] <= ids_N[:-1]).any()):
            raise ValueError(f"{self.name}: the IDs to insert must be distinct and ascending; use unique().")
        present = ids_N[self.find(ids_N) >= 0]
        if len(present):
            raise ValueError(f"{self.name} has ID {int(present[0])}; insert only IDs that find() misses.")
        if self.num_live + len(ids_N) > self.max_slots:
            raise ValueError(
                f"{self.name} would have {self.num_live + len(ids_N):,} IDs, and there is room for "
                f"{self.max_slots:,}. Raise the greatest number of rows, or let rows be evicted."
            )
        return self._rows.insert(ids_N)

    def remove(self, ids_N: Tensor) -> Tensor:
        """Take IDs out of the index and free their slots.

        Args:
            ids_N: int64, distinct, each of them in the index.

        Returns:
            The slots that they had, int64 [N].

        Raises:
            ValueError: an ID is not in the index, or repeats. Nothing has changed then.
        """
        ids_N = self._checked(ids_N)
        slots = self.find(ids_N)
        if bool((slots < 0).any()):
            raise ValueError(f"{self.name} has no ID {int(ids_N[slots < 0][0])}, so it cannot be removed.")
        if len(torch.unique(slots)) < len(slots):
            raise ValueError(f"{self.name}: the IDs to remove must be distinct; use unique().")
        return self._rows.remove(ids_N)

    def ids_of(self, slots_N: Tensor) -> Tensor:
        """Return the ID that has each slot, int64 [N].

        Raises:
            ValueError: a slot is free.
        """
        slots_N = self._checked(slots_N)
        live = self._rows.is_live(slots_N)
        if not bool(live.all()):
            raise ValueError(f"{self.name}: slot {int(slots_N[~live][0])} is free.")
        return self._rows.ids_of(slots_N)

    def items(self) -> tuple[Tensor, Tensor]:
        """Return all IDs in ascending order, and their slots: int64 [num_live] each."""
        return self._rows.items()

    def _checked(self, integers_N: Tensor) -> Tensor:
        if integers_N.dtype != torch.int64 or integers_N.dim() != 1 or not integers_N.is_cpu:
            raise ValueError(
                f"{self.name} takes int64 tensors [N] on the CPU; this one is {integers_N.dtype} "
                f"{list(integers_N.shape)} on {integers_N.device}."
            )
        return integers_N

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Copy and pickle the IDs and their slots, not the memory."""
        return _restored, (self.max_slots, self.seed, self.name, *self.items())


def _restored(max_slots: int, seed: int, name: str, ids: Tensor, slots: Tensor) -> HashIndex:
    index = HashIndex(max_slots, seed=seed, name=name)
    index._rows.restore(ids, slots)
    return index
