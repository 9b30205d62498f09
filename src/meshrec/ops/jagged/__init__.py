"""Ops on jagged data: offsets from lengths, keys in another order, ids split by row interval.

Each is ``torch.ops.meshrec.<name>`` too. ``naive.py`` documents the tensors; it serves on every device
without a kernel of its own.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.ops.jagged import naive
from meshrec.ops.library import implement

__all__ = ["Bucketized", "Permuted", "bucketize_jagged", "lengths_to_offsets", "permute_jagged"]


class Permuted(NamedTuple):
    """Result of :func:`permute_jagged`."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


class Bucketized(NamedTuple):
    """Result of :func:`bucketize_jagged`, bucket-major; ``positions``: the new places of the input's ids."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None
    positions: Tensor


def lengths_to_offsets(lengths: Tensor) -> Tensor:
    """Running sums [B+1] of ``lengths`` [B] with a 0 before them, in the same dtype (int32 or int64)."""
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
    """The bags of the keys in ``order``, which may leave keys out or repeat them; see ``naive.py``.

    Differentiable in ``values`` and ``weights``. ``num_bags`` and ``num_values`` are the sizes of the result.
    """
    new_lengths, new_values, new_weights = torch.ops.meshrec.permute_jagged.default(
        order, num_keys, lengths, values, weights, segments, num_bags, num_values
    )
    return Permuted(new_lengths, new_values, None if weights is None else new_weights)


def bucketize_jagged(
    lengths: Tensor,
    values: Tensor,
    boundaries: Tensor,
    *,
    weights: Tensor | None = None,
    segments: Tensor | None = None,
) -> Bucketized:
    """Splits bags by the row intervals ``boundaries`` int64 [K, P+1]; see ``naive.py``.

    Differentiable in ``weights``.

    Raises:
        ValueError: An id lies outside its key's intervals.
    """
    new_lengths, new_values, new_weights, positions = torch.ops.meshrec.bucketize_jagged.default(
        lengths, values, weights, segments, boundaries
    )
    return Bucketized(new_lengths, new_values, None if weights is None else new_weights, positions)


def _fake_lengths_to_offsets(lengths: Tensor) -> Tensor:
    return lengths.new_empty(lengths.numel() + 1)


def _fake_permute_jagged(
    order: list[int],
    num_keys: int,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None,
    segments: Tensor | None,
    num_bags: int,
    num_values: int,
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        lengths.new_empty(num_bags),
        values.new_empty(num_values, *values.shape[1:]),
        naive.no_weights(values) if weights is None else weights.new_empty(num_values, *weights.shape[1:]),
    )


def _fake_bucketize_jagged(
    lengths: Tensor, values: Tensor, weights: Tensor | None, segments: Tensor | None, boundaries: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        lengths.new_empty(lengths.numel() * (boundaries.size(1) - 1)),
        torch.empty_like(values),
        naive.no_weights(values) if weights is None else torch.empty_like(weights),
        values.new_empty(values.numel(), dtype=torch.int64),
    )


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.order, ctx.num_keys, lengths, values, weights, segments, ctx.num_bags, ctx.num_values = inputs
    ctx.save_for_backward(lengths, segments)
    ctx.values_shape = values.shape
    ctx.weights_shape = None if weights is None else weights.shape


def _permute_backward(
    ctx: Any, grad_lengths: Tensor, grad_values: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    lengths, segments = ctx.saved_tensors
    ids = torch.arange(ctx.values_shape[0], device=lengths.device)
    sources = permute_jagged(
        ctx.order,
        ctx.num_keys,
        lengths,
        ids,
        num_bags=ctx.num_bags,
        num_values=ctx.num_values,
        segments=segments,
    ).values

    def scattered(grad: Tensor | None, shape: torch.Size | None, needed: bool) -> Tensor | None:
        if grad is None or shape is None or not needed:
            return None
        return grad.new_zeros(shape).index_add(0, sources, grad)

    grad_of_values = scattered(grad_values, ctx.values_shape, ctx.needs_input_grad[3])
    grad_of_weights = scattered(grad_weights, ctx.weights_shape, ctx.needs_input_grad[4])
    return None, None, None, grad_of_values, grad_of_weights, None, None, None


def _bucketize_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[3])


def _bucketize_backward(
    ctx: Any,
    grad_lengths: Tensor | None,
    grad_values: Tensor | None,
    grad_weights: Tensor | None,
    grad_positions: Tensor | None,
) -> tuple[Tensor | None, ...]:
    (positions,) = ctx.saved_tensors
    if grad_weights is None or not ctx.needs_input_grad[2]:
        return None, None, None, None, None
    return None, None, grad_weights[positions], None, None


implement([naive.lengths_to_offsets, naive.permute_jagged, naive.bucketize_jagged])
for _name, _fake in (
    ("lengths_to_offsets", _fake_lengths_to_offsets),
    ("permute_jagged", _fake_permute_jagged),
    ("bucketize_jagged", _fake_bucketize_jagged),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
torch.library.register_autograd("meshrec::permute_jagged", _permute_backward, setup_context=_permute_context)
torch.library.register_autograd(
    "meshrec::bucketize_jagged", _bucketize_backward, setup_context=_bucketize_context
)
