"""Slicing, splitting and permutation of the keys in a KeyedJaggedTensor."""

from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from meshrec.ops.jagged import permute_jagged
from meshrec.sparse.counting import sum_counts
from meshrec.sparse.keyed_bags import Bags, KeyedBags


class KeyGroup(NamedTuple):
    """Values, weights and lengths of several adjacent keys, as views of a KeyedJaggedTensor's tensors."""

    values: Tensor
    """Values, [N, ...]."""
    weights: Tensor | None
    """Weight per value, [N]; None if unweighted."""
    lengths: Tensor
    """Value count per bag, [B]."""


def slice_keys(kjt: KeyedBags, sizes: list[int]) -> list[KeyGroup]:
    """Cut the keys into consecutive groups, and return the tensors per group, as views.

    Keys a, b, c with sizes [1, 2] give the groups (a) and (b, c).
    """
    all_values, all_weights, all_lengths = kjt.values(), kjt.weights_or_none(), kjt.lengths()
    num_keys = len(kjt.keys())
    if num_keys in sizes:  # a single group has all keys: no need to read the lengths, which would synchronize
        no_keys = KeyGroup(all_values[:0], None if all_weights is None else all_weights[:0], all_lengths[:0])
        all_keys = KeyGroup(all_values, all_weights, all_lengths)
        return [all_keys if size == num_keys and num_keys else no_keys for size in sizes]
    ends = list(accumulate(sizes, initial=0))
    # offset_per_key synchronizes unless sync() was called.
    ids, bags = kjt.offset_per_key(), kjt.lengths_offset_per_key()
    id_sizes = [ids[last] - ids[first] for first, last in pairwise(ends)]
    bag_sizes = [bags[last] - bags[first] for first, last in pairwise(ends)]
    # split() returns views.
    values = all_values.split(id_sizes)
    weights = [None] * len(sizes) if all_weights is None else all_weights.split(id_sizes)
    return list(map(KeyGroup, values, weights, all_lengths.split(bag_sizes)))


def split_keys(kjt: Bags, segments: list[int]) -> list[Bags]:
    """Split into groups of adjacent keys, with ``segments[i]`` keys in group i. Later keys are left out.

    Implements ``KeyedJaggedTensor.split``.

    Raises:
        ValueError: A segment is negative, or the segments sum to more than the key count.
    """
    num_keys, num_taken = len(kjt.keys()), sum(segments)
    # Checked here: a slice would accept a negative size silently.
    if num_taken > num_keys or min(segments, default=0) < 0:
        raise ValueError(
            f"KeyedJaggedTensor.split: segments must be 0 or more and sum to at most {num_keys} keys, "
            f"got {segments}"
        )
    ends = list(accumulate(segments, initial=0))
    # slice_keys wants all keys, so the last group takes those to leave out; zip below drops it.
    groups = slice_keys(kjt, [*segments, num_keys - num_taken])
    variable, strides = kjt.variable_stride_per_key(), kjt.stride_per_key_per_rank()
    length_per_key = kjt.length_per_key_or_none()
    return [
        kjt.unchecked(
            kjt.keys()[first:last],
            *group,
            stride=None if variable else kjt.stride(),
            strides=strides[first:last] if variable else None,
            length_per_key=None if length_per_key is None else length_per_key[first:last],
            # As in TorchRec, only a group with all keys keeps the inverse indices.
            inverse_indices=kjt.inverse_indices_or_none() if last - first == num_keys else None,
        )
        for first, last, group in zip(ends, ends[1:], groups, strict=False)
    ]


def permute_keys(kjt: Bags, indices: list[int]) -> Bags:
    """Select keys by position. Keys may be repeated or left out. Implements ``KeyedJaggedTensor.permute``.

    Keys a, b, c with indices [2, 0] give the keys c, a.

    Raises:
        ValueError: A position is out of range.
    """
    keys, values, lengths = kjt.keys(), kjt.values(), kjt.lengths()
    # Python would accept negative positions, and a kernel would read out of bounds for large ones.
    for index in indices:
        if not 0 <= index < len(keys):
            raise ValueError(
                f"KeyedJaggedTensor.permute: index {index} is out of range; use 0 to {len(keys) - 1}"
            )
    # Every key exactly once.
    is_permutation = len(indices) == len(keys) == len(set(indices))
    # A full permutation's result has the same size. Only a selection needs the counts on the host.
    counts = kjt.length_per_key_or_none() if is_permutation else kjt.length_per_key()
    length_per_key = None if counts is None else [counts[i] for i in indices]
    bags = kjt.stride_per_key()
    # No inverse indices in the result: as in TorchRec, a selection drops them.
    # Sizes are passed so the operator need not read them back from the device.
    permuted = permute_jagged(
        indices,
        len(keys),
        lengths,
        values,
        weights=kjt.weights_or_none(),
        segments=kjt.segments_or_none(),
        num_bags=lengths.size(0) if is_permutation else sum_counts([bags[i] for i in indices]),
        num_values=values.size(0) if is_permutation else sum_counts(length_per_key or []),
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
