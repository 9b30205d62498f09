"""Rows with 8, 4 or 2 bits per value: quantising, dequantising, and lookups beside floating-point tables."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from meshrec.ops.nbit import (
    autograd,  # noqa: F401 - registers the refusal to train
    fakes,  # noqa: F401 - registers the shapes
    triton,  # noqa: F401 - registers the lookup for GPUs
)
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

# Found once, like the lookup of floating-point rows.
_forward: Callable[..., Tensor] = torch.ops.meshrec.nbit_forward.default


def forward(bits: list[int], weights: Sequence[Tensor], lookups: Lookups, options: LookupOptions) -> Tensor:
    """Look up in tables of which some are quantised. ``bits`` has the bits per code of each; 0 for
    floating-point rows.

    ``ops.tbe.forward`` describes the other arguments and the errors. A backward pass raises ValueError.
    """
    return _forward(list(weights), bits, *lookups, *options)


def quantize(weight: Tensor, bits: int, params: Tensor | None = None) -> Tensor:
    """Quantise ``[rows, D]`` to uint8 ``[rows, row_bytes(D, bits)]``, see ``naive.nbit_quantize``."""
    result: Tensor = torch.ops.meshrec.nbit_quantize.default(weight, bits, params)
    return result


def dequantize(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Return the values of rows, fp32 ``[rows, D]``."""
    result: Tensor = torch.ops.meshrec.nbit_dequantize.default(rows, bits, dim)
    return result


def to_fbgemm_bytes(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows to the format of FBGEMM's ``FloatToFusedNBitRowwiseQuantizedSBHalf``: codes, scale, bias.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``, as ``quantize`` returns them.
        bits: 8, 4 or 2 bits for a code.
        dim: the number of values D of a row.

    Returns:
        uint8 ``[rows, code_bytes(D, bits) + 4]``.

    Raises:
        ValueError: the rows have another length, or another dtype than uint8.
    """
    _check_rows(rows, row_bytes(dim, bits), f"rows of {dim} numbers of {bits} bits")
    codes = rows[:, PARAM_BYTES : PARAM_BYTES + code_bytes(dim, bits)]
    return torch.cat([codes, rows[:, :PARAM_BYTES]], 1)


def from_fbgemm_bytes(fused: Tensor, bits: int, dim: int) -> Tensor:
    """Convert rows from the format that ``to_fbgemm_bytes`` describes.

    Raises:
        ValueError: the rows have another length, or another dtype than uint8.
    """
    num_bytes = code_bytes(dim, bits)
    _check_rows(fused, num_bytes + PARAM_BYTES, f"FBGEMM's rows of {dim} numbers of {bits} bits")
    rows = fused.new_zeros(len(fused), row_bytes(dim, bits))
    rows[:, :PARAM_BYTES] = fused[:, num_bytes:]
    rows[:, PARAM_BYTES : PARAM_BYTES + num_bytes] = fused[:, :num_bytes]
    return rows


def _check_rows(rows: Tensor, width: int, what: str) -> None:
    """Raise ValueError for rows that are not ``width`` bytes long."""
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{what} are {width} uint8, got {rows.dtype} {list(rows.shape)}. Give the width and the bits "
            "that they were made with."
        )
