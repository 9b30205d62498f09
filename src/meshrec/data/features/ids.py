"""ID features, which convert values to embedding table rows: base class, hashed values, and integers."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
from typing_extensions import override

from meshrec.data.dataset import Feature
from meshrec.data.encoding import RowChecks
from meshrec.data.exact_columns import decimal_words
from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import need_fitted, wrong_kind
from meshrec.data.features.values import (
    Kind,
    Values,
    array_of,
    converted,
    decoded,
    floats_of,
    hashes_and_missing,
    integers_of,
    is_missing,
    kind_of,
    split_values_of,
    values_of,
)
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.samples import Bools, Codes, Floats, IdTable, Ints, Ragged


@dataclass(frozen=True, kw_only=True)
class IdFeature(ABC):
    """Feature that converts values, or lists with values, in a column to IDs: rows of an embedding table.

    Lists are Arrow lists, or strings with a ``separator`` between values, as in CSV files.

    Args:
        name: feature name.
        column: column to read; None: the column with the feature's name.
        found: column kind when the feature was fitted; None: not fitted.
        max_length: maximum IDs per list; longer lists are cut. None: unlimited.
        keep: which end of a longer list to keep: "first" or "last".
        weights: column with a weight per ID, with lists if the IDs are in lists; None: no weights.
        sequence: whether the IDs in a list are in time order, oldest first.
        table: name of the embedding table. Features with the same table share the rows. None: a table with
            the feature's name.
        average_length: mean IDs per sample; set by fitting.
        separator: string between the values in a string, such as ``"|"``; None: a string is a single value.

    Raises:
        ValueError: ``keep``, ``max_length`` or ``separator`` is not allowed, or does not fit the feature.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ()
    """Kinds of columns that the feature can read."""
    takes_whole_only: ClassVar[bool] = False
    """Whether numbers must be integral. They may be stored as floats or decimals."""
    needs_fit: ClassVar[bool] = True
    """Whether the feature must be fitted to training data before its use."""
    row_options: ClassVar[tuple[str, ...]] = ()
    """Options that determine which row a value has."""

    name: str
    column: str | None = None
    found: Kind | None = None
    max_length: int | None = None
    keep: str = "last"
    weights: str | None = None
    sequence: bool = False
    table: str | None = None
    average_length: float = 1.0
    separator: str | None = None

    def __post_init__(self) -> None:
        refused = not self.separator or self.weights is not None or "text" not in self.allowed
        if self.separator is not None and refused:
            raise ValueError(
                f"feature {self.name!r}: separator is one character or more, of a Vocabulary or Hashed "
                f"feature without weights, which go with lists; got {self.separator!r}, weights "
                f"{self.weights!r}, for {type(self).__name__}."
            )
        if self.keep not in ("first", "last") or (self.max_length is not None and self.max_length < 1):
            raise ValueError(
                f"feature {self.name!r}: keep is 'first' or 'last' and max_length at least 1, got "
                f"{self.keep!r} and {self.max_length}."
            )

    @property
    def source(self) -> str:
        """Column to read."""
        return self.name if self.column is None else self.column

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the feature cannot read columns with these kinds; None if it can."""
        return wrong_kind(self, self.allowed if self.separator is None else ("text",), kinds)

    @property
    def reads_integers(self) -> bool:
        """Whether the feature converts all numbers to integers."""
        return self.takes_whole_only or self.found in ("integer", "list of integer")

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""
        return self.found is not None or not self.needs_fit

    @property
    def null_remedy(self) -> str | None:
        """Advice on null, as the end of an error message. None: null is allowed and has a row."""
        return None

    @property
    @abstractmethod
    def rows(self) -> int:
        """Table rows."""

    @abstractmethod
    def rows_of(self, array: Any) -> Ints:
        """Return the table row per value, int64 [n], for an Arrow array that may contain null."""

    def codes_of(self, array: Any) -> tuple[Codes, IdTable | None]:
        """Return `rows_of`, or codes and the table of their rows, which is faster if values repeat."""
        return self.rows_of(array), None

    def row_of(self, value: Any) -> int:
        """Return the table row of a single value, which is the same in training, prediction and serving.

        Raises:
            UnfittedError: the feature is not fitted.
            ValueError: the value has another kind than the column.
        """
        need_fitted(self)
        # A null needs a type to be hashed or converted.
        null = pa.string() if "text" in self.allowed else pa.int64()
        array = pa.nulls(1, null) if value is None else array_of([value])
        wrong = self.kind_error({self.source: _with_list(kind_of(array.type), self.found)})
        if wrong is not None and value is not None:
            raise ValueError(f"{wrong}; got the value {value!r}.")
        try:
            return int(self.rows_of(self._as_fitted(array))[0])
        except DataError as error:
            raise ValueError(f"{error}; got the value {value!r}.") from error

    def has_rows_of(self, earlier: Any) -> bool:
        """Return whether values have the rows that they had in another feature with the same name."""
        return type(self) is type(earlier) and all(
            getattr(self, name) == getattr(earlier, name) for name in self.row_options
        )

    def continued(self, earlier: "IdFeature") -> "IdFeature":
        """Return this feature with the fit of an earlier feature, for which `has_rows_of` is true."""
        return replace(self, found=earlier.found)

    def columns(self) -> tuple[str, ...]:
        """Return the columns to read: values and, if there are any, weights."""
        return (self.source,) if self.weights is None else (self.source, self.weights)

    def feature(self) -> Feature:
        """Return the description of the feature, from which models and the planner size its table."""
        need_fitted(self)
        return Feature(
            name=self.name,
            num_embeddings=self.rows,
            average_length=self.average_length,
            sequence=self.sequence,
            table=self.table,
        )

    def values(self, table: pa.Table) -> Values:
        """Return the values to convert, with lists flattened.

        Raises:
            DataError: values do not have the fitted kind, or are not UTF-8.
        """
        if self.separator is not None:
            try:
                return split_values_of(table[self.source], self.separator)
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"feature {self.name!r}: column {self.source!r} has bytes that are not UTF-8 and are not "
                    f"split: {error}. Repair the data"
                ) from error
        array, offsets = values_of(table[self.source])
        return Values(self._as_fitted(array), offsets)

    def _as_fitted(self, array: Any) -> Any:
        """Convert numbers in an Arrow array to the fitted kind: integers, or floats."""
        kind = "integer" if self.reads_integers else self.found
        try:
            return array if kind is None else converted(array, kind)
        except ValueError as error:
            raise DataError(f"column {self.source!r} holds {error}. Give it as it was") from error

    def encode(self, table: pa.Table, checks: RowChecks) -> Ragged:
        """Return the IDs for all samples, and mark samples with a damaged value as invalid in ``checks``."""
        values = self.values(table)
        codes, id_table = self.codes_of(values.array)
        self.check(codes, values, checks)
        weights = None if self.weights is None else self._weights(self.weights, table, values, checks)
        return self._cut(Ragged(codes, values.offsets, weights, id_table))

    def check(self, rows: Codes, values: Values, checks: RowChecks) -> None:
        """Mark samples with a damaged value as invalid.

        Args:
            rows: table row (or code) per value, [N]. A subclass sets invalid rows to 0.
            values: values for all samples, N in total.
            checks: updated with the invalid samples.
        """
        missing = None if self.null_remedy is None else is_missing(values.array)
        if missing is not None:
            good = values.samples_without(missing)
            checks.require(good, self.source, f"is null. {self.null_remedy}")

    def _weights(self, column: str, table: pa.Table, values: Values, checks: RowChecks) -> Floats:
        """Return the weight per ID, float32 [N].

        Args:
            checks: updated with samples that have a weight too many, too few, or not finite.
        """
        array, offsets = values_of(table[column])
        weights = floats_of(array, None, "s")
        good = np.diff(offsets) == np.diff(values.offsets)
        # Weights are in a separate column, which may have lists with other lengths.
        if not good.all():
            checks.require(good, column, "has another number of weights than of ids")
            # Weights of invalid samples are 0, so there is a weight per ID.
            padded = np.zeros(len(values.array), np.float32)
            has_weights = np.repeat(good, np.diff(values.offsets))
            padded[has_weights] = weights[np.repeat(good, np.diff(offsets))]
            return padded
        good = Values(array, offsets).samples_without(~np.isfinite(weights))
        checks.require(good, column, "has a weight that is not a number")
        return weights.astype(np.float32)

    def _cut(self, ragged: Ragged) -> Ragged:
        """Cut lists to ``max_length`` IDs."""
        if self.max_length is None:
            return ragged
        lengths = np.diff(ragged.offsets)
        if lengths.max(initial=0) <= self.max_length:
            return ragged
        # Long lists only lose values at one end, so they stay ranges.
        shorter = np.minimum(lengths, self.max_length)
        # Cut at the end ("first") or at the start ("last").
        starts = ragged.offsets[:-1] if self.keep == "first" else ragged.offsets[1:] - shorter
        return ragged.ranges(starts, shorter)


def _with_list(kind: Kind, found: Kind | None) -> Kind:
    """Return the list kind for a kind of values if the feature was fitted on lists, otherwise ``kind``."""
    return f"list of {kind}" if found is not None and found.startswith("list") else kind  # type: ignore[return-value]


LIST_KINDS: tuple[Kind, ...] = ("list of integer", "list of number", "list of text")


@dataclass(frozen=True, kw_only=True)
class Hashed(IdFeature):
    """ID feature that hashes values to table rows. Different values may share a row. Needs no fitting.

    The hash is `meshrec.data.features.hashes_of`, mixed with the seed unless it is 0. Multiplying the upper
    32 bits of the hash by the row count gives the row in the upper 32 bits of the product. With ``missing``,
    row 0 is reserved, and values are hashed to the other rows.

    Args:
        num_embeddings: table rows.
        seed: hash seed. With another seed, other values collide.
        missing: whether null, NaN and empty strings get row 0. Otherwise they are damage.

    Raises:
        ValueError: ``num_embeddings`` is not in [2, 2**32]; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "text", "time", "number", *LIST_KINDS)
    needs_fit: ClassVar[bool] = False
    row_options: ClassVar[tuple[str, ...]] = ("num_embeddings", "seed", "missing")

    num_embeddings: int
    seed: int = 0
    missing: bool = True

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if not 2 <= self.num_embeddings <= 2**32:
            raise ValueError(
                f"feature {self.name!r}: num_embeddings must lie in [2, 2**32], got {self.num_embeddings}."
            )

    @property
    def rows(self) -> int:
        """Table rows."""
        return self.num_embeddings

    def rows_of(self, array: Any) -> Ints:
        """Return the table row per value, int64 [n]."""
        return self.rows_of_hashes(*hashes_and_missing(array))

    def rows_of_hashes(self, hashes: UInt64s, missing: Bools | None) -> Ints:
        """Return the table row per value, int64 [n].

        Args:
            hashes: hash per value, uint64 [n].
            missing: mask for missing values, [n]; None: no value is missing.
        """
        # Seed 0 uses the plain hash, which is documented and must not change.
        if self.seed:
            hashes = mix(hashes, seed=self.seed)
        if not self.missing:
            return to_range(hashes, self.num_embeddings)
        rows = to_range(hashes, self.num_embeddings - 1)
        rows += 1
        if missing is not None:
            rows[missing] = 0
        return rows

    @property
    def null_remedy(self) -> str | None:
        return None if self.missing else f"Set missing=True of feature {self.name!r}"


