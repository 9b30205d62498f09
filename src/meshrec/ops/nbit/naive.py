"""Quantized rows in plain torch: the reference for the kernels, and the fallback without them.

A quantized table is uint8 ``[rows, row_bytes(D, bits)]``. A row starts with an fp16 scale and an fp16 bias.
An integer code with 8, 4 or 2 bits follows for each value. Codes are packed with the first value in the
lowest bits, and padded with zeros to a multiple of 4 bytes. The value for a code is ``scale * code + bias``,
in fp32. The product has at most 19 significant bits, so only the addition rounds, and all kernels give the
same result.

Rounding follows FBGEMM (``FloatToFusedNBitRowwiseQuantizedSBHalf``). The bias is the row minimum in fp16. The
scale is ``(maximum - bias) / (2^bits - 1)`` in fp16, or 1 if that is 0. A code is ``(x - bias) * (1 /
scale)``, clamped and rounded to nearest even.
"""

from typing import Any, NoReturn

import torch
from torch import Tensor

from meshrec.ops.library import implement, register_fakes
from meshrec.ops.tbe import Lookups
from meshrec.ops.tbe import naive as tbe

# Shape legend: D width, T tables.

PARAM_BYTES = 4
"""Bytes per row for scale and bias."""
BITS = (8, 4, 2)
"""Allowed bits per code."""


def row_bytes(dim: int, bits: int) -> int:
    """Return the bytes per quantized row with ``dim`` values, including scale and bias: a multiple of 4."""
    return PARAM_BYTES + (code_bytes(dim, bits) + 3) // 4 * 4


def code_bytes(dim: int, bits: int) -> int:
    """Return the bytes per row that the codes need, without padding."""
    return (dim * bits + 7) // 8


def nbit_quantize(weight: Tensor, bits: int, params: Tensor | None) -> Tensor:
    """Quantize ``[rows, D]`` to uint8 ``[rows, row_bytes(D, bits)]``.

    Args:
        params: scale and bias per row, fp16 ``[rows, 2]``. None: compute them as FBGEMM does.

    Raises:
        ValueError: a row contains NaN, infinity, or a value outside fp16's range, or has a scale of 0.
    """
    _check_bits(bits)
    if weight.dim() != 2 or weight.shape[1] == 0:
        raise ValueError(f"a weight must be [rows, at least one column], got {list(weight.shape)}.")
    top = (1 << bits) - 1
    values = weight.float()
    # Check before quantizing: NaN and infinity have no code.
    # Per row, because the message names the row.
    bad = ~values.isfinite().all(1)
    if params is None:
        params = params_of(values.amin(1), values.amax(1), bits)
    elif params.dtype != torch.float16 or params.shape != (len(weight), 2):
        raise ValueError(
            f"params must hold an fp16 scale and an fp16 bias for each of the {len(weight)} rows."
        )
    # A minimum or maximum outside fp16's range gives infinite parameters.
    bad |= ~params.isfinite().all(1) | (params[:, 0] == 0)
    if bool(bad.any()):
        raise ValueError(
            f"row {int(bad.nonzero()[0])} has a number that is NaN, infinite, or outside fp16's range "
            "(65504), in which its scale and bias are kept, or was given a scale of 0. Repair the row, or "
            "keep the table in fp32."
        )
    # From the rounded parameters, which a lookup will use.
    scale, bias = params.float().unbind(1)
    # Multiplied by the reciprocal, as in FBGEMM: a division could round differently.
    codes = ((values - bias[:, None]) * (1 / scale)[:, None]).clamp(0, top).round().to(torch.uint8)
    return join_rows(codes, params, bits)


def params_of(minimum: Tensor, maximum: Tensor, bits: int) -> Tensor:
    """Compute scale and bias per row from the row minimum and maximum, as FBGEMM does: fp16 ``[rows, 2]``.

    Args:
        minimum: row minimum, fp32 ``[rows]``.
        maximum: row maximum, fp32 ``[rows]``.
        bits: bits per code.
    """
    bias = minimum.half()
    scale = ((maximum - bias.float()) / ((1 << bits) - 1)).half()
    return torch.stack([torch.where(scale == 0, torch.ones_like(scale), scale), bias], 1)


def nbit_dequantize(rows: Tensor, bits: int, dim: int) -> Tensor:
    """Convert quantized rows back to fp32 values, ``[rows, D]``.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``.
    """
    if dim < 1:
        raise ValueError(f"rows have at least one number, got dim {dim}. Give the width they were made with.")
    check_rows(rows, bits, dim)
    codes, params = split_rows(rows, bits, dim)
    scale, bias = params.float().unbind(1)
    return codes.float() * scale[:, None] + bias[:, None]


