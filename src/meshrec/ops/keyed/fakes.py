"""The output shapes of the lookups of raw IDs, for tracing."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.keyed.naive  # noqa: F401 - the op must exist before its fake is registered
from meshrec.ops.tbe import Lookups


def _fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    shape = [out_size] if lookups.flat else [out_size, sum(lookups.dims)]
    return lookups.values.new_empty(shape, dtype=out_dtype)


def _fake_hashed(weights: list[Tensor], bits: list[int], *arguments: Any) -> tuple[Tensor, Tensor]:
    found = _fake(weights, bits, *arguments)
    return found, torch.empty(1, dtype=torch.int64)


torch.library.register_fake("meshrec::keyed_forward", _fake)
torch.library.register_fake("meshrec::hashed_forward", _fake_hashed)
