"""Scans over the scores of all rows (or of marked rows only) that select the rows to evict.

Plain torch: the reference for the kernels, and the fallback without them. Shape legend: N values.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement

_MAX_INT64 = (1 << 63) - 1


def marked_range(values_N: Tensor, marks_N: Tensor | None) -> Tensor:
    """Return minimum, maximum and count of the marked values: int64 [3].

    If no value is marked: the largest int64, the smallest int64, and 0.

    Args:
        marks_N: whether a value is marked, bool; None: all are.
    """
    selected = _marked_values(values_N, marks_N)
    if len(selected) == 0:
        return torch.tensor([_MAX_INT64, -_MAX_INT64 - 1, 0])
    return torch.stack([selected.min(), selected.max(), torch.tensor(len(selected))])


def marked_histogram(values_N: Tensor, marks_N: Tensor | None, base: int, shift: int, size: int) -> Tensor:
    """Return a histogram of the marked values by the digit ``(value >> shift) - (base >> shift)``.

    A radix select calls it once per digit. Values whose digit is outside [0, size) are skipped.

    Args:
        marks_N: whether a value is marked, bool; None: all are.

    Returns:
        Number of marked values per digit, int64 [size].
    """
    shifted, first = _marked_values(values_N, marks_N) >> shift, base >> shift
    # The bound is clamped, because first + size - 1 may exceed int64.
    inside = shifted[(shifted >= first) & (shifted <= min(_MAX_INT64, first + size - 1))]
    return torch.bincount(inside - first, minlength=size)


def marked_between(values_N: Tensor, marks_N: Tensor | None, min_value: int, max_value: int) -> Tensor:
    """Return the indices of the marked values in [min_value, max_value], ascending, int64.

    Args:
        marks_N: whether a value is marked, bool; None: all are.
        min_value: lower bound, inclusive.
        max_value: upper bound, inclusive.
    """
    # As int64, because the bounds may exceed int32.
    selected = (values_N.long() >= min_value) & (values_N.long() <= max_value)
    # nonzero() returns the indices in ascending order.
    return (selected if marks_N is None else selected & marks_N).nonzero()[:, 0]


def _marked_values(values_N: Tensor, marks_N: Tensor | None) -> Tensor:
    """Return the marked values as int64."""
    return (values_N if marks_N is None else values_N[marks_N]).long()


implement([marked_range, marked_histogram, marked_between])
