"""Table row conversion to a data type, and checks for row values."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from meshrec.modules import DataType
from meshrec.ops import nbit
from meshrec.optim.table_names import by_full_name, full_names
from meshrec.quant.search import search_params

# Shape legend: D width.

Rounding = Literal["minmax", "search"]
"""How row scale and bias are chosen: "minmax" takes minimum and maximum, as FBGEMM does; "search"
reduces the squared error.
"""

# Values per block in the search (16 MiB as fp32), and rows per block in the check, which bound the
# temporaries.
_BLOCK_VALUES, _BLOCK_ROWS = 1 << 22, 1 << 16


def types_by_table(
    tables: Mapping[str, Sequence[str]], weights: DataType, per_table: Mapping[str, DataType] | None
) -> dict[str, dict[str, DataType]]:
    """Return data types by module path and table name.

    Args:
        tables: table names by module path.
        weights: default data type.
        per_table: data types for some tables.

    Raises:
        ValueError: not a DataType, or an unknown or ambiguous table name.
    """
    per_table = per_table or {}
    for where, data_type in [("weights", weights), *((f"per_table[{n!r}]", t) for n, t in per_table.items())]:
        if not isinstance(data_type, DataType):
            raise ValueError(
                f"{where} is {data_type!r}, which is not a DataType. Choose one of "
                f"{', '.join(f'DataType.{data_type}' for data_type in DataType)}."
            )
    names, given = full_names(tables), by_full_name(per_table, tables, "per_table names")
    return {
        path: {name: given.get(names[path, name], weights) for name in names_of_module}
        for path, names_of_module in tables.items()
    }


def check_rounding(rounding: Rounding) -> None:
    """Raise ValueError unless the rounding is "minmax" or "search"."""
    if rounding not in ("minmax", "search"):
        raise ValueError(f"rounding must be 'minmax' or 'search', got {rounding!r}.")


def encode_rows(
    values: Tensor,
    data_type: DataType,
    rounding: Rounding,
    table: str,
    *,
    first_row: int = 0,
    ids: Tensor | None = None,
) -> Tensor:
    """Convert whole rows [n, D] to another data type. Rows already in this type are not copied.

    Args:
        values: rows [n, D].
        data_type: target type.
        rounding: see ``quantize``.
        table: table name for errors.
        first_row: index of the first row, for errors.
        ids: row IDs in a hashed table, for errors.

    Raises:
        ValueError: a value is NaN, infinite or out of range; the error names table and row.
    """
    if not data_type.bits:
        rows = values.to(data_type.dtype)
        if rows is not values:
            check_rows(rows, data_type, table, first_row=first_row, ids=ids)
        return rows
    try:
        return _quantize_rows(values, data_type.bits, rounding)
    except ValueError:
        # The kernel's error does not name the row. Scale and bias are fp16, so a row outside that range is at
        # fault.
        check_rows(values.half(), data_type, table, first_row=first_row, ids=ids)
        raise


def check_rows(
    rows: Tensor, data_type: DataType, table: str, *, first_row: int = 0, ids: Tensor | None = None
) -> None:
    """Raise ValueError if a row contains NaN or infinity.

    Args:
        rows: rows [n, D].
        data_type: data type to name in the error.
        table: table name for errors.
        first_row: index of the first row, for errors.
        ids: row IDs in a hashed table, for errors.
    """
    for first, block in zip(range(0, len(rows), _BLOCK_ROWS), rows.split(_BLOCK_ROWS), strict=True):
        bad = ~block.isfinite().all(1)
        if bool(bad.any()):
            row = first + int(bad.nonzero()[0])
            which = f"row {first_row + row}" if ids is None else f"the row of ID {int(ids[row])}"
            raise ValueError(
                f"table {table!r}: {which} has a value which is NaN, "
                f"infinite, or outside the range of {data_type}. Repair the row, or keep the "
                "table in fp32."
            )


def _quantize_rows(values: Tensor, bits: int, rounding: Rounding) -> Tensor:
    """Return quantized rows, uint8 [n, row_bytes(D, bits)]."""
    if rounding == "minmax":
        return nbit.quantize(values, bits)
    blocks = values.split(max(1, _BLOCK_VALUES // values.shape[1]))
    rows = torch.empty(len(values), nbit.row_bytes(values.shape[1], bits), dtype=torch.uint8)
    for block, target in zip(blocks, rows.split([len(block) for block in blocks]), strict=True):
        first = nbit.quantize(block, bits)
        target.copy_(nbit.quantize(block, bits, search_params(block, first, bits)))
    return rows
