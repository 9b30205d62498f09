"""Operators on jagged data: offsets from lengths, and selection of keys.

A jagged tensor stores bags (lists of IDs with different lengths) end to end in a single values tensor. The
operators are also available as ``torch.ops.meshrec.<name>``. ``naive.py`` has the reference versions, which
also run on devices without a kernel.
"""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.jagged import naive  # noqa: F401 - registers the ops in plain torch

__all__ = ["Permuted", "concat_samples", "lengths_to_offsets", "permute_jagged", "permute_samples"]


class Permuted(NamedTuple):
    """Result of :func:`permute_jagged`: the bags for the selected keys."""

    lengths: Tensor
    """Bag lengths, [num_bags], with the dtype of the input lengths."""
    values: Tensor
    """Values from the selected bags, end to end: [num_values, ...]."""
    weights: Tensor | None
    """Weights for the values, [num_values, ...], or None if the input had none."""


# The operator itself, without a Python function around it, because every batch calls it.
lengths_to_offsets: Callable[[Tensor], Tensor] = operators.lengths_to_offsets
"""Return where each bag starts and ends, [B+1], given the bag lengths [B].

The offsets are the cumulative sums of the lengths, with a leading 0, in the same dtype: bag ``b`` holds the
values ``offsets[b]`` to ``offsets[b+1]`` (exclusive).

Example::

    assert lengths_to_offsets(torch.tensor([2, 0, 3])).tolist() == [0, 2, 2, 5]
"""

permute_samples: Callable[..., tuple[Tensor, Tensor, Tensor, list[Tensor]]] = operators.permute_samples
"""Copy samples in another order, with the IDs of all keys in a single tensor; documented in ``naive.py``."""

concat_samples: Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, list[Tensor]]] = operators.concat_samples
"""Concatenate ranges of permuted samples to a batch; documented in ``naive.py``."""


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
    """Select, reorder or repeat the keys in a jagged tensor: return the bags for the keys in ``order``.

    Differentiable in ``values`` and ``weights``.

    Args:
        order: keys in the result, as positions in the input. A key may be left out or repeated.
        num_keys: number of keys in the input.
        lengths: bag lengths, all bags for the first key first, int32 or int64 [B].
        values: values from all bags, end to end: [N, ...].
        num_bags: number of bags in the result.
        num_values: number of values in the result. The caller passes both sizes, so that the operator need
            not read them from the device.
        weights: weights for the values, [N, ...], or None.
        segments: index where the bags for each key start, followed by B; int64 [num_keys + 1] on the CPU.
            None: all keys have the same number of bags.

    Returns:
        New tensors with the selected bags, in the given order.

    Example::

        lengths, values = torch.tensor([1, 2]), torch.tensor([7, 8, 9])
        swapped = permute_jagged([1, 0], 2, lengths, values, num_bags=2, num_values=3)
        assert swapped.values.tolist() == [8, 9, 7]
    """
    # The operator always returns three tensors. Without weights, the third is an empty placeholder.
    new_lengths, new_values, new_weights = operators.permute_jagged(
        order, num_keys, lengths, values, weights, segments, num_bags, num_values
    )
    return Permuted(new_lengths, new_values, None if weights is None else new_weights)
