"""The gradient of ``dot_interaction``, shared by all kernels."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.interaction.naive  # noqa: F401 - the ops must exist before gradients are registered


def _context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_dense, of_sparse = torch.ops.meshrec.dot_interaction_grad.default(grad, *ctx.saved_tensors)
    return of_dense, of_sparse


torch.library.register_autograd("meshrec::dot_interaction", _backward, setup_context=_context)
