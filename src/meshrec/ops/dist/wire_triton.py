"""Wire encoding on GPUs, launched as Triton kernels. ``wire_naive.py`` documents arguments and results.

A launch handles a column of a block, and a program a row. Nothing synchronizes with the GPU.
"""

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from meshrec.ops.dist import wire_naive as naive
from meshrec.ops.library import implement

_MAX_WIDTH = 8192
"""Maximum column width for the kernels, because a program keeps a row in registers."""


def wire_encode(
    values: Tensor,
    row_counts: list[int],
    first_columns: list[int],
    widths: list[int],
    formats: list[int],
    seeds: list[int],
    table_columns: list[int],
    first_keys: list[int],
    keys: Tensor | None,
    step: int,
) -> tuple[Tensor, Tensor]:
    """Encode rows like ``naive.wire_encode``, with a kernel launch per column.

    Args:
        values, row_counts, first_columns, widths, formats, seeds, table_columns: see ``naive.wire_encode``.
        first_keys, keys, step: see ``naive.wire_encode``.
    """
    from meshrec.ops.dist import wire_triton_kernels as kernels

    # Only stochastic rounding reads these.
    options = seeds, table_columns, first_keys, keys, step
    blocks = list(naive.block_ranges(row_counts, first_columns, widths, formats))
    size = sum(n * block.row_elements for n, block in zip(row_counts, blocks, strict=True))
    if max(widths, default=0) > _MAX_WIDTH or values.dtype != torch.float32 or values.numel() != size:
        # The plain version also raises the error for a wrong size.
        return naive.wire_encode(values, row_counts, first_columns, widths, formats, *options)
    values = values.contiguous()
    message = values.new_empty(
        sum(n * block.row_bytes for n, block in zip(row_counts, blocks, strict=True)), dtype=torch.uint8
    )
    none = torch.iinfo(torch.int64).max
    # Programs lower the second number to the first position, so start from the largest int64.
    report = torch.tensor([0, none], device=values.device)
    for block, column, dim in _columns(blocks, widths):
        c = column.number
        # A column belongs to a block, so pass the keys for the rows in this block.
        row_keys = None if keys is None else keys[block.rows].contiguous()
        kernels.encode_rows[(block.rows.stop - block.rows.start,)](
            values,
            message,
            report,
            row_keys,
            block.element + column.elements.start,
            block.row_elements,
            block.byte + column.bytes.start,
            block.row_bytes,
            dim,
            naive.noise_start(seeds[c], step),
            first_keys[column.block],
            table_columns[c],
            FORMAT=formats[c] & ~naive.STOCHASTIC,
            STOCHASTIC=bool(formats[c] & naive.STOCHASTIC),
            BLOCK=kernels.next_power_of_2(dim),
        )
    # On the device, because the report must not synchronize.
    report[1] = torch.where(report[1] == none, -1, report[1])
    return message, report


def wire_decode(
    message: Tensor, row_counts: list[int], first_columns: list[int], widths: list[int], formats: list[int]
) -> Tensor:
    """Decode rows like ``naive.wire_decode``, with a kernel launch per column.

    Args:
        message, row_counts, first_columns, widths, formats: see ``naive.wire_decode``.
    """
    from meshrec.ops.dist import wire_triton_kernels as kernels

    blocks = list(naive.block_ranges(row_counts, first_columns, widths, formats))
    size = sum(n * block.row_bytes for n, block in zip(row_counts, blocks, strict=True))
    if max(widths, default=0) > _MAX_WIDTH or message.dtype != torch.uint8 or message.numel() != size:
        # The plain version also raises the error for a wrong size.
        return naive.wire_decode(message, row_counts, first_columns, widths, formats)
    message = message.contiguous()
    values = message.new_empty(
        sum(n * block.row_elements for n, block in zip(row_counts, blocks, strict=True)), dtype=torch.float32
    )
    for block, column, dim in _columns(blocks, widths):
        kernels.decode_rows[(block.rows.stop - block.rows.start,)](
            message,
            values,
            block.byte + column.bytes.start,
            block.row_bytes,
            block.element + column.elements.start,
            block.row_elements,
            dim,
            FORMAT=formats[column.number] & ~naive.STOCHASTIC,
            BLOCK=kernels.next_power_of_2(dim),
        )
    return values


def _columns(blocks: list[Any], widths: list[int]) -> Iterator[tuple[Any, Any, int]]:
    """Yield the columns that have rows and values, as (block, column, width)."""
    # Empty blocks and columns would need an empty launch grid, which CUDA refuses.
    for block in blocks:
        for column in block.columns:
            if block.rows.stop > block.rows.start and widths[column.number]:
                yield block, column, widths[column.number]


OPS: list[Callable[..., Any]] = [wire_encode, wire_decode]
"""Operators with Triton kernels."""

if importlib.util.find_spec("triton") is not None:
    implement(OPS, "CUDA")
