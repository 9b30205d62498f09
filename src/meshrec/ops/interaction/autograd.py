"""Gradient registration for ``dot_interaction``, shared by all kernels."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.interaction.naive  # noqa: F401 - the ops must exist before gradients are registered
from meshrec.ops import operators


def _setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    """Save both inputs of ``dot_interaction`` for the backward pass."""
    # The backward pass recomputes the products, which need more memory than the inputs.
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients for both inputs of ``dot_interaction``."""
    dense_grad, sparse_grad = operators.dot_interaction_grad(grad, *ctx.saved_tensors)
    return dense_grad, sparse_grad


torch.library.register_autograd("meshrec::dot_interaction", _backward, setup_context=_setup_context)
