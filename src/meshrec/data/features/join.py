"""Joins: columns of another table, looked up by a key, such as what is known of items."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError
from meshrec.data.features.values import Kind, converted, hashes_of, kind_of, whole
from meshrec.data.locations import is_csv
from meshrec.data.samples import Bools


@dataclass(frozen=True, kw_only=True)
class Join:
    """Brings columns of a small table, which is kept in memory; rows whose key it does not have get null.

    Args:
        path: a Parquet or CSV file.
        key: the column with the key, in the data and in the file.
        columns: which columns to bring.
    """

    path: str
    key: str
    columns: tuple[str, ...]

    def wrong(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return what is wrong with the key of the data, if anything is."""
        kind, mine = self.key_kind(), kinds[self.key]
        if mine == kind or {mine, kind} == {"integer", "number"}:
            return None
        return f"column {self.key!r} holds {mine}, and {kind} in {self.path}. Make them of one kind"

    def key_kind(self) -> Kind:
        """Return the kind of the key."""
        return kind_of(self._table().schema.field(self.key).type)

    def kinds(self) -> dict[str, Kind]:
        """Return the kinds of the columns that the join adds."""
        return {field.name: kind_of(field.type) for field in self.fields()}

    def fields(self) -> list[Any]:
        """Return the columns that the join adds, as Arrow fields."""
        return [self._table().schema.field(name) for name in self.columns]

    def joined(self, table: pa.Table) -> pa.Table:
        """Return the table with the columns added."""
        items = self._table()
        known, order = self.__dict__["_sorted"]
        try:
            hashes = hashes_of(converted(whole(table[self.key]), self.key_kind()))
        except ValueError as error:
            raise DataError(f"column {self.key!r}, the key of {self.path}, holds {error}") from error
        at = np.minimum(np.searchsorted(known, hashes), len(known) - 1)
        found = known[at] == hashes
        found &= ~_without_value(table[self.key])
        rows = pa.array(order[at], mask=~found)
        for name in self.columns:
            table = table.append_column(name, items[name].combine_chunks().take(rows))
        return table

    def _table(self) -> pa.Table:
        found = self.__dict__.get("_loaded")
        if found is None:
            found = _read(self.path)
            missing = [name for name in (self.key, *self.columns) if name not in found.column_names]
            if not missing:  # no row can ask for what has no key
                found = found.filter(pa.array(~_without_value(found[self.key])))
            if missing or not len(found):
                raise DataError(
                    f"{self.path} has no rows or no columns {missing}; it has {found.column_names}."
                )
            hashes = hashes_of(whole(found[self.key]))
            order = np.argsort(hashes, kind="stable")
            if (hashes[order][1:] == hashes[order][:-1]).any():
                raise DataError(
                    f"{self.path}: values of the key {self.key!r} occur twice. Keep one row of each."
                )
            object.__setattr__(self, "_sorted", (hashes[order], order))
            object.__setattr__(self, "_loaded", found)
        return found

    def to_json(self) -> dict[str, Any]:
        """Return the join as plain JSON types."""
        return {"path": self.path, "key": self.key, "columns": list(self.columns)}

    @staticmethod
    def from_json(saved: Mapping[str, Any]) -> "Join":
        """Make a join from what `to_json` gave."""
        return Join(path=saved["path"], key=saved["key"], columns=tuple(saved["columns"]))


def _without_value(chunks: Any) -> Bools:
    """Return a mask of the rows in which a column is null or NaN."""
    array = whole(chunks)
    plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
    missing: Bools = plain.is_null(nan_is_null=True).to_numpy(zero_copy_only=False)
    return missing


def _read(path: str) -> pa.Table:
    import pyarrow.parquet as parquet

    from meshrec.data.frames import read_csvs

    if is_csv(path):
        return read_csvs([path])[0]
    try:
        return parquet.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(
            f"{path} cannot be read as a table to join: {error}. Give a Parquet or a CSV file."
        ) from error
