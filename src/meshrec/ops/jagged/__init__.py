"""The ops on jagged data: offsets from lengths, keys in another order.

Each is also ``torch.ops.meshrec.<name>``. ``naive.py`` documents the tensors, and runs on every device
without a kernel of its own.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops.jagged import (
    autograd,  # noqa: F401 - registers the gradients
    fakes,  # noqa: F401 - registers the shapes
    naive,  # noqa: F401 - registers the ops in plain torch
)

__all__ = ["Permuted", "lengths_to_offsets", "permute_jagged"]


class Permuted(NamedTuple):
    """Result of :func:`permute_jagged`."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Return the running sums [B+1] of ``lengths`` [B], with a 0 before them, in the same dtype (int32 or
    int64).
    """
    offsets: Tensor = torch.ops.meshrec.lengths_to_offsets.default(lengths)
    return offsets


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
    """Return the bags of the keys in ``order``, which may leave keys out or repeat them; see ``naive.py``.

    Differentiable in ``values`` and ``weights``. ``num_bags`` and ``num_values`` are the sizes of the result.
    """
    new_lengths, new_values, new_weights = torch.ops.meshrec.permute_jagged.default(
        order, num_keys, lengths, values, weights, segments, num_bags, num_values
    )
    return Permuted(new_lengths, new_values, None if weights is None else new_weights)
