"""Slots of IDs that nobody can number: a hash index, a mix of IDs, and the distinct IDs of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from meshrec.ops.index import fakes  # noqa: F401 - registers the shapes
from meshrec.ops.index.hash_index import (
    GivenSlots,
    HashIndex,
    SearchedPart,
    UnseenIds,
    find_parts,
    free_slots,
    give_slots,
)
from meshrec.ops.index.slots import Fills, bits_of

__all__ = [
    "BYTES_PER_ID",
    "Fills",
    "GivenSlots",
    "HashIndex",
    "SearchedPart",
    "UnseenIds",
    "bits_of",
    "find_parts",
    "first_left",
    "free_slots",
    "give_slots",
    "marked_between",
    "marked_histogram",
    "marked_range",
    "mix",
    "mix_parts",
    "order",
    "release_slots",
    "unique",
    "unmix",
]

# The kernels, or what marked.py and slots.py have in their place, with the same arguments.
marked_range = torch.ops.meshrec.marked_range.default
marked_histogram = torch.ops.meshrec.marked_histogram.default
marked_between = torch.ops.meshrec.marked_between.default
first_left = torch.ops.meshrec.first_left.default
release_slots = torch.ops.meshrec.release_slots.default

BYTES_PER_ID = 16
"""The bytes that a ``HashIndex`` takes for each ID that it has had at once, at most."""


def mix(ids_N: Tensor, seed: int) -> Tensor:
    """Return 64 pseudo-random bits for each ID; each seed gives another permutation of all 2^64 values.

    Args:
        ids_N: int64.
        seed: any integer; its low 64 bits count.

    Returns:
        The keys, int64 [N].
    """
    keys: Tensor = torch.ops.meshrec.index_mix.default(ids_N, _signed(seed), False)
    return keys


def mix_parts(ids_N: Tensor, parts: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return IDs of which some parts are mixed, and the others as they are, int64 [N].

    Args:
        ids_N: int64.
        parts: where each part begins and ends, and the seed of its mix; ascending.
    """
    begins, ends, seeds = ([part[k] for part in parts] for k in range(3))
    found: Tensor = torch.ops.meshrec.index_mix_parts.default(ids_N, begins, ends, list(map(_signed, seeds)))
    return found


def unmix(keys_N: Tensor, seed: int) -> Tensor:
    """Return the IDs whose mix the keys are, int64 [N]."""
    ids: Tensor = torch.ops.meshrec.index_mix.default(keys_N, _signed(seed), True)
    return ids


def unique(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs in ascending order, int64, and the position of each ID among them, int64 [N].

    The result does not depend on the number of threads.
    """
    distinct, inverse = torch.ops.meshrec.index_unique.default(ids_N)
    return distinct, inverse


def order(ids_N: Tensor) -> Tensor:
    """Return the positions of distinct IDs in ascending order, int64 [N]."""
    positions: Tensor = torch.ops.meshrec.index_order.default(ids_N)
    return positions


def _signed(seed: int) -> int:
    return ((seed & ((1 << 64) - 1)) ^ (1 << 63)) - (1 << 63)