def nbit_forward(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Look up rows as ``tbe_forward`` does, in tables of which some are quantized.

    Args:
        weights: rows per table; uint8 if quantized.
        bits: bits per code for each table; 0 for a floating-point table.

    Raises:
        ValueError: as for ``tbe_forward``, or row lengths do not match ``dims`` and ``bits``.
    """
    lookups, options = Lookups.split(arguments)
    check_tables(weights, bits, lookups)
    # check_tables has ensured equal widths for features that share a table.
    widths = dict(zip(lookups.tables, lookups.dims, strict=True))
    # The whole table is dequantized: this version is a reference, not meant to be fast.
    floats = [
        # A table without a feature has no known width, and need not be dequantized.
        rows if table_bits == 0 or table not in widths else nbit_dequantize(rows, table_bits, widths[table])
        for table, (rows, table_bits) in enumerate(zip(weights, bits, strict=True))
    ]
    return tbe.tbe_forward(floats, *lookups[:-1], *options)


def check_tables(weights: list[Tensor], bits: list[int], lookups: Lookups) -> None:
    """Raise ValueError unless the rows in each table are as wide as the features that read it.

    Args:
        bits: bits per code for each table; 0 for a floating-point table.
    """
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
    """Unpack quantized rows into codes and parameters. Inverse of ``join_rows``.

    Args:
        rows: uint8 ``[rows, row_bytes(D, bits)]``.

    Returns:
        Codes, one per byte, uint8 ``[rows, D]``; and scale and bias per row, fp16 ``[rows, 2]``.
    """
    packed = rows[:, PARAM_BYTES : PARAM_BYTES + code_bytes(dim, bits)]
    # Bit positions of the codes within a byte.
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=rows.device)
    # [rows, byte, position within the byte].
    codes = (packed[:, :, None] >> shifts) & ((1 << bits) - 1)
    # contiguous(), because a view with another dtype needs adjacent bytes.
    params = rows[:, :PARAM_BYTES].contiguous().view(torch.float16)
    return codes.flatten(1)[:, :dim], params


def join_rows(codes: Tensor, params: Tensor, bits: int) -> Tensor:
    """Pack codes, scales and biases into quantized rows, uint8 ``[rows, row_bytes(D, bits)]``.

    Args:
        codes: codes, a byte per value, uint8 ``[rows, D]``.
        params: scale and bias per row, fp16 ``[rows, 2]``.
    """
    num_rows, dim = codes.shape
    # Codes never cross a byte boundary.
    per_byte = 8 // bits
    rows = codes.new_zeros(num_rows, row_bytes(dim, bits))
    rows[:, :PARAM_BYTES] = params.contiguous().view(torch.uint8)
    # Codes arranged as [row, byte, position within the byte].
    spread = codes.new_zeros(num_rows, code_bytes(dim, bits), per_byte)
    spread.flatten(1)[:, :dim] = codes
    for position in range(per_byte):
        # Padding bits stay 0.
        rows[:, PARAM_BYTES : PARAM_BYTES + spread.shape[1]] |= spread[:, :, position] << (bits * position)
    return rows


def check_rows(rows: Tensor, bits: int, dim: int) -> None:
    """Raise ValueError unless ``rows`` has the dtype and length for quantized rows with ``dim`` values.

    Args:
        rows: tensor to check.
        bits: bits per code.
        dim: values per row.
    """
    _check_bits(bits)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != row_bytes(dim, bits):
        raise ValueError(
            f"the weight must be rows of {row_bytes(dim, bits)} uint8, which {dim} numbers of {bits} bits "
            f"take, got {rows.dtype} {list(rows.shape)}. Make it with meshrec.quant."
        )


def _check_bits(bits: int) -> None:
    """Raise ValueError unless ``bits`` is 8, 4 or 2."""
    if bits not in BITS:
        raise ValueError(f"rows are quantised to 8, 4 or 2 bits, got {bits}.")


def forward_fake(weights: list[Tensor], bits: list[int], *arguments: Any) -> Tensor:
    """Return the result shape of ``nbit_forward``, for tracing."""
    lookups, (out_size, out_dtype, *_) = Lookups.split(arguments)
    return lookups.values.new_empty(lookups.output_shape(out_size), dtype=out_dtype)


def _raise_no_gradient(ctx: Any, grad: Tensor) -> NoReturn:
    """Raise ValueError: quantized rows cannot be trained. Registered as the backward pass."""
    raise ValueError(
        "quantised tables are for inference: a lookup in them has no gradient. Train the model as it was "
        "before meshrec.quant.quantize, or call this one under torch.no_grad()."
    )


implement([nbit_quantize, nbit_dequantize, nbit_forward])
register_fakes(
    nbit_quantize=lambda weight, bits, params: weight.new_empty(
        [weight.shape[0], row_bytes(weight.shape[1], bits)], dtype=torch.uint8
    ),
    nbit_dequantize=lambda rows, bits, dim: rows.new_empty([rows.shape[0], dim], dtype=torch.float32),
    nbit_forward=forward_fake,
)
torch.library.register_autograd("meshrec::nbit_forward", _raise_no_gradient)
