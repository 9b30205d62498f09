"""Cutting, splitting and permuting the keys of a KeyedJaggedTensor."""

from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from meshrec.ops.jagged import permute_jagged
from meshrec.sparse.counting import total
from meshrec.sparse.keyed_bags import Bags, KeyedBags


class Group(NamedTuple):
    """Return views of a few neighbouring keys."""

    values: Tensor
    weights: Tensor | None
    lengths: Tensor


def cut_keys(kjt: KeyedBags, sizes: list[int]) -> list[Group]:
    """Return views of ``sizes[i]`` neighbouring keys each; the sizes sum to the number of keys."""
    all_values, all_weights, all_lengths = kjt.values(), kjt.weights_or_none(), kjt.lengths()
    num_keys = len(kjt.keys())
    if num_keys in sizes:  # all keys at once: the lengths need not be read
        nothing = Group(all_values[:0], None if all_weights is None else all_weights[:0], all_lengths[:0])
        everything = Group(all_values, all_weights, all_lengths)
        return [everything if size == num_keys and num_keys else nothing for size in sizes]
    ends = list(accumulate(sizes, initial=0))
    ids, bags = kjt.offset_per_key(), kjt.lengths_offset_per_key()
    id_sizes = [ids[last] - ids[first] for first, last in pairwise(ends)]
    bag_sizes = [bags[last] - bags[first] for first, last in pairwise(ends)]
    values = all_values.split(id_sizes)
    weights = [None] * len(sizes) if all_weights is None else all_weights.split(id_sizes)
    return list(map(Group, values, weights, all_lengths.split(bag_sizes)))


def split_keys(kjt: Bags, segments: list[int]) -> list[Bags]:
    """Return a group of neighbouring keys for each of ``segments``, the numbers of keys in the groups."""
    num_keys, num_taken = len(kjt.keys()), sum(segments)
    if num_taken > num_keys or min(segments, default=0) < 0:
        raise ValueError(
            f"KeyedJaggedTensor.split: segments must be 0 or more and sum to at most {num_keys} keys, "
            f"got {segments}"
        )
    ends = list(accumulate(segments, initial=0))
    groups = cut_keys(kjt, [*segments, num_keys - num_taken])
    variable, strides = kjt.variable_stride_per_key(), kjt.stride_per_key_per_rank()
    known = kjt.length_per_key_or_none()
    return [
        kjt.unchecked(
            kjt.keys()[first:last],
            *group,
            stride=None if variable else kjt.stride(),
            strides=strides[first:last] if variable else None,
            length_per_key=None if known is None else known[first:last],
            inverse_indices=kjt.inverse_indices_or_none() if last - first == num_keys else None,
        )
        for first, last, group in zip(ends, ends[1:], groups, strict=False)
    ]


def permuted_keys(kjt: Bags, indices: list[int]) -> Bags:
    """Return the keys at ``indices``, in that order; a key may occur several times, or not at all."""
    keys, values, lengths = kjt.keys(), kjt.values(), kjt.lengths()
    for index in indices:
        if not 0 <= index < len(keys):
            raise ValueError(
                f"KeyedJaggedTensor.permute: there is no key {index}; positions are 0 to {len(keys) - 1}"
            )
    complete = len(indices) == len(keys) == len(set(indices))
    known = kjt.length_per_key_or_none() if complete else kjt.length_per_key()
    length_per_key = None if known is None else [known[i] for i in indices]
    bags = kjt.stride_per_key()
    permuted = permute_jagged(
        indices,
        len(keys),
        lengths,
        values,
        weights=kjt.weights_or_none(),
        segments=kjt.segments_or_none(),
        num_bags=lengths.size(0) if complete else total([bags[i] for i in indices]),
        num_values=values.size(0) if complete else total(length_per_key or []),
    )
    variable, strides = kjt.variable_stride_per_key(), kjt.stride_per_key_per_rank()
    return kjt.unchecked(
        [keys[i] for i in indices],
        permuted.values,
        permuted.weights,
        permuted.lengths,
        stride=None if variable else kjt.stride(),
        strides=[strides[i] for i in indices] if variable else None,
        length_per_key=length_per_key,
    )
