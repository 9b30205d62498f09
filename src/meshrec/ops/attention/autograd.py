"""Gradient of ``jagged_attention``, shared by all kernels."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.attention.naive  # noqa: F401 - the ops must exist before gradients are registered
from meshrec.ops import operators

_NUM_TENSORS = 9  # query, key, value, offsets, query_offsets, num_targets, position, time, timestamps


def _context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*output, *inputs[:_NUM_TENSORS])
    ctx.options = inputs[_NUM_TENSORS:]
    ctx.mark_non_differentiable(output[1])
    # The log-sum output gets no gradient. Do not allocate zeros for it.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    num_inputs = _NUM_TENSORS + len(ctx.options)
    if grad is None:
        return (None,) * num_inputs
    saved = ctx.saved_tensors
    *token_grads, position_grad, time_grad = operators.jagged_attention_grad(grad, *saved, *ctx.options)
    position, time = saved[-3:-1]
    bias_grads = (None if position is None else position_grad, None if time is None else time_grad)
    return (*token_grads, None, None, None, *bias_grads, *(None,) * (num_inputs - 8))


torch.library.register_autograd("meshrec::jagged_attention", _backward, setup_context=_context)
