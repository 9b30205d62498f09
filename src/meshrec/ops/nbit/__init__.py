"""Quantized rows, with 8, 4 or 2 bits per value: quantization, dequantization, and lookups.

A lookup may read quantized and floating-point tables at once.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.nbit import triton  # noqa: F401 - registers the lookup for GPUs
from meshrec.ops.nbit.naive import BITS, PARAM_BYTES, code_bytes, params_of, row_bytes
from meshrec.ops.tbe import LookupOptions, Lookups

__all__ = [
    "BITS",
    "PARAM_BYTES",
    "code_bytes",
    "dequantize",
    "forward",
    "from_fbgemm_bytes",
    "params_of",
    "quantize",
    "row_bytes",
    "to_fbgemm_bytes",
]

# Resolved once: an attribute lookup per call costs as much as a small lookup.
_forward: Callable[..., Tensor] = operators.nbit_forward


def forward(bits: list[int], weights: Sequence[Tensor], lookups: Lookups, options: LookupOptions) -> Tensor:
    """Look up and pool rows from several tables, some quantized.

    See ``ops.tbe.forward`` for the errors. A backward pass raises ValueError.

    Args:
        bits: bits per code and table; 0 for floating-point rows.
        weights: rows per table: uint8 if quantized.
        lookups: the batch, and the tables read by the features.
        options: output size and dtype, and whether to check IDs.
    """
    return _forward(list(weights), bits, *lookups, *options)


def quantize(weight: Tensor, bits: int, params: Tensor | None = None) -> Tensor:
    """Quantize a table ``[rows, D]`` to uint8 ``[rows, row_bytes(D, bits)]``; see ``naive.nbit_quantize``.

    Args:
        weight: fp32, fp16 or bf16.
        bits: bits per code: 8, 4 or 2.
        params: scale and bias per row, fp16 [rows, 2]. None: computed from the row's minimum and maximum.

    Example::

        weight = torch.randn(10, 8)
        rows = quantize(weight, bits=8)
        assert torch.allclose(dequantize(rows, 8, 8), weight, atol=0.02)
    """
    result: Tensor = operators.nbit_quantize(weight, bits, params)
    return result


def dequantize(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return quantized row values, fp32 ``[rows, D]``.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``.
        bits: bits per code.
        dim: D.
    """
    result: Tensor = operators.nbit_dequantize(rows, bits, dim)
    return result


def to_fbgemm_bytes(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows to FBGEMM's ``FloatToFusedNBitRowwiseQuantizedSBHalf`` format: codes, scale, bias.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``, from ``quantize``.
        bits: bits per code: 8, 4 or 2.
        dim: values per row, D.

    Returns:
        uint8 ``[rows, code_bytes(D, bits) + 4]``.

    Raises:
        ValueError: the rows have another length or dtype.
    """
    _check_rows(rows, row_bytes(dim, bits), f"rows of {dim} {bits}-bit values")
    codes = rows[:, PARAM_BYTES : PARAM_BYTES + code_bytes(dim, bits)]
    return torch.cat([codes, rows[:, :PARAM_BYTES]], 1)


def from_fbgemm_bytes(fused: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows from FBGEMM's format to the ``quantize`` format: inverse of ``to_fbgemm_bytes``.

    Args:
        fused: uint8 ``[rows, code_bytes(D, bits) + 4]``.
        bits: bits per code: 8, 4 or 2.
        dim: values per row, D.

    Raises:
        ValueError: the rows have another length or dtype.
    """
    num_bytes = code_bytes(dim, bits)
    _check_rows(fused, num_bytes + PARAM_BYTES, f"FBGEMM's rows of {dim} {bits}-bit values")
    rows = fused.new_zeros(len(fused), row_bytes(dim, bits))
    rows[:, :PARAM_BYTES] = fused[:, num_bytes:]
    rows[:, PARAM_BYTES : PARAM_BYTES + num_bytes] = fused[:, :num_bytes]
    return rows


def _check_rows(rows: Tensor, width: int, description: str) -> None:
    """Raise ValueError unless rows are uint8 with ``width`` bytes."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{description} are {width} uint8, got {rows.dtype} {list(rows.shape)}. Give the width and bits "
            "they were quantized with."
        )
