"""Times and keys of records, and their serialization for checkpoints."""

from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from meshrec.data.arrow import pa
from meshrec.data.samples import Bools, Ints

TimeUnit = Literal["s", "ms", "us", "ns"]
"""Unit of a time that is stored as an integer."""

_NANOSECONDS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
MAX_TIME = 3 * 2**61 - 2
"""Largest valid time in nanoseconds since 1970, in the year 2189. The smallest is ``-MAX_TIME``, in 1750."""


def nanoseconds(column: Any, unit: TimeUnit) -> tuple[Ints, Bools]:
    """Convert timestamps, or integers in a unit.

    Returns:
        - Nanoseconds since 1970, int64 [n]; 0 for invalid times.
        - Whether a time is present and in range, bool [n].
    """
    factor = _NANOSECONDS[column.type.unit if pa.types.is_timestamp(column.type) else unit]
    is_valid = column.is_valid().to_numpy()
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.int64())
    values = column.fill_null(0).to_numpy()
    is_valid &= (values >= -(MAX_TIME // factor)) & (values <= MAX_TIME // factor)
    return np.where(is_valid, values, 0).astype(np.int64) * factor, is_valid


def value_type(kind: Any) -> Any:
    """Return the type of a column's values: that of its dictionary, if it has one."""
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def key_kind(kind: Any) -> str | None:
    """Return "integers", "strings" or "bytes"; None for types that are not supported as keys."""
    kind, types = value_type(kind), pa.types
    if types.is_integer(kind):
        return "integers"
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "strings"
    is_bytes = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return "bytes" if is_bytes else None


def key_values(table: Any, name: str) -> list[Any]:
    """Return a key column as Python values."""
    column = table[name]
    values: list[Any] = column.cast(value_type(column.type)).to_numpy().tolist()
    return values


def table_bytes(table: Any) -> Tensor:
    """Serialize a table as an Arrow IPC stream, uint8 [n]."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return torch.from_numpy(np.frombuffer(sink.getvalue(), dtype=np.uint8).copy())


def table_of(content: Tensor) -> Any:
    """Read the output of `table_bytes`. The table has a copy of the bytes."""
    return pa.ipc.open_stream(pa.py_buffer(content.numpy().tobytes())).read_all()
