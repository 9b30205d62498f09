"""Gradient of ``tbe_forward``, shared by all kernels."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import meshrec.ops.tbe.naive  # noqa: F401 - the ops must exist before gradients are registered for them
from meshrec.ops import operators

# torch.library.register_autograd is untyped.
_register_autograd: Callable[..., None] = torch.library.register_autograd


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    weights, values, offsets, per_sample_weights, segments, *options = inputs
    ctx.save_for_backward(values, offsets, per_sample_weights, segments, *weights)
    num_keys, keys, tables, pooling, flat = options[:5]
    ctx.lookups = num_keys, keys, tables, pooling, flat
    ctx.dims = [weights[table].shape[1] for table in tables]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    values, offsets, per_sample_weights, segments, *weights = ctx.saved_tensors
    weights_grad: list[Tensor | None] = [None] * len(weights)
    sample_grad = None
    if any(ctx.needs_input_grad[0]):
        dense = operators.tbe_dense_grad(
            grad, weights, values, offsets, per_sample_weights, segments, *ctx.lookups, ctx.dims
        )
        needed = ctx.needs_input_grad[0]
        weights_grad = [gradient if need else None for gradient, need in zip(dense, needed, strict=True)]
    if ctx.needs_input_grad[3]:
        sample_grad = operators.tbe_sample_weight_grad(
            grad, weights, values, offsets, segments, *ctx.lookups, ctx.dims
        ).to(per_sample_weights.dtype)
    return (weights_grad, None, None, sample_grad, *[None] * 10)


_register_autograd("meshrec::tbe_forward", _backward, setup_context=_save)

# The update has no gradient. Without the fallthrough, torch inspects every argument tensor on every call.
_registration = torch.library.Library("meshrec", "IMPL")
_registration.impl("tbe_update", torch.library.fallthrough_kernel, "Autograd")
