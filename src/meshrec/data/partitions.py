"""Hive partition columns, from folder names: ``dt=2024-05-01/part-0.parquet`` has a column ``dt``."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from meshrec.data.arrow import pa
from meshrec.data.locations import File, is_address

# Folder value that Hive writes for null.
_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""Integers without leading zeros that fit int64."""

Keys = Mapping[str, Any]
"""Values for a file's partition columns: an Arrow scalar by column name. A value is the same for all rows."""


def partition_keys(
    files: Sequence[File], kinds: Mapping[str, str] = MappingProxyType({})
) -> dict[File, Keys]:
    """Return the partition column values of every file.

    All files have the same partition columns, null where a path lacks the folder. A column is int64 if all
    values are integers without leading zeros, otherwise string.

    Args:
        files: paths and URIs, as given. Parent folders of a relative path are not searched for columns.
        kinds: known kinds by column name. A "text" column has strings even if all values are integers.
    """
    values_by_file = {file: _partition_values(str(file)) for file in files}
    names = dict.fromkeys(name for values_of_file in values_by_file.values() for name in values_of_file)
    if not names:
        return {file: {} for file in files}
    types = {}
    for name in names:
        values = [
            value
            for values_of_file in values_by_file.values()
            if (value := values_of_file.get(name)) is not None
        ]
        # The same type for all files, so that they have a common schema.
        is_text = kinds.get(name) == "text" or not all(_INTEGER.fullmatch(value) for value in values)
        types[name] = pa.string() if is_text else pa.int64()

    def scalar(name: str, text: str | None) -> Any:
        """Convert a partition value to an Arrow scalar with the column's type; None becomes null."""
        return pa.scalar(text if text is None or types[name] == pa.string() else int(text), types[name])

    return {
        file: {name: scalar(name, values_of_file.get(name)) for name in names}
        for file, values_of_file in values_by_file.items()
    }


def with_keys(table: "pa.Table", keys: Keys) -> "pa.Table":
    """Add partition columns to a table, except those that the table has already."""
    for name, value in keys.items():
        if name not in table.column_names:
            table = table.append_column(name, pa.repeat(value, table.num_rows))
    return table


def _partition_values(path: str) -> dict[str, str | None]:
    """Return the values in a path's ``NAME=VALUE`` folders, by name; None for Hive's null."""
    if is_address(path):
        # Addresses quote special characters, and may end with options.
        path = unquote(path.partition("?")[0])
    folders = path.replace("\\", "/").split("/")[:-1]
    pairs = (folder.partition("=") for folder in folders)
    return {
        unquote(name): None if value == _NULL else unquote(value)
        for name, equals, value in pairs
        if name and equals and value
    }
