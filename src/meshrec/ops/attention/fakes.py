"""Fake kernels of the attention operators, for tracing."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.attention.naive  # noqa: F401 - the ops must exist before fakes are registered for them


def _fake(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    is_softmax = options[8]
    num_queries, num_heads, _ = query.shape
    out = value.new_empty(num_queries, num_heads, value.shape[2])
    return out, query.new_empty(num_queries if is_softmax else 0, num_heads)


def _fake_grad(
    grad: Tensor, out: Tensor, log_sums: Tensor, query: Tensor, key: Tensor, value: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    biases = [query.new_empty(0 if bias is None else len(bias)) for bias in options[3:5]]
    return (*(tensor.new_empty(tensor.shape) for tensor in (query, key, value)), *biases)


torch.library.register_fake("meshrec::jagged_attention", _fake)
torch.library.register_fake("meshrec::jagged_attention_grad", _fake_grad)
