"""Hash index from 64-bit IDs to slots, and operators on ID batches: mixing, sorting and distinct IDs.

A hashed table accepts any 64-bit ID. The index assigns a slot, which is a row number in the table, to each
ID that has a row.
"""

from collections.abc import Sequence

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.index import fakes  # noqa: F401 - registers the shapes
from meshrec.ops.index.hash_index import (
    AssignedSlots,
    HashIndex,
    IdSpan,
    UnassignedIds,
    assign_slots,
    find_spans,
    free_slots,
)
from meshrec.ops.index.slots import Fills, bits_of

__all__ = [
    "BYTES_PER_ID",
    "AssignedSlots",
    "Fills",
    "HashIndex",
    "IdSpan",
    "UnassignedIds",
    "assign_slots",
    "bits_of",
    "find_spans",
    "first_left",
    "free_slots",
    "marked_between",
    "marked_histogram",
    "marked_range",
    "mix",
    "mix_spans",
    "order",
    "release_slots",
    "unique",
    "unmix",
]

# The kernels, or without them the functions in marked.py and slots.py, which document the arguments.
marked_range = operators.marked_range
marked_histogram = operators.marked_histogram
marked_between = operators.marked_between
first_left = operators.first_left
release_slots = operators.release_slots

BYTES_PER_ID = 16
"""Upper bound for ``HashIndex`` memory in bytes per ID, counting the most IDs ever present at once."""


def mix(ids_N: Tensor, seed: int) -> Tensor:
    """Hash IDs to pseudo-random 64-bit keys. For any seed, different IDs have different keys.

    The hash is a permutation of the 2^64 values, so `unmix` can invert it.

    Args:
        ids_N: int64.
        seed: any integer; only the low 64 bits matter.

    Returns:
        Keys, int64 [N].
    """
    keys: Tensor = operators.index_mix(ids_N, _signed(seed), False)
    return keys


def mix_spans(ids_N: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
    """Return a copy of some IDs, int64 [N], in which the IDs inside some spans are replaced by their hashes.

    A span is a range of positions. It has a seed for `mix`.

    Args:
        ids_N: int64.
        spans: start, end (exclusive) and mix seed per span, in ascending order.
    """
    # The operator takes a list per field.
    starts, ends, seeds = ([span[k] for span in spans] for k in range(3))
    mixed: Tensor = operators.index_mix_parts(ids_N, starts, ends, list(map(_signed, seeds)))
    return mixed


def unmix(keys_N: Tensor, seed: int) -> Tensor:
    """Invert `mix`: return the IDs that have the given keys, int64 [N]."""
    ids: Tensor = operators.index_mix(keys_N, _signed(seed), True)
    return ids


def unique(ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct IDs, and for each ID its index among them.

    IDs [7, 3, 7] give distinct IDs [3, 7] and indices [1, 0, 1]. The result does not depend on the thread
    count.

    Returns:
        Distinct IDs in ascending order, int64; and the index of each ID among them, int64 [N].
    """
    distinct, inverse = operators.index_unique(ids_N)
    return distinct, inverse


def order(ids_N: Tensor) -> Tensor:
    """Return the permutation that sorts distinct IDs in ascending order (argsort), int64 [N]."""
    positions: Tensor = operators.index_order(ids_N)
    return positions


def _signed(seed: int) -> int:
    """Return the int64 with the same low 64 bits."""
    return ((seed & ((1 << 64) - 1)) ^ (1 << 63)) - (1 << 63)
