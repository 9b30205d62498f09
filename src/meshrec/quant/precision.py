"""Table row conversion to another data type, and row value checks."""

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
"""How the scale and bias of a quantized row are chosen: "minmax" takes the row's minimum and maximum, as
FBGEMM does; "search" looks for values with a lower squared error.
"""

# Values per block in the search (16 MiB as fp32), and rows per block in the check. They bound the memory for
# temporary tensors.
_BLOCK_VALUES, _BLOCK_ROWS = 1 << 22, 1 << 16


def types_by_table(
    tables: Mapping[str, Sequence[str]], weights: DataType, per_table: Mapping[str, DataType] | None
) -> dict[str, dict[str, DataType]]:
    """Return the data type of every table, by module path and table name.

    Args:
        tables: table names by module path.
        weights: data type for tables not in ``per_table``.
        per_table: data types by table name; see ``optim.table_names``. None: none.

    Raises:
        ValueError: a value is not a DataType, or a table name is unknown or ambiguous.
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
    """Convert rows to another data type.

    Args:
        values: whole rows, [n, D].
        data_type: new data type.
        rounding: how quantized rows get a scale and a bias; see ``Rounding``.
        table: table name in messages.
        first_row: first row's number, for messages.
        ids: ID of every row, int64 [n], by which messages name the row. None for a fixed table (one without a
            hash index): messages give the row number.

    Returns:
        The converted rows, as tables store them. The shape is [n, D] in the new dtype, or for a quantized
            type uint8 [n, bytes per row]. If the rows already have the new type, ``values`` itself is
            returned.

    Raises:
        ValueError: a value is NaN, infinite or out of range; the error names table and row. Rows that already
            have the new type are not checked.
    """
    if not data_type.bits:
        rows = values.to(data_type.dtype)
        # A value outside the new type's range has become infinite. Rows that were not converted are not
        # checked.
        if rows is not values:
            check_rows(rows, data_type, table, first_row=first_row, ids=ids)
        return rows
    try:
        return _quantize_rows(values, data_type.bits, rounding)
    except ValueError:
        # The kernel's error does not name the row. Find it: scale and bias are fp16, so the cause is a value
        # outside the fp16 range.
        check_rows(values.half(), data_type, table, first_row=first_row, ids=ids)
        raise


def check_rows(
    rows: Tensor, data_type: DataType, table: str, *, first_row: int = 0, ids: Tensor | None = None
) -> None:
    """Check that converted rows contain neither NaN nor infinity.

    Args:
        rows: rows after the conversion, [n, D]. A value outside the new type's range has become infinite.
        data_type: data type to name in the message.
        table: table name in messages.
        first_row: first row's number, for messages.
        ids: ID of every row, int64 [n], for messages; None for a table without a hash index.

    Raises:
        ValueError: a value is NaN or infinite. The message names the table and the row.
    """
    # In blocks, because ``isfinite`` creates a temporary tensor as large as its input.
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
    """Quantize rows [n, D], and return the quantized rows, uint8 [n, row_bytes(D, bits)]."""
    if rounding == "minmax":
        return nbit.quantize(values, bits)
    blocks = values.split(max(1, _BLOCK_VALUES // values.shape[1]))
    rows = torch.empty(len(values), nbit.row_bytes(values.shape[1], bits), dtype=torch.uint8)
    for block, target in zip(blocks, rows.split([len(block) for block in blocks]), strict=True):
        # The search starts from the result with minimum and maximum.
        first = nbit.quantize(block, bits)
        target.copy_(nbit.quantize(block, bits, search_params(block, first, bits)))
    return rows
