"""Fake kernels of the jagged operators, for tracing."""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops.jagged import naive


def _fake_lengths_to_offsets(lengths: Tensor) -> Tensor:
    return lengths.new_empty(lengths.numel() + 1)


def _fake_permute_jagged(order: list[int], num_keys: int, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    lengths, values, weights, _, num_bags, num_values = arguments
    return (
        lengths.new_empty(num_bags),
        values.new_empty(num_values, *values.shape[1:]),
        naive.no_weights(values) if weights is None else weights.new_empty(num_values, *weights.shape[1:]),
    )


for _name, _fake in (
    ("lengths_to_offsets", _fake_lengths_to_offsets),
    ("permute_jagged", _fake_permute_jagged),
):
    torch.library.register_fake(f"meshrec::{_name}", _fake)
