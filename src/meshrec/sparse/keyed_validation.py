"""Validation of KeyedJaggedTensors: keys, strides, per-key counts, inverse indices."""

from bisect import bisect_right
from itertools import accumulate

import torch
from torch import Tensor

from meshrec.sparse.keyed_bags import KeyedBags
from meshrec.sparse.printing import is_readable
from meshrec.sparse.validation import check_bags, count_bags

_NAME = "KeyedJaggedTensor"


def check_keys_and_strides(
    keys: list[str], num_bags: int, stride: int | None, strides: list[list[int]] | Tensor | None
) -> None:
    """Check that the bag count matches the keys and strides. Reads no tensor data.

    Args:
        keys: Feature names.
        num_bags: Total bag count.
        stride: Bag count per key, if equal for all keys.
        strides: Bag count per key and source rank, [K][R] or a tensor [K, R].

    Raises:
        ValueError: The counts do not match.
    """
    num_keys = len(keys)
    # A string is a sequence of strings, so it would pass as one key per character.
    if isinstance(keys, str):
        raise ValueError(f"{_NAME}: keys must be a list of names, got the string {keys!r}; pass [{keys!r}]")
    if isinstance(strides, Tensor):
        # The sum is not compared with the bag count: reading a tensor synchronizes. validate() compares it.
        if strides.dim() != 2 or strides.size(0) != num_keys:
            raise ValueError(
                f"{_NAME}: stride_per_key_per_rank must be [{num_keys} keys, ranks], "
                f"got {list(strides.shape)}"
            )
    elif strides is not None:
        if len(strides) != num_keys or any(len(row) != len(strides[0]) for row in strides):
            raise ValueError(
                f"{_NAME}: the strides must have a row for each of the {num_keys} keys, "
                f"with a number per rank, got {strides}"
            )
        if sum(map(sum, strides)) != num_bags:
            raise ValueError(
                f"{_NAME}: the strides {strides} sum to {sum(map(sum, strides))} bags, "
                f"but there are {num_bags}; the stride of a key is the number of lengths it has"
            )
    elif num_keys == 0:
        if num_bags:
            raise ValueError(f"{_NAME}: {num_bags} bags, but the list of keys is empty; name the keys")
    elif stride is None:
        if num_bags % num_keys:
            raise ValueError(
                f"{_NAME}: {num_bags} bags do not divide evenly among {num_keys} keys; "
                "pass stride_per_key if the keys differ"
            )
    elif stride * num_keys != num_bags:
        raise ValueError(
            f"{_NAME}: {num_keys} keys with {stride} bags each need {stride * num_keys} bags, got "
            f"{num_bags}; pass stride_per_key if the keys differ"
        )


def check_keyed_values(kjt: KeyedBags) -> None:
    """Check keys, bags, weights, per-key counts and inverse indices. Waits for the device.

    Raises:
        ValueError: A value is invalid. The message names the key and sample.
    """
    # Before the other checks, because their messages name keys.
    _check_keys(kjt.keys())
    bags = kjt.lengths_offset_per_key()
    # Negative strides can sum to the right total.
    if bags != sorted(bags):
        raise ValueError(f"{_NAME}: the strides per key are {kjt.stride_per_key()}; they are 0 or more")
    num_bags = count_bags(kjt.lengths_or_none(), kjt.offsets_or_none())
    if kjt.keys() and bags[-1] != num_bags:
        raise ValueError(
            f"{_NAME}: the strides {kjt.stride_per_key()} sum to {bags[-1]} bags, not {num_bags}; "
            "the stride of a key is the number of lengths it has"
        )

    def name_bag(bag: int) -> str:
        """Return the name of a bag for error messages: key, and sample within the key."""
        # bisect_right: keys without bags share their start with the next key, which has the bag.
        index = bisect_right(bags, bag) - 1
        return f"key {kjt.keys()[index]!r}, sample {bag - bags[index]}"

    check_bags(kjt.values(), kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none(), name_bag)
    _check_counts(kjt)
    _check_inverse_indices(kjt)


def check_given_counts(kjt: KeyedBags) -> None:
    """Compare the per-key counts given to the constructor with the lengths. Checks only CPU tensors.

    Raises:
        ValueError: The counts do not match.
    """
    # On other devices the comparison would synchronize in every constructor call.
    lengths, offsets = kjt.lengths_or_none(), kjt.offsets_or_none()
    if kjt.device().type == "cpu" and is_readable(lengths, offsets) and not torch.compiler.is_compiling():
        _check_counts(kjt)


def _check_counts(kjt: KeyedBags) -> None:
    """Check that the cached per-key counts equal those computed from the lengths and strides."""
    # Computed again, because the cached bounds may be those to check.
    bags = [0, *accumulate(kjt.stride_per_key())]
    _check_equal_counts(kjt.keys(), "lengths_offset_per_key", kjt.lengths_offset_per_key(), bags)
    # The offsets at the boundaries between keys.
    offsets = kjt.offsets()[torch.tensor(bags, device=kjt.device())]
    _check_equal_counts(kjt.keys(), "length_per_key", kjt.length_per_key_or_none(), offsets.diff().tolist())
    _check_equal_counts(kjt.keys(), "offset_per_key", kjt.offset_per_key_or_none(), offsets.tolist())


def _check_keys(keys: list[str]) -> None:
    """Check that the keys are distinct strings."""
    seen: dict[str, int] = {}
    for i, key in enumerate(keys):
        if not isinstance(key, str):
            raise ValueError(f"{_NAME}: key {i} is {key!r}; keys are strings")
        if key in seen:
            raise ValueError(f"key {key!r} comes twice, at positions {seen[key]} and {i}; keys must differ")
        seen[key] = i


def _check_equal_counts(keys: list[str], name: str, given: list[int] | None, expected: list[int]) -> None:
    """Raise ValueError if the counts that the caller passed as argument ``name`` are not as expected."""
    if given is None or given == expected:
        return
    # Report the first key that differs, or whole lists if only their sizes or totals differ.
    mismatches = [i for i, pair in enumerate(zip(given, expected, strict=False)) if pair[0] != pair[1]]
    if len(given) != len(expected) or mismatches[0] == len(keys):
        raise ValueError(
            f"{_NAME}: {name} is {given}, but the lengths give {expected}; omit {name} to have it computed"
        )
    i = mismatches[0]
    raise ValueError(
        f"key {keys[i]!r}: {name} is {given[i]}, but the lengths give {expected[i]}; "
        f"omit {name} to have it computed"
    )


def _check_inverse_indices(kjt: KeyedBags) -> None:
    """Check that the inverse indices have the same keys as the tensor, and point to bags that exist."""
    inverse_indices = kjt.inverse_indices_or_none()
    if inverse_indices is None:
        return
    keys, indices = inverse_indices
    # The keys may be in another order.
    if sorted(keys) != sorted(kjt.keys()) or indices.dim() != 2 or indices.size(0) != len(keys):
        raise ValueError(
            f"{_NAME}: inverse_indices must name the keys {kjt.keys()} and be "
            f"[{len(kjt.keys())}, batch size], got {keys} and {list(indices.shape)}"
        )
    for key, row in zip(keys, indices, strict=True):
        # Compared per key: keys keep different bag counts after deduplication.
        num_bags = kjt.stride_per_key()[kjt.index_per_key()[key]]
        invalid = ((row < 0) | (row >= num_bags)).nonzero()
        if invalid.numel():
            sample = int(invalid[0])
            raise ValueError(
                f"key {key!r}, sample {sample}: the inverse index is {int(row[sample])}, "
                f"but the key has {num_bags} bags; indices count its bags from 0"
            )
