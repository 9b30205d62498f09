"""Fake kernels of the raw-ID lookups, for tracing."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.keyed.naive  # noqa: F401 - the op must exist before its fake is registered
from meshrec.ops.tbe import Lookups


def _fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    return lookups.values.new_empty(lookups.output_shape(out_size), dtype=out_dtype)


def _fake_hashed(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    out = _fake(weights, bits, *arguments)
    return out, torch.empty(1, dtype=torch.int64)


torch.library.register_fake("meshrec::keyed_forward", _fake)
torch.library.register_fake("meshrec::hashed_forward", _fake_hashed)
