"""Indexes: where in memory the row of a key lies, for tables whose slot is not simply ``key - r0``."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor


class Index(Protocol):
    """The slots of the keys of one rectangle.

    The slot of a key must depend on the key alone: replicas, other ranks and checkpoints find rows by slot.
    """

    def resolve(self, keys: Tensor, *, train: bool) -> Tensor:
        """Return the slot of each key of the whole table, in [0, rows in memory).

        Args:
            keys: int64 [N], keys within the rectangle's rows; they may repeat.
            train: whether the rows will be updated.

        Returns: int64 [N].
        """


def slots_of(
    values: Tensor,
    bounds: Sequence[int],
    readers: Mapping[int, tuple[Index, int]],
    *,
    num_keys: int,
    train: bool,
) -> Tensor:
    """Replace the keys of some features by slots; each index is asked once.

    Args:
        values: int [N], block-major: the IDs of feature 0 of block 0, of feature 1, and so on; each counted
            from the first row of its rectangle.
        bounds: where the IDs of each feature of each block begin, and N.
        readers: by feature, the index that it reads and the first row of its rectangle.
        num_keys: the number of features of a block.
        train: whether the rows will be updated.

    Returns: [N], of the type of ``values``.
    """
    found = values.clone()
    num_blocks = (len(bounds) - 1) // max(1, num_keys)
    by_index: dict[int, list[int]] = {}
    for key, (index, _) in readers.items():
        by_index.setdefault(id(index), []).append(key)
    for keys in by_index.values():
        index, first = readers[keys[0]]
        places = [block * num_keys + key for key in keys for block in range(num_blocks)]
        parts = [found[bounds[place] : bounds[place + 1]] for place in places]
        slots = index.resolve(torch.cat(parts).long() + first, train=train)
        for part, own in zip(parts, slots.split([len(part) for part in parts]), strict=True):
            part.copy_(own)
    return found
