"""The output shape of the lookup of raw IDs, for tracing."""

from typing import Any

import torch
from torch import Tensor

import meshrec.ops.keyed.naive  # noqa: F401 - the op must exist before its fake is registered
from meshrec.ops.tbe import Lookups


def _fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    shape = [out_size] if lookups.flat else [out_size, sum(lookups.dims)]
    return lookups.values.new_empty(shape, dtype=out_dtype)


torch.library.register_fake("meshrec::keyed_forward", _fake)
