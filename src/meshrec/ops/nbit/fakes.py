"""Fake kernels of the operators on quantized rows, for tracing."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import SymInt, Tensor

from meshrec.ops.nbit import naive
from meshrec.ops.tbe import Lookups

_F = TypeVar("_F", bound=Callable[..., object])

# Typed here, because torch's own decorator is not.
_register_fake: Callable[[str], Callable[[_F], _F]] = torch.library.register_fake


@_register_fake("meshrec::nbit_quantize")
def _quantize_fake(weight: Tensor, bits: int, params: Tensor | None) -> Tensor:
    num_rows, dim = weight.shape
    return weight.new_empty([num_rows, naive.row_bytes(dim, bits)], dtype=torch.uint8)


@_register_fake("meshrec::nbit_dequantize")
def _dequantize_fake(rows: Tensor, bits: int, dim: int | SymInt) -> Tensor:
    return rows.new_empty([rows.shape[0], dim], dtype=torch.float32)


@_register_fake("meshrec::nbit_forward")
def _forward_fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    return lookups.values.new_empty(lookups.output_shape(out_size), dtype=out_dtype)
