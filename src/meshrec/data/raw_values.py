"""Conversion of raw values in requests to the model inputs of training.

[Note: raw values]

Training, ``meshrec predict``, servers and exported packages convert Arrow columns to model inputs with the
same function, `Features.inputs`, so a model gets the same inputs everywhere. Files provide Arrow columns. A
request has JSON values, from which `table_of` first builds Arrow columns, by the rules for values in files.
``docs/rooms/serve.md`` lists these rules.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from meshrec.data.arrow import pa
from meshrec.data.encoding import RowChecks, RowOrigin
from meshrec.data.faults import DataError, Faults, shown
from meshrec.data.samples import Floats, Ints

if TYPE_CHECKING:
    from meshrec.data.features import Features
    from meshrec.data.features.values import Kind

# B samples, D dense columns, N ids

DENSE = "dense"
"""Name of the dense values in requests, and in sets of shared features."""
FITTED, COLUMNS = "features.json", "columns.arrow"
"""Files in a package: the fitted features, with vocabularies in ``features.arrow``, and the Arrow schema for
the request columns."""
_TAKES: dict[str, tuple[str, tuple[type, ...]]] = {
    "integer": ("a whole number", (int,)),
    "number": ("a number", (int, float)),
    "text": ("a text", (str,)),
    "time": ("a time such as '2030-01-31T12:00:00'", (str, int)),
}
"""By column kind: a description for messages, and the Python types of the JSON values it accepts."""


class Encoded(NamedTuple):
    """Model inputs for B samples."""

    dense: Floats
    """Dense values, float32 [B, D], or [1, D] if they are shared."""
    values: dict[str, Ints]
    """IDs for all samples, by feature, int64 [N]."""
    lengths: dict[str, Ints]
    """Number of IDs per sample, by feature, int64 [B], or [1] if the feature is shared."""
    shared: frozenset[str]
    """Features with a single row for all samples. Contains `DENSE` if the dense values have a single row."""


class RawValues:
    """Conversion of columns to model inputs: IDs and dense values; see [Note: raw values].

    Args:
        features: fitted features; labels are ignored.
        types: Arrow schema for the columns in the training data.
    """

    def __init__(self, features: "Features", types: "pa.Schema") -> None:
        from meshrec.data.features import Vocabulary
        from meshrec.data.features.values import kind_of

        # Requests have no labels.
        self._features, self._types = features.unlabelled(), types
        # Float64 would round large IDs in requests.
        integers = {feature.source for feature in self._features.ids if feature.reads_integers}
        self.columns: dict[str, Any] = {
            name: _request_type(types.field(name).type, is_integer=name in integers)
            for name in self._features.columns()
        }
        """Arrow type for every column in a request, by name."""
        self.kinds: dict[str, Kind] = {name: kind_of(kind) for name, kind in self.columns.items()}
        """Kind of values in every column, such as "integer" for all widths of integers; by name."""
        self.optional: dict[str, str] = {
            feature.source: feature.also
            for feature in self._features.ids
            if isinstance(feature, Vocabulary) and feature.also is not None
        }
        """Columns that a request may leave out, with the column whose values are used too; see
        `Vocabulary.also`."""
        for join in self._features.joins:
            join.kinds()  # load the table now, not in the first request

    @property
    def keys(self) -> list[str]:
        """Names of the ID features, in order."""
        return list(self._features.keys)

    @property
    def num_dense(self) -> int:
        """Number of dense columns."""
        return len(self._features.numbers)

    def wrong_columns(self, schema: "pa.Schema") -> list[str]:
        """Return an error message for every missing or unreadable column in a schema."""
        return self._features.wrong_columns(schema)

    def of(self, keys: Sequence[str], *, dense: bool) -> "RawValues":
        """Return a conversion for some of the features."""
        features = tuple(
            feature
            for feature in self._features.features
            if (feature.name in keys if feature in self._features.ids else dense)
        )
        # A join is needed only if a remaining feature reads one of its columns.
        read = {column for feature in features for column in feature.columns()}
        joins = tuple(join for join in self._features.joins if read & set(join.columns))
        return RawValues(replace(self._features, features=features, joins=joins), self._types)

    def encode(self, table: "pa.Table", shared: "pa.Table | None" = None) -> Encoded:
        """Convert a request's columns to model inputs. Columns that no feature reads are ignored.

        Args:
            table: columns with a row per sample, of the kinds in ``kinds``.
            shared: columns whose values are the same for all samples, with a single row. They must not be in
                ``table``.

        Raises:
            DataError: a value is damaged, as it would be in training; the message names column and row.
        """
        valid = np.ones(table.num_rows, np.bool_)
        checks = RowChecks(RowOrigin("the request", 0), valid, Faults("raise"))
        table, shared = self._with_optional(table, shared)
        dense, ids, shared_features, is_dense_shared = self._features.inputs(table, checks, shared)
        ragged = dict(zip(self.keys, ids, strict=True))
        return Encoded(
            dense,
            # Offsets need not start at 0, because the arrays may be slices.
            {key: ids.values[ids.offsets[0] : ids.offsets[-1]] for key, ids in ragged.items()},
            {key: np.diff(ids.offsets) for key, ids in ragged.items()},
            shared_features | {DENSE} if is_dense_shared else shared_features,
        )

    def _with_optional(
        self, table: "pa.Table", shared: "pa.Table | None"
    ) -> "tuple[pa.Table, pa.Table | None]":
        """Return both tables, with null columns for optional columns that are missing from the request.

        The null column is added to the table with the column that replaces it in `RawValues.optional`.
        """
        for name, other in self.optional.items():
            shared_names = [] if shared is None else shared.column_names
            if name in table.column_names or name in shared_names:
                continue
            # In the table of the other list, so a list shared by all samples is not repeated for them.
            if shared is not None and other in shared_names:
                shared = shared.append_column(name, pa.nulls(shared.num_rows, self.columns[name]))
            elif other in table.column_names:
                table = table.append_column(name, pa.nulls(table.num_rows, self.columns[name]))
        return table, shared

    def save(self, folder: Path) -> None:
        """Write the fitted features, the column types and the joined tables into a package's folder."""
        joins = []
        for number, join in enumerate(self._features.joins):
            name = f"join{number}-{Path(join.path).name}"
            # Packages are self-contained: the original table may change or be gone.
            shutil.copyfile(join.path, folder / name)
            joins.append(replace(join, path=name))
        replace(self._features, joins=tuple(joins)).save(folder / FITTED)
        (folder / COLUMNS).write_bytes(pa.schema(list(self.columns.items())).serialize().to_pybytes())

    @staticmethod
    def load(folder: Path) -> "RawValues":
        """Read a conversion that `save` wrote into a folder."""
        from meshrec.data.features import Features

        features = Features.load(folder / FITTED)
        joins = tuple(replace(join, path=str(folder / join.path)) for join in features.joins)
        types = pa.ipc.read_schema(pa.py_buffer((folder / COLUMNS).read_bytes()))
        return RawValues(replace(features, joins=joins), types)


