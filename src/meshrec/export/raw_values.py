"""Raw values in place of ids: the features that a run fitted, in its package, applied by the same code."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshrec.data.faults import DataError, Faults, needs
from meshrec.data.samples import Floats, Ints
from meshrec.export.program import DENSE

if TYPE_CHECKING:
    from pyarrow import Schema, Table

    from meshrec.data.features import Features
    from meshrec.data.features.values import Kind

# B samples, D dense columns, N ids

_MOST_REPEATED = 1 << 28
FITTED, COLUMNS = "features.json", "columns.arrow"


class Encoded(NamedTuple):
    """Dense values [B, D], and per feature ids [N] and lengths [B].

    What is ``shared`` (features, or `DENSE`) has one row for all samples.
    """

    dense: Floats
    values: dict[str, Ints]
    lengths: dict[str, Ints]
    shared: frozenset[str]


class RawValues:
    """The conversion of columns of the data to ids and dense values.

    Args:
        features: the fitted features.
        types: an Arrow schema with the types of the data's columns.
    """

    def __init__(self, features: "Features", types: "Schema") -> None:
        from meshrec.data.features.values import kind_of

        self._features, self._types = features.unlabelled(), types
        self.columns: dict[str, Any] = {
            name: _plain(types.field(name).type) for name in self._features.columns()
        }
        """Arrow types of the columns of a request, by name."""
        self.kinds: dict[str, Kind] = {name: kind_of(kind) for name, kind in self.columns.items()}
        """Kinds of the columns' values, such as "integer", whatever their width; by name."""
        for join in self._features.joins:
            join.kinds()  # reads its table

    @property
    def keys(self) -> list[str]:
        """The features of ids, in order."""
        return list(self._features.keys)

    @property
    def num_dense(self) -> int:
        """Columns of the dense values."""
        return len(self._features.numbers)

    def wrong_columns(self, found: "Schema") -> list[str]:
        """Return what is wrong with the columns of a table: missing ones, and kinds that cannot be read."""
        return self._features.wrong_columns(found)

    def of(self, keys: Sequence[str], *, dense: bool) -> "RawValues":
        """Return the conversion for some of the features of ids, and for all dense values or none."""
        features = tuple(
            each
            for each in self._features.features
            if (each.name in keys if each in self._features.ids else dense)
        )
        read = {column for each in features for column in each.columns()}
        joins = tuple(join for join in self._features.joins if read & set(join.columns))
        return RawValues(replace(self._features, features=features, joins=joins), self._types)

    def encode(self, own: "Table", shared: "Table | None" = None) -> Encoded:
        """Convert columns, which have the types in ``columns``, to ids and dense values.

        Args:
            own: a row for each sample.
            shared: one row of the columns that all samples share; ``own`` does not have them.

        Raises:
            DataError: a value would be damage in training, too; the message names column and row.
        """
        from meshrec.data.encoding import Place

        pa = needs("pyarrow", "data")
        shared = pa.table({}) if shared is None else shared
        for join in self._features.joins:
            if join.key in shared.column_names:
                shared = join.joined(shared)
            else:
                own = join.joined(own)
        kept, faults, place = np.ones(own.num_rows, np.bool_), Faults("raise"), Place("the request", 0)

        def table_of(columns: Sequence[str]) -> "Table":
            alike = [name for name in columns if name in shared.column_names]
            if len(alike) == len(columns):
                return shared
            at = pa.array(np.zeros(own.num_rows, np.int64))
            both = own
            for name in alike:
                if shared[name].nbytes * own.num_rows > _MOST_REPEATED:
                    raise DataError(
                        f"column {name!r} is crossed with those of samples, and has too many bytes to repeat "
                        f"them for {own.num_rows} samples. Send fewer samples at once"
                    )
                both = both.append_column(name, shared[name].take(at))
            return both

        tables = [table_of(each.columns()) for each in self._features.numbers]
        alike = bool(tables) and all(table is shared for table in tables)
        dense = np.empty((1 if alike else own.num_rows, len(tables)), np.float32)
        for at, (number, table) in enumerate(zip(self._features.numbers, tables, strict=True)):
            dense[:, at] = number.encode(table[number.source], place, kept[: table.num_rows], faults)
        found = Encoded(dense, {}, {}, frozenset([DENSE] if alike else []))
        for feature in self._features.ids:
            table = table_of(feature.columns())
            ids = feature.encode(table, place, kept[: table.num_rows], faults)
            found.values[feature.name] = ids.values[ids.offsets[0] : ids.offsets[-1]]
            found.lengths[feature.name] = np.diff(ids.offsets)
            if table is shared:
                found = found._replace(shared=found.shared | {feature.name})
        return found

    def save(self, folder: Path) -> None:
        """Write the fitted features into a package, with the tables that they join."""
        pa = needs("pyarrow", "data")
        joins = []
        for number, join in enumerate(self._features.joins):
            name = f"join{number}-{Path(join.path).name}"
            shutil.copyfile(join.path, folder / name)
            joins.append(replace(join, path=name))
        replace(self._features, joins=tuple(joins)).save(folder / FITTED)
        (folder / COLUMNS).write_bytes(pa.schema(list(self.columns.items())).serialize().to_pybytes())

    @staticmethod
    def load(folder: Path) -> "RawValues":
        """Read what `save` wrote."""
        from meshrec.data.features import Features

        ipc = needs("pyarrow.ipc", "data")
        pa = needs("pyarrow", "data")
        features = Features.from_json(json.loads((folder / FITTED).read_text(encoding="utf-8")))
        joins = tuple(replace(join, path=str(folder / join.path)) for join in features.joins)
        types = ipc.read_schema(pa.py_buffer((folder / COLUMNS).read_bytes()))
        return RawValues(replace(features, joins=joins), types)


def _plain(kind: Any) -> Any:
    """Return a type without dictionaries, which only say how values are stored."""
    pa = needs("pyarrow", "data")
    if pa.types.is_dictionary(kind):
        return _plain(kind.value_type)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain(kind.value_type))
    return kind
