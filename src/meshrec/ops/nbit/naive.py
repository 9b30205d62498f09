"""Quantised rows in plain torch: the truth for every kernel, and what serves where none is compiled.

A quantised table is uint8 ``[rows, row_bytes(D, bits)]``. A row is its fp16 scale, its fp16 bias, and a code
of 8, 4 or 2 bits for each number, the first in the lowest bits of a byte; zeros follow up to a multiple of 4
bytes. The number is ``scale * code + bias`` in fp32: the product has at most 19 bits, so there is one
rounding, and every kernel gives the same.

Rounding is FBGEMM's (``FloatToFusedNBitRowwiseQuantizedSBHalf``): the bias is the least number of the row in
fp16, the scale fp16 of ``(greatest - bias) / (2^bits - 1)``, 1 where that is 0; a code is ``(x - bias) * (1 /
scale)``, clamped and rounded to the nearest, halves to even.
"""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.tbe import Lookups
from meshrec.ops.tbe import naive as tbe

# D width, T tables

PARAM_BYTES = 4
"""A row's scale and bias."""
BITS = (8, 4, 2)
"""What codes may have."""


def row_bytes(dim: int, bits: int) -> int:
    """Of a row of ``dim`` numbers: with the scale and the bias, a multiple of 4."""
    return PARAM_BYTES + (code_bytes(dim, bits) + 3) // 4 * 4


def code_bytes(dim: int, bits: int) -> int:
    """Of the codes alone."""
    return (dim * bits + 7) // 8


def nbit_quantize(weight: Tensor, bits: int, params: Tensor | None) -> Tensor:
    """uint8 ``[rows, row_bytes(D, bits)]`` from fp32, fp16 or bf16 ``[rows, D]``.

    ``params``: fp16 ``[rows, 2]``: the scale and the bias of each row, chosen elsewhere; None: FBGEMM's.

    Raises:
        ValueError: for rows with a NaN or an infinity, or with numbers outside fp16's range.
    """
    _check_bits(bits)
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"a weight must be [rows, at least one column], got {list(weight.shape)}.")
    top = (1 << bits) - 1
    numbers = weight.float()
    bad = ~numbers.isfinite().all(1)
    if params is None:
        params = params_of(numbers.amin(1), numbers.amax(1), bits)
    elif params.dtype != torch.float16 or params.shape != (len(weight), 2):
        raise ValueError(
            f"params must hold an fp16 scale and an fp16 bias for each of the {len(weight)} rows."
        )
    bad |= ~params.isfinite().all(1) | (params[:, 0] == 0)
    if bool(bad.any()):
        raise ValueError(
            f"row {int(bad.nonzero()[0])} has a number that is NaN, infinite, or outside fp16's range "
            "(65504), which its scale and bias are kept in, or was given a scale of 0. Mend the row, or keep "
            "the table in fp32."
        )
    scale, bias = params.float().unbind(1)
    codes = ((numbers - bias[:, None]) * (1 / scale)[:, None]).clamp(0, top).round().to(torch.uint8)
    return join_rows(codes, params, bits)


def params_of(least: Tensor, greatest: Tensor, bits: int) -> Tensor:
    """fp16 ``[rows, 2]``: the scale and the bias of rows, from fp32 ``[rows]``: their least and greatest
    numbers.
    """
    bias = least.half()
    scale = ((greatest - bias.float()) / ((1 << bits) - 1)).half()
    return torch.stack([torch.where(scale == 0, torch.ones_like(scale), scale), bias], 1)


def nbit_dequantize(rows: Tensor, bits: int, dim: int) -> Tensor:
    """fp32 ``[rows, D]``."""
    if dim < 1:
        raise ValueError(f"rows have at least one number, got dim {dim}. Give the width they were made with.")
    check_rows(rows, bits, dim)
    codes, params = split_rows(rows, bits, dim)
    scale, bias = params.float().unbind(1)
    return codes.float() * scale[:, None] + bias[:, None]


def nbit_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """``tbe_forward`` of tables of which some are quantised.

    ``bits``: of each table, 0 for those that are not. ``arguments``: those of ``Lookups``, and what
    ``tbe_forward`` takes behind them.

    Raises:
        ValueError: as ``tbe_forward``, and for rows of another length than ``dims`` and ``bits`` give.
    """
    lookups, options = Lookups.split(arguments)
    check_tables(weights, bits, lookups)
    widths = dict(zip(lookups.tables, lookups.dims, strict=True))
    numbers = [
        rows if own == 0 or table not in widths else nbit_dequantize(rows, own, widths[table])
        for table, (rows, own) in enumerate(zip(weights, bits, strict=True))
    ]
    return tbe.tbe_forward(numbers, *lookups[:-1], *options)


def check_tables(weights: list[Tensor], bits: list[int], lookups: Lookups) -> None:
    """Raises ValueError unless every table that is read has rows of the widths that its features have."""
    if len(bits) != len(weights):
        raise ValueError(f"bits must have a number for each of the {len(weights)} weights, got {len(bits)}.")
    if len(lookups.dims) != len(lookups.tables):
        raise ValueError(
            f"dims and tables must have one entry per feature, got {len(lookups.dims)} and "
            f"{len(lookups.tables)}."
        )
    for feature, (table, dim) in enumerate(zip(lookups.tables, lookups.dims, strict=True)):
        if not 0 <= table < len(weights):
            raise ValueError(f"a feature reads table {table} of {len(weights)}.")
        if bits[table]:
            check_rows(weights[table], bits[table], dim)
        elif weights[table].shape[1] != dim:
            raise ValueError(
                f"feature {feature} is {dim} wide but table {table} is not. Give dims as in the forward."
            )


def split_rows(rows: Tensor, bits: int, dim: int) -> tuple[Tensor, Tensor]:
    """The codes, uint8 ``[rows, D]``, one in each, and the parameters, fp16 ``[rows, 2]``."""
    packed = rows[:, PARAM_BYTES : PARAM_BYTES + code_bytes(dim, bits)]
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
    codes = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    params = rows[:, :PARAM_BYTES].contiguous().view(torch.float16)
    return codes.flatten(1)[:, :dim], params


def join_rows(codes: Tensor, params: Tensor, bits: int) -> Tensor:
    """What ``split_rows`` gives, as rows."""
    num_rows, dim = codes.shape
    per_byte = 8 // bits
    rows = codes.new_zeros(num_rows, row_bytes(dim, bits))
    rows[:, :PARAM_BYTES] = params.contiguous().view(torch.uint8)
    spread = codes.new_zeros(num_rows, code_bytes(dim, bits), per_byte)
    spread.flatten(1)[:, :dim] = codes
    for place in range(per_byte):
        rows[:, PARAM_BYTES : PARAM_BYTES + spread.shape[1]] |= spread[:, :, place] << (bits * place)
    return rows


def check_rows(rows: Tensor, bits: int, dim: int) -> None:
    """Raises ValueError unless rows of ``dim`` numbers look so."""
    _check_bits(bits)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes(dim, bits):
        raise ValueError(
            f"the weight must be rows of {row_bytes(dim, bits)} uint8, which {dim} numbers of {bits} bits "
            f"take, got {rows.dtype} {list(rows.shape)}. Make it with meshrec.quant."
        )


def _check_bits(bits: int) -> None:
    if bits not in BITS:
        raise ValueError(f"rows are quantised to 8, 4 or 2 bits, got {bits}.")


implement([nbit_quantize, nbit_dequantize, nbit_forward])