def _request_type(kind: Any, *, is_integer: bool) -> Any:
    """Return a type without dictionary encoding; lists of any layout become plain lists.

    Args:
        kind: Arrow type in the training data.
        is_integer: whether floats become integers.
    """
    if pa.types.is_dictionary(kind):
        return _request_type(kind.value_type, is_integer=is_integer)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.list_(_request_type(kind.value_type, is_integer=is_integer))
    return pa.int64() if is_integer and pa.types.is_floating(kind) else kind


def table_of(columns: Mapping[str, Sequence[Any]], raw: RawValues, where: str = "") -> "pa.Table":
    """Build Arrow columns with the types in the training data from JSON values; see [Note: raw values].

    Args:
        columns: by column name, a list with an entry per sample. An entry is a value, or a list of values.
        raw: conversion that has the column types.
        where: text before "sample 3" in error messages.

    Raises:
        DataError: a value has another kind; the message names the column and sample.
    """
    return pa.table(
        {name: column_of(name, values, raw.columns[name], where) for name, values in columns.items()}
    )


def column_of(name: str, values: Sequence[Any], kind: Any, where: str = "") -> Any:
    """Build an Arrow array with an entry per sample, possibly a list.

    Args:
        name: column name, for messages.
        values: JSON value per sample; None is null.
        kind: the column's Arrow type.
        where: text before "sample 3" in error messages.
    """
    if not pa.types.is_list(kind):
        return _flat(name, values, kind, lambda position: f"{where}sample {position}")
    lengths, flat = [0], []
    for sample, value in enumerate(values):
        if value is not None and not isinstance(value, list):
            raise DataError(f"column {name!r} of {where}sample {sample} must be a list, got {shown(value)}")
        flat += value or []
        lengths.append(len(flat))
    # For messages: the sample of every flattened value.
    sample_of = [sample for sample, value in enumerate(values) for _ in value or []]
    inner = _flat(name, flat, kind.value_type, lambda position: f"{where}sample {sample_of[position]}")
    return pa.ListArray.from_arrays(pa.array(lengths, pa.int32()), inner)


