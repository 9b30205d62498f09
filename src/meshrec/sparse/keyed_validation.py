"""Checks of KeyedJaggedTensor beyond its bags: keys, strides, counts per key, inverse indices."""

from bisect import bisect_right

import torch
from torch import Tensor

from meshrec.sparse.keyed_bags import KeyedBags
from meshrec.sparse.validation import check_bags, count_bags

_NAME = "KeyedJaggedTensor"


def check_keys_and_strides(
    keys: list[str], num_bags: int, stride: int | None, strides: list[list[int]] | Tensor | None
) -> None:
    """Raise ValueError unless the bags can be shared out among the keys; reads no tensor."""
    num_keys = len(keys)
    if isinstance(keys, str):
        raise ValueError(f"{_NAME}: keys must be a list of names, got the string {keys!r}; pass [{keys!r}]")
    if isinstance(strides, Tensor):
        if strides.dim() != 2 or strides.size(0) != num_keys:
            raise ValueError(
                f"{_NAME}: stride_per_key_per_rank must be [{num_keys} keys, ranks], "
                f"got {list(strides.shape)}"
            )
    elif strides is not None:
        if len(strides) != num_keys or any(len(row) != len(strides[0]) for row in strides):
            raise ValueError(
                f"{_NAME}: the strides must have one row for each of the {num_keys} keys, "
                f"and one number in it for each rank, got {strides}"
            )
        if sum(map(sum, strides)) != num_bags:
            raise ValueError(
                f"{_NAME}: the strides {strides} sum to {sum(map(sum, strides))} bags, "
                f"but there are {num_bags}; give each key as many bags as it has lengths"
            )
    elif num_keys == 0:
        if num_bags:
            raise ValueError(f"{_NAME}: {num_bags} bags belong to no key; name the keys")
    elif stride is None:
        if num_bags % num_keys:
            raise ValueError(
                f"{_NAME}: {num_bags} bags do not divide evenly among {num_keys} keys; "
                "pass stride_per_key where keys have different numbers of bags"
            )
    elif stride * num_keys != num_bags:
        raise ValueError(
            f"{_NAME}: {num_keys} keys with {stride} bags each need {stride * num_keys} bags, got "
            f"{num_bags}; pass stride_per_key where keys have different numbers of bags"
        )


def check_keyed_numbers(kjt: KeyedBags) -> None:
    """Raise ValueError unless all numbers fit; the message names key and sample."""
    _check_keys(kjt.keys())
    bags = kjt.lengths_offset_per_key()
    if bags != sorted(bags):
        raise ValueError(f"{_NAME}: the strides per key are {kjt.stride_per_key()}; they are 0 or more")
    num_bags = count_bags(kjt.lengths_or_none(), kjt.offsets_or_none())
    if kjt.keys() and bags[-1] != num_bags:
        raise ValueError(
            f"{_NAME}: the strides {kjt.stride_per_key()} sum to {bags[-1]} bags, not {num_bags}; "
            "give each key as many bags as it has lengths"
        )

    def place(bag: int) -> str:
        index = bisect_right(bags, bag) - 1
        return f"key {kjt.keys()[index]!r}, sample {bag - bags[index]}"

    check_bags(kjt.values(), kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none(), place)
    offsets = kjt.offsets()[torch.tensor(bags, device=kjt.device())]
    _check_known(kjt.keys(), "length_per_key", kjt.length_per_key_or_none(), offsets.diff().tolist())
    _check_known(kjt.keys(), "offset_per_key", kjt.offset_per_key_or_none(), offsets.tolist())
    _check_inverse_indices(kjt)


def _check_keys(keys: list[str]) -> None:
    seen: dict[str, int] = {}
    for i, key in enumerate(keys):
        if not isinstance(key, str):
            raise ValueError(f"{_NAME}: key {i} is {key!r}; keys are strings")
        if key in seen:
            raise ValueError(f"key {key!r} comes twice, at positions {seen[key]} and {i}; keys must differ")
        seen[key] = i


def _check_known(keys: list[str], what: str, known: list[int] | None, expected: list[int]) -> None:
    if known is None or known == expected:
        return
    wrong = [i for i, pair in enumerate(zip(known, expected, strict=False)) if pair[0] != pair[1]]
    if len(known) != len(expected) or wrong[0] == len(keys):
        raise ValueError(
            f"{_NAME}: {what} is {known}, but the lengths give {expected}; leave {what} out, it is derived"
        )
    i = wrong[0]
    raise ValueError(
        f"key {keys[i]!r}: {what} is {known[i]}, but the lengths give {expected[i]}; "
        f"leave {what} out, it is derived"
    )


def _check_inverse_indices(kjt: KeyedBags) -> None:
    found = kjt.inverse_indices_or_none()
    if found is None:
        return
    keys, indices = found
    if sorted(keys) != sorted(kjt.keys()) or indices.dim() != 2 or indices.size(0) != len(keys):
        raise ValueError(
            f"{_NAME}: inverse_indices must name the keys {kjt.keys()} and be "
            f"[{len(kjt.keys())}, batch size], got {keys} and {list(indices.shape)}"
        )
    for key, row in zip(keys, indices, strict=True):
        num_bags = kjt.stride_per_key()[kjt.index_per_key()[key]]
        wrong = ((row < 0) | (row >= num_bags)).nonzero()
        if wrong.numel():
            sample = int(wrong[0])
            raise ValueError(
                f"key {key!r}, sample {sample}: the inverse index is {int(row[sample])}, "
                f"but the key has {num_bags} bags; indices count its bags from 0"
            )