@dataclass(frozen=True, kw_only=True)
class Integer(IdFeature):
    """ID feature that uses integers in ``[0, num_embeddings)`` as table rows. Other integers are damage.

    Args:
        num_embeddings: table rows.
        missing: table row for null; None: null is damage.

    Raises:
        ValueError: ``num_embeddings`` is below 1, or ``missing`` is not a row; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "number", "list of integer", "list of number")
    takes_whole_only: ClassVar[bool] = True
    needs_fit: ClassVar[bool] = False
    row_options: ClassVar[tuple[str, ...]] = ("missing",)

    num_embeddings: int
    missing: int | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if self.num_embeddings < 1 or (
            self.missing is not None and not 0 <= self.missing < self.num_embeddings
        ):
            raise ValueError(
                f"feature {self.name!r}: num_embeddings must be at least 1 and missing below it, got "
                f"{self.num_embeddings} and {self.missing}."
            )

    @property
    def rows(self) -> int:
        """Table rows."""
        return self.num_embeddings

    def rows_of(self, array: Any) -> Ints:
        """Return the table row per value, int64 [n]; -1 for an integer outside the table."""
        array = decoded(array)
        rows = integers_of(array)
        if pa.types.is_decimal(array.type):  # beyond 64 bits, where `rows` are hashes
            rows = np.where(decimal_words(array)[1], rows, -1)
        if array.null_count:
            null = array.is_null().to_numpy(zero_copy_only=False)
            rows = np.where(null, -1 if self.missing is None else self.missing, rows)
        return np.where(rows.view(np.uint64) < self.num_embeddings, rows, -1)

    @override
    def check(self, rows: Codes, values: Values, checks: RowChecks) -> None:
        """Mark samples with an integer outside the table as invalid."""
        outside = rows < 0
        if outside.any():
            # The example for the message, from the first wrong row.
            first = values.array[int(outside.argmax())].as_py()
            problem = (
                f"null. Give feature {self.name!r} missing=, the row that null has"
                if first is None
                else f"the id {first}, outside [0, {self.num_embeddings}). Raise num_embeddings of feature "
                f"{self.name!r}, or hash it"
            )
            checks.require(values.samples_without(outside), self.source, f"has {problem}")
            # Any valid row: these samples are left out.
            rows[outside] = 0

    def row_of(self, value: Any) -> int:
        """Return the table row of an ID: the ID itself, or ``missing`` for None.

        Raises:
            ValueError: the ID is not in ``[0, num_embeddings)``, or it is None and ``missing`` is not
                set; or as for `IdFeature.row_of`.
        """
        row = IdFeature.row_of(self, value)
        if row < 0:
            raise ValueError(f"feature {self.name!r}: {value!r} lies outside [0, {self.num_embeddings}).")
        return row