def _flat(name: str, values: Sequence[Any], kind: Any, sample_name: Callable[[int], str]) -> Any:
    """Build an Arrow array without lists.

    Args:
        kind: the column's Arrow type. Integers may get a wider type.
        sample_name: function mapping the index of a value to the name of its sample, for messages.
    """
    from meshrec.data.features.values import array_of, kind_of

    value_kind = kind_of(kind)
    description, types = _TAKES.get(value_kind, ("of a known kind", ()))
    if int in types and value_kind != "time":
        values = [_convert_number(value, is_whole=value_kind == "integer") for value in values]
    for position, value in enumerate(values):
        # In Python, bool is a subclass of int.
        if value is not None and (type(value) is bool or not isinstance(value, types)):
            raise DataError(
                f"column {name!r} of {sample_name(position)} must be {description}, got {shown(value)}"
            )
    try:
        if value_kind == "time" and any(isinstance(value, str) for value in values):
            return _times(values, kind)
        if value_kind == "integer" and any(value is not None for value in values):
            # Files may have wider integers than training data, so do not cast to the training width.
            array = array_of(values)
            if pa.types.is_decimal(array.type) and not pa.types.is_decimal(kind):
                raise ValueError("it holds integers beyond 64 bits")
            return array
        if pa.types.is_decimal(kind):
            return pa.array([None if v is None or v != v else Decimal(repr(v)) for v in values], kind)
        if value_kind == "number":  # JSON writes 1.0 as 1
            values = [None if value is None else float(value) for value in values]
        return pa.array(values, kind)
    except (pa.ArrowException, OverflowError, ValueError) as error:
        raise DataError(f"column {name!r} must fit {kind}: {error}") from error


def _convert_number(value: Any, *, is_whole: bool) -> Any:
    """Convert a boolean to 0 or 1. For an integer column, also convert 1e3 to 1000, and NaN to null."""
    if isinstance(value, float) and is_whole:
        return None if value != value else int(value) if value.is_integer() else value
    return int(value) if isinstance(value, bool) else value


def _times(values: Sequence[Any], kind: Any) -> Any:
    """Parse strings as times of a type. An empty string is null, because tensors have no other null."""
    texts = [None if value == "" else value for value in values]
    if pa.types.is_time(kind):  # Arrow does not cast strings to times of day
        texts = [None if text is None else f"1970-01-01T{text}" for text in texts]
        return pa.array(texts, pa.string()).cast(pa.timestamp(kind.unit)).cast(kind)
    return pa.array(texts, pa.string()).cast(kind)
