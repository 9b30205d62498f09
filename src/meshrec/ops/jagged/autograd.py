"""Gradients of the jagged operators, shared by all kernels."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.jagged.naive  # noqa: F401 - the ops must exist before gradients are registered for them
from meshrec.ops import operators


def _permute_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.order, ctx.num_keys, lengths, values, weights, segments, ctx.num_bags, ctx.num_values = inputs
    ctx.save_for_backward(lengths, segments)
    ctx.values_shape = values.shape
    ctx.weights_shape = None if weights is None else weights.shape


def _permute_backward(
    ctx: Any, grad_lengths: Tensor, grad_values: Tensor | None, grad_weights: Tensor | None
) -> tuple[Tensor | None, ...]:
    lengths, segments = ctx.saved_tensors
    # Permuting positions gives the source of every result value. Recomputed here, because saving it would
    # hold an int64 per value through the whole forward pass.
    ids = torch.arange(ctx.values_shape[0], device=lengths.device)
    _, sources, _ = operators.permute_jagged(
        ctx.order, ctx.num_keys, lengths, ids, None, segments, ctx.num_bags, ctx.num_values
    )

    def scatter(grad: Tensor | None, shape: torch.Size | None, needed: bool) -> Tensor | None:
        if grad is None or shape is None or not needed:
            return None
        return grad.new_zeros(shape).index_add(0, sources, grad)

    values_grad = scatter(grad_values, ctx.values_shape, ctx.needs_input_grad[3])
    weights_grad = scatter(grad_weights, ctx.weights_shape, ctx.needs_input_grad[4])
    return None, None, None, values_grad, weights_grad, None, None, None


torch.library.register_autograd("meshrec::permute_jagged", _permute_backward, setup_context=_permute_context)
