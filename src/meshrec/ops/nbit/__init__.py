"""Quantized table rows, with 8, 4 or 2 bits per value: quantization, dequantization and lookups.

A lookup may read quantized and floating-point tables in the same call.
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
    """Look up rows in several tables, some of them quantized, and pool the rows in each bag.

    The result and the errors are as for ``ops.tbe.forward``. A backward pass raises ValueError, because
    quantized rows cannot be trained.

    Args:
        bits: bits per quantized value (code), for each table; 0 for a floating-point table.
        weights: rows per table: uint8 if quantized.
        lookups: the batch, and the table that each feature reads.
        options: output size and dtype, and whether to check IDs.
    """
    return _forward(list(weights), bits, *lookups, *options)


def quantize(weight: Tensor, bits: int, params: Tensor | None = None) -> Tensor:
    """Quantize a table ``[rows, D]`` row by row to uint8 ``[rows, row_bytes(D, bits)]``.

    ``naive.py`` documents the format.

    Args:
        weight: fp32, fp16 or bf16.
        bits: bits per value: 8, 4 or 2.
        params: scale and bias per row, fp16 [rows, 2]. None: compute them from the minimum and the maximum of
            the row.

    Example::

        weight = torch.randn(10, 8)
        rows = quantize(weight, bits=8)
        assert torch.allclose(dequantize(rows, 8, 8), weight, atol=0.02)
    """
    result: Tensor = operators.nbit_quantize(weight, bits, params)
    return result


def dequantize(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Convert quantized rows back to fp32 values, ``[rows, D]``.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``, from ``quantize``.
        bits: bits per value.
        dim: D.
    """
    result: Tensor = operators.nbit_dequantize(rows, bits, dim)
    return result


def to_fbgemm_bytes(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows to FBGEMM's ``FloatToFusedNBitRowwiseQuantizedSBHalf`` format.

    FBGEMM stores the scale and bias after the codes, and does not pad rows to 4 bytes.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``, from ``quantize``.
        bits: bits per value: 8, 4 or 2.
        dim: values per row, D.

    Returns:
        uint8 ``[rows, code_bytes(D, bits) + 4]``.

    Raises:
        ValueError: the rows have another length or dtype.
    """
    _check_rows(rows, row_bytes(dim, bits), f"rows of {dim} {bits}-bit values")
    # Padding after the codes is dropped.
    codes = rows[:, PARAM_BYTES : PARAM_BYTES + code_bytes(dim, bits)]
    return torch.cat([codes, rows[:, :PARAM_BYTES]], 1)


def from_fbgemm_bytes(fused: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows from FBGEMM's format to the format of ``quantize``. Inverse of ``to_fbgemm_bytes``.

    Args:
        fused: uint8 ``[rows, code_bytes(D, bits) + 4]``.
        bits: bits per value: 8, 4 or 2.
        dim: values per row, D.

    Returns:
        uint8 ``[rows, row_bytes(D, bits)]``.

    Raises:
        ValueError: the rows have another length or dtype.
    """
    num_bytes = code_bytes(dim, bits)
    # No padding in this format.
    _check_rows(fused, num_bytes + PARAM_BYTES, f"FBGEMM's rows of {dim} {bits}-bit values")
    # Zeros, which leaves the padding 0.
    rows = fused.new_zeros(len(fused), row_bytes(dim, bits))
    rows[:, :PARAM_BYTES] = fused[:, num_bytes:]
    rows[:, PARAM_BYTES : PARAM_BYTES + num_bytes] = fused[:, :num_bytes]
    return rows


def _check_rows(rows: Tensor, width: int, description: str) -> None:
    """Raise ValueError unless the rows are uint8 with ``width`` bytes per row."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{description} are {width} uint8, got {rows.dtype} {list(rows.shape)}. Give the width and bits "
            "they were quantized with."
        )
