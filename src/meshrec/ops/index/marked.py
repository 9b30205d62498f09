"""Passes over the scores of a table's rows, of which marks choose some: what an eviction reads.

The functions with plain torch are the reference for the kernels, and the fallback without them.

Shape legend: N values.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement

_WORD = (1 << 63) - 1


def marked_range(values_N: Tensor, marks_N: Tensor | None) -> Tensor:
    """Return the least and the greatest marked value, and the number of marked values, int64 [3].

    Without a marked value, they are the greatest int64, the least one, and 0.

    Args:
        values_N: int32 or int64.
        marks_N: bool; None: all values count.
    """
    chosen = _chosen(values_N, marks_N)
    if len(chosen) == 0:
        return torch.tensor([_WORD, -_WORD - 1, 0])
    return torch.stack([chosen.min(), chosen.max(), torch.tensor(len(chosen))])


def marked_histogram(values_N: Tensor, marks_N: Tensor | None, base: int, shift: int, size: int) -> Tensor:
    """Return how many marked values have each digit ``(value >> shift) - (base >> shift)``, int64 [size].

    Values with other digits are not counted.

    Args:
        values_N: int32 or int64.
        marks_N: bool; None: all values count.
        base: the least value with digit 0, or another one with it.
        shift: the number of low bits that digits leave out.
        size: the number of digits.
    """
    shifted, first = _chosen(values_N, marks_N) >> shift, base >> shift
    inside = shifted[(shifted >= first) & (shifted <= min(_WORD, first + size - 1))]
    return torch.bincount(inside - first, minlength=size)


def marked_between(values_N: Tensor, marks_N: Tensor | None, least: int, greatest: int) -> Tensor:
    """Return the positions of the marked values in [least, greatest], ascending, int64.

    Args:
        values_N: int32 or int64.
        marks_N: bool; None: all values count.
        least: the least value.
        greatest: the greatest value.
    """
    chosen = (values_N.long() >= least) & (values_N.long() <= greatest)
    return (chosen if marks_N is None else chosen & marks_N).nonzero()[:, 0]


def _chosen(values_N: Tensor, marks_N: Tensor | None) -> Tensor:
    return (values_N if marks_N is None else values_N[marks_N]).long()


implement([marked_range, marked_histogram, marked_between])
