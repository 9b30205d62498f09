"""The gradients of the jagged ops, shared by all kernels."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.jagged.naive  # noqa: F401 - the ops must exist before gradients are registered for them


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
    _, sources, _ = torch.ops.meshrec.permute_jagged.default(
        ctx.order, ctx.num_keys, lengths, ids, None, segments, ctx.num_bags, ctx.num_values
    )

    def scattered(grad: Tensor | None, shape: torch.Size | None, needed: bool) -> Tensor | None:
        if grad is None or shape is None or not needed:
            return None
        return grad.new_zeros(shape).index_add(0, sources, grad)

    grad_of_values = scattered(grad_values, ctx.values_shape, ctx.needs_input_grad[3])
    grad_of_weights = scattered(grad_weights, ctx.weights_shape, ctx.needs_input_grad[4])
    return None, None, None, grad_of_values, grad_of_weights, None, None, None


torch.library.register_autograd("meshrec::permute_jagged", _permute_backward, setup_context=_permute_context)
