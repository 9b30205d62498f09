"""ID features derived from columns: combinations of columns, number ranges, and time parts."""

import calendar
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import changed_kind_message, check_time, need_fitted, wrong_kind
from meshrec.data.features.ids import IdFeature
from meshrec.data.features.values import (
    DATE_PARTS,
    DatePartName,
    Kind,
    TimeUnit,
    Values,
    array_of,
    converted,
    decoded,
    floats_of,
    hashes_of,
    is_missing,
    kind_of,
    parts_of,
    whole,
)
from meshrec.data.hashing import mix, to_range
from meshrec.data.samples import Ints


@dataclass(frozen=True, kw_only=True)
class Cross(IdFeature):
    """ID feature whose value is the combination of the values in several columns, hashed to a table row.

    Row 0 is for samples in which one of the values is missing.

    Args:
        columns_crossed: two or more columns, without lists.
        num_embeddings: table rows.
        found_crossed: kind of every column when the feature was fitted; None: not fitted.

    Raises:
        ValueError: fewer than two columns or two rows; or as for `IdFeature`.
    """

    needs_fit: ClassVar[bool] = False
    row_options: ClassVar[tuple[str, ...]] = ("columns_crossed", "num_embeddings")

    columns_crossed: tuple[str, ...]
    num_embeddings: int
    found_crossed: tuple[Kind, ...] | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if len(self.columns_crossed) < 2 or self.num_embeddings < 2:
            raise ValueError(f"feature {self.name!r}: a cross needs two columns and two rows at least.")

    @property
    def rows(self) -> int:
        """Table rows."""
        return self.num_embeddings

    def columns(self) -> tuple[str, ...]:
        return self.columns_crossed

    def continued(self, earlier: IdFeature) -> "Cross":
        assert isinstance(earlier, Cross)
        return replace(self, found=earlier.found, found_crossed=earlier.found_crossed)

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if columns with these kinds cannot be crossed; None if they can."""
        for position, column in enumerate(self.columns_crossed):
            fitted = None if self.found_crossed is None else self.found_crossed[position]
            if kinds[column] == "number" and fitted in (None, "integer"):  # integers with nulls may be floats
                continue
            if fitted is not None and kinds[column] != fitted:
                return changed_kind_message(column, kinds[column], fitted, self.name)
            if kinds[column] not in ("integer", "text", "time"):
                return f"column {column!r} holds {kinds[column]}; crosses take integers, texts, times"
        return None

    def rows_of(self, array: Any) -> Ints:
        """Hash the column values of every sample to an embedding table row; row 0 if a value is missing."""
        hashes, missing = np.zeros(len(array), np.uint64), np.zeros(len(array), np.bool_)
        for position in range(len(self.columns_crossed)):
            column = array.field(position)
            # Seeded by position, so (a, b) and (b, a) differ.
            hashes = mix(hashes ^ hashes_of(column), seed=position)
            absent = is_missing(column)
            if absent is not None:
                missing |= absent
        rows = to_range(hashes, self.num_embeddings - 1) + 1
        rows[missing] = 0
        return rows

    def row_of(self, value: Any) -> int:
        """Return the table row for a tuple with a value per column, in the order of ``columns_crossed``."""
        if not isinstance(value, tuple) or len(value) != len(self.columns_crossed):
            raise ValueError(
                f"feature {self.name!r} takes {len(self.columns_crossed)} values, got {value!r}."
            )
        return int(
            self.rows_of(
                pa.StructArray.from_arrays([array_of([part]) for part in value], self.columns_crossed)
            )[0]
        )

    def values(self, table: pa.Table) -> Values:
        """Return the columns as a struct array, with a value per sample."""
        arrays = [decoded(whole(table[column])) for column in self.columns_crossed]
        try:
            arrays = [converted(array, "integer") for array in arrays]
        except ValueError as error:
            raise DataError(f"feature {self.name!r}: columns {self.columns_crossed} hold {error}") from error
        array = pa.StructArray.from_arrays(arrays, names=list(self.columns_crossed))
        return Values(array, np.arange(table.num_rows + 1, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Buckets(IdFeature):
    """ID feature whose value is the range, or bucket, that contains a number.

    Buckets have about equal frequencies in the training data. Row 0 is for null and NaN, and the buckets have
    the rows from 1 on, in ascending order.

    Args:
        num_buckets: maximum buckets. Equal values share a bucket, so there may be fewer.
        part: time part to read, as for `Number`.
        unit: unit for numeric times, as for `Number`.
        edges: borders between buckets, ascending; set by fitting.
        time_format: strptime format for times as text; None: ISO 8601.

    Raises:
        ValueError: ``num_buckets`` is below 2, or part or unit is unknown; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("number", "integer", "time")
    row_options: ClassVar[tuple[str, ...]] = ("num_buckets", "part", "unit", "time_format")

    num_buckets: int = 32
    part: DatePartName | None = None
    unit: TimeUnit = "s"
    edges: tuple[float, ...] | None = None
    time_format: str | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check_time(self.name, self.part, self.unit)
        if self.num_buckets < 2:
            raise ValueError(
                f"feature {self.name!r}: num_buckets must be at least 2, got {self.num_buckets}."
            )

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the feature cannot read a column of this kind; None if it can."""
        return wrong_kind(self, self.allowed, kinds, part=self.part or self.time_format)

    @property
    def rows(self) -> int:
        """Table rows."""
        need_fitted(self)
        assert self.edges is not None
        # n edges divide numbers into n + 1 buckets. Row 0 is for missing values.
        return len(self.edges) + 2

    def fitted(self, sample: Any) -> "Buckets":
        """Return the feature with edges at the quantiles of a sample of the column, an Arrow array.

        Raises:
            DataError: the sample has no finite number.
        """
        values = floats_of(sample, self.part, self.unit, self.time_format)
        values = values[np.isfinite(values)]
        if not len(values):
            raise DataError(
                f"feature {self.name!r}: column {self.source!r} has no numbers to fit on. Drop it."
            )
        shares = np.arange(1, self.num_buckets) / self.num_buckets
        # An actual value as edge (no interpolation) keeps equal values in one bucket.
        edges = np.unique(np.quantile(values, shares, method="inverted_cdf"))
        return replace(self, found=kind_of(sample.type), edges=tuple(edges.tolist()))

    def continued(self, earlier: IdFeature) -> "Buckets":
        assert isinstance(earlier, Buckets)
        return replace(self, found=earlier.found, edges=earlier.edges)

    def ranges(self) -> list[str]:
        """Describe every bucket's range, from row 1 on, such as ``2 to below 5``."""
        edges = [f"{edge:g}" for edge in self.edges or ()]
        if not edges:
            return ["all values"]
        inner = [f"{low} to below {high}" for low, high in itertools.pairwise(edges)]
        return [f"below {edges[0]}", *inner, f"from {edges[-1]}"]

    def rows_of(self, array: Any) -> Ints:
        """Return the table row of the bucket per value, int64 [n]."""
        need_fitted(self)
        values = floats_of(array, self.part, self.unit, self.time_format)
        # An edge belongs to the bucket above it.
        rows = 1 + np.searchsorted(np.asarray(self.edges, np.float64), values, side="right").astype(np.int64)
        rows[~np.isfinite(values)] = 0
        return rows


