"""The conversion of tables to a chosen data type, and the checks of their values."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from meshrec.modules import DataType
from meshrec.ops import nbit
from meshrec.quant.search import searched_params

# D width

Rounding = Literal["minmax", "search"]
"""Choice of the scale and bias of a row: "minmax" takes its minimum and maximum, as FBGEMM does;
"search" looks for a smaller squared error.
"""

_BLOCK_NUMBERS, _BLOCK_ROWS = 1 << 22, 1 << 16


def chosen_types(
    names: Sequence[str], weights: DataType, per_table: Mapping[str, DataType] | None
) -> dict[str, DataType]:
    """Return the data type of each table.

    Raises:
        ValueError: something is not a DataType, or a table does not exist.
    """
    per_table = per_table or {}
    for where, data_type in [("weights", weights), *((f"per_table[{n!r}]", t) for n, t in per_table.items())]:
        if not isinstance(data_type, DataType):
            raise ValueError(
                f"{where} is {data_type!r}, which is not a DataType. Choose one of "
                f"{', '.join(f'DataType.{each}' for each in DataType)}."
            )
    if unknown := [name for name in per_table if name not in names]:
        raise ValueError(
            f"per_table names a table {unknown[0]!r}; the model has {sorted(set(names))}. Name one of these."
        )
    return {name: per_table.get(name, weights) for name in names}


def check_rounding(rounding: Rounding) -> None:
    """Raise ValueError for an unknown rounding."""
    if rounding not in ("minmax", "search"):
        raise ValueError(f"rounding must be 'minmax' or 'search', got {rounding!r}.")


def encoded(
    numbers: Tensor,
    data_type: DataType,
    rounding: Rounding,
    table: str,
    *,
    first_row: int = 0,
    ids: Tensor | None = None,
) -> Tensor:
    """Return whole rows [n, D], from ``first_row`` on, as rows of another type.

    Rows that have the type already are returned without a copy. ``ids`` are those of a hashed table's rows.

    Raises:
        ValueError: a value is NaN, infinite, or outside the type's range; the error names table and row.
    """
    if not data_type.bits:
        rows = numbers.to(data_type.dtype)
        if rows is not numbers:
            check_rows(rows, data_type, table, first_row=first_row, ids=ids)
        return rows
    try:
        return _coded(numbers, data_type.bits, rounding)
    except ValueError:
        check_rows(numbers.half(), data_type, table, first_row=first_row, ids=ids)
        raise


def check_rows(
    rows: Tensor, data_type: DataType, table: str, *, first_row: int = 0, ids: Tensor | None = None
) -> None:
    """Raise ValueError if a row contains NaN or infinity."""
    for first, block in zip(range(0, len(rows), _BLOCK_ROWS), rows.split(_BLOCK_ROWS), strict=True):
        bad = ~block.isfinite().all(1)
        if bool(bad.any()):
            row = first + int(bad.nonzero()[0])
            which = f"row {first_row + row}" if ids is None else f"the row of ID {int(ids[row])}"
            raise ValueError(
                f"table {table!r}: {which} has a number that is NaN, "
                f"infinite, or outside the range that {data_type} can hold. Repair the row, or keep the "
                "table in fp32."
            )


def _coded(numbers: Tensor, bits: int, rounding: Rounding) -> Tensor:
    if rounding == "minmax":
        return nbit.quantize(numbers, bits)
    blocks = numbers.split(max(1, _BLOCK_NUMBERS // numbers.shape[1]))
    rows = torch.empty(len(numbers), nbit.row_bytes(numbers.shape[1], bits), dtype=torch.uint8)
    for block, target in zip(blocks, rows.split([len(block) for block in blocks]), strict=True):
        first = nbit.quantize(block, bits)
        target.copy_(nbit.quantize(block, bits, searched_params(block, first, bits)))
    return rows
