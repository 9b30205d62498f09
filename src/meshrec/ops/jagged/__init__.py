"""Operators on jagged data: offsets from lengths, and reordered keys.

Also available as ``torch.ops.meshrec.<name>``. ``naive.py`` documents the tensors, and runs on devices
without a kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.jagged import naive  # noqa: F401 - registers the ops in plain torch

__all__ = ["Permuted", "lengths_to_offsets", "permute_jagged"]


class Permuted(NamedTuple):
    """:func:`permute_jagged` result: the bags for the selected keys."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


# The operator itself, without a Python function around it, because every batch calls it.
lengths_to_offsets: Callable[[Tensor], Tensor] = operators.lengths_to_offsets
"""Return the offsets [B+1] for lengths [B]: cumulative sums with a leading 0, in the same dtype.

Example::

    assert lengths_to_offsets(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
"""


def permute_jagged(
    order: list[int],
    num_keys: int,
    lengths: Tensor,
    values: Tensor,
    *,
    num_bags: int,
    num_values: int,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
) -> Permuted:
    """Return the bags for the keys in ``order``: select, reorder or repeat jagged tensor keys.

    Differentiable in ``values`` and ``weights``.

    Args:
        order: result keys, by position in the input.
        num_keys: key count in the input.
        lengths: bag lengths, all bags for the first key first, int32 or int64 [B].
        values: [N, ...].
        num_bags: bag count in the result.
        num_values: value count in the result.
        weights: [N, ...].
        segments: first bag index per key, followed by B; int64 [num_keys + 1] on the CPU. None:
            equal bag counts per key.

    Example::

        lengths, values = torch.tensor([1, 2]), torch.tensor([7, 8, 9])
        swapped = permute_jagged([1, 0], 2, lengths, values, num_bags=2, num_values=3)
        assert swapped.values.tolist() == [8, 9, 7]
    """
    new_lengths, new_values, new_weights = operators.permute_jagged(
        order, num_keys, lengths, values, weights, segments, num_bags, num_values
    )
    return Permuted(new_lengths, new_values, None if weights is None else new_weights)
