"""Columns looked up in another table by a key, and columns that all samples in a request share."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError
from meshrec.data.features.values import Kind, converted, decoded, hashes_of, kind_of, one_number, whole
from meshrec.data.locations import is_csv
from meshrec.data.samples import Bools

_MAX_REPEATED_BYTES = 1 << 28
"""Maximum bytes of a column that is copied from the shared row to all samples."""


@dataclass(frozen=True, kw_only=True)
class Join:
    """Columns that are looked up in another table, and added to the data.

    A row of the data gets the values from the table row with the same key, or null without such a row. The
    table is read from a file once, and stays in memory.

    Args:
        path: Parquet or CSV file with the table.
        key: column with the key, in the data and in the table. A key must not occur twice in the table.
        columns: columns of the table to add.
    """

    path: str
    key: str
    columns: tuple[str, ...]

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the key has another kind in the data than in the table, or None."""
        kind, data_kind = self.key_kind(), kinds[self.key]
        if data_kind == kind or {data_kind, kind} == {"integer", "number"}:
            return None
        return f"column {self.key!r} holds {data_kind}, and {kind} in {self.path}. Make them of one kind"

    def key_kind(self) -> Kind:
        """Return the key's kind in the table."""
        return kind_of(self._table().schema.field(self.key).type)

    def kinds(self) -> dict[str, Kind]:
        """Return the added columns' kinds, by name."""
        return {field.name: kind_of(field.type) for field in self.fields()}

    def fields(self) -> list[Any]:
        """Return the added columns as Arrow fields."""
        return [self._table().schema.field(name) for name in self.columns]

    def joined(self, table: pa.Table) -> pa.Table:
        """Return a data table with the columns of the other table appended.

        Raises:
            DataError: a key in the data cannot be converted to the kind of keys in the other table.
        """
        items = self._table()
        sorted_hashes, order = self.__dict__["_sorted"]
        try:
            hashes = hashes_of(converted(whole(table[self.key]), self.key_kind()))
        except ValueError as error:
            raise DataError(f"column {self.key!r}, the key of {self.path}, holds {error}") from error
        positions = np.minimum(np.searchsorted(sorted_hashes, hashes), len(sorted_hashes) - 1)
        is_match = sorted_hashes[positions] == hashes
        # Null has the hash for 0 or the empty string, but must not match.
        is_match &= ~_without_value(table[self.key])
        # Taking a null index gives null.
        rows = pa.array(order[positions], mask=~is_match)
        for name in self.columns:
            table = table.append_column(name, items[name].combine_chunks().take(rows))
        return table

    def _table(self) -> pa.Table:
        """Return the table with the columns to add, loaded and indexed at the first call."""
        # Cached on this frozen dataclass as long as it lives: "_loaded" is the table, and "_sorted" holds the
        # sorted hashes of the keys, with their row numbers.
        table = self.__dict__.get("_loaded")
        if table is None:
            table = _read(self.path)
            missing = [name for name in (self.key, *self.columns) if name not in table.column_names]
            if not missing:
                position = table.column_names.index(self.key)
                table = table.set_column(position, self.key, one_number(whole(table[self.key])))
                # Rows without a key never match.
                table = table.filter(pa.array(~_without_value(table[self.key])))
            if missing or not len(table):
                raise DataError(
                    f"{self.path} has no rows or no columns {missing}; it has {table.column_names}."
                )
            hashes = hashes_of(whole(table[self.key]))
            order = np.argsort(hashes, kind="stable")
            if (hashes[order][1:] == hashes[order][:-1]).any():
                raise DataError(
                    f"{self.path}: values of the key {self.key!r} occur twice. Keep one row of each."
                )
            object.__setattr__(self, "_sorted", (hashes[order], order))
            object.__setattr__(self, "_loaded", table)
        return table

    def to_json(self) -> dict[str, Any]:
        """Return the join as JSON types."""
        return {"path": self.path, "key": self.key, "columns": list(self.columns)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Join":
        """Create a join from the result of `to_json`."""
        return Join(path=saved["path"], key=saved["key"], columns=tuple(saved["columns"]))


class RequestColumns:
    """Columns of a request: some have a row per sample, others a single row that all samples share.

    Args:
        table: columns with a row per sample.
        shared: columns with a single row for all samples; possibly no columns.
        joins: joins that add columns to either table, depending on which has the key.
    """

    def __init__(self, table: pa.Table, shared: pa.Table, joins: Sequence[Join]) -> None:
        for join in joins:
            if join.key in shared.column_names:
                shared = join.joined(shared)
            else:
                table = join.joined(table)
        self.table, self.shared = table, shared

    def table_of(self, columns: Sequence[str]) -> pa.Table:
        """Return a table that has some columns, for a feature that reads them.

        The shared table, with a single row, is returned if it has all the columns. Otherwise the result is
        the table with a row per sample, to which shared columns are copied.

        Raises:
            DataError: too many bytes would be repeated for the samples.
        """
        shared_names = [name for name in columns if name in self.shared.column_names]
        if len(shared_names) == len(columns):
            return self.shared
        table, zeros = self.table, pa.array(np.zeros(self.table.num_rows, np.int64))
        for name in shared_names:
            # The repeated column would take this much memory, and the rows may come from a request.
            if self.shared[name].nbytes * table.num_rows > _MAX_REPEATED_BYTES:
                raise DataError(
                    f"column {name!r} is crossed with those of samples, and has too many bytes to repeat "
                    f"them for {table.num_rows} samples. Send fewer samples at once"
                )
            table = table.append_column(name, self.shared[name].take(zeros))
        return table


def _without_value(chunks: Any) -> Bools:
    """Return a mask for rows with null or NaN."""
    missing: Bools = decoded(whole(chunks)).is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    return missing


def _read(path: str) -> pa.Table:
    from meshrec.data.frames import read_csvs, read_parquet

    return read_csvs([path])[0] if is_csv(path) else read_parquet(path)