@dataclass(frozen=True, kw_only=True)
class DatePart(IdFeature):
    """ID feature whose value is a time part in UTC, such as the hour. Row 0 is for null.

    Args:
        part: "month", "day", "weekday", "hour" or "minute".
        unit: unit for numeric times, counted from 1970.
        time_format: strptime format for times as text; None: ISO 8601.

    Raises:
        ValueError: the part has no IDs, or the unit is unknown; or as for `IdFeature`.

    Example::

        import pyarrow as pa

        noon = pa.array([12 * 3600])  # seconds since 1970
        assert DatePart(name="hour").rows_of(noon).tolist() == [13]
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("time", "integer", "number")
    needs_fit: ClassVar[bool] = False
    row_options: ClassVar[tuple[str, ...]] = ("part", "unit", "time_format")

    part: DatePartName = "hour"
    unit: TimeUnit = "s"
    time_format: str | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check_time(self.name, None, self.unit)
        if not DATE_PARTS.get(self.part):
            names = [name for name, size in DATE_PARTS.items() if size]
            raise ValueError(
                f"feature {self.name!r}: part must be one of {names}, got {self.part!r:.100}; others are "
                "Numbers."
            )

    def kind_error(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return the error message if the feature cannot read a column of this kind; None if it can."""
        return wrong_kind(self, self.allowed, kinds, part=self.part or self.time_format)

    @property
    def rows(self) -> int:
        """Table rows."""
        return DATE_PARTS[self.part] + 1

    def text_of(self, row: int) -> str:
        """Describe a table row, as in ``hour 13`` or ``Monday``."""
        if row == 0:
            return "missing"
        if self.part == "weekday":
            return calendar.day_name[row - 1]
        return f"{self.part} {row - 1 + (self.part in ('month', 'day'))}"

    def rows_of(self, array: Any) -> Ints:
        """Return the table row per time, int64 [n]: the part counted from 1, so hour 0 has row 1."""
        parts = pc.fill_null(parts_of(array, self.part, self.unit, self.time_format), -1)
        return parts.to_numpy(zero_copy_only=False).astype(np.int64) + 1  # type: ignore[no-any-return]
