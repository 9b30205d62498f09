"""IDs made of columns: crosses, ranges of numbers, parts of times."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import changed_kind, check_time, need_fitted
from meshrec.data.features.ids import IdFeature
from meshrec.data.features.values import (
    DATE_PARTS,
    DatePartName,
    Kind,
    TimeUnit,
    Values,
    array_of,
    converted,
    hashes_of,
    is_missing,
    kind_of,
    numbers_of,
    parts_of,
    whole,
)
from meshrec.data.hashing import mix, to_range
from meshrec.data.samples import Ints


@dataclass(frozen=True, kw_only=True)
class Cross(IdFeature):
    """The combinations of several columns' values, hashed to rows.

    Args:
        columns_crossed: at least two, none of them lists.
        num_embeddings: rows; row 0 is for samples in which one of the values is missing.
        found_crossed: what each of the columns held when it was fitted; None: not fitted.

    Raises:
        ValueError: there are fewer than two columns or two rows; or as for `IdFeature`.
    """

    columns_crossed: tuple[str, ...]
    num_embeddings: int
    found_crossed: tuple[Kind, ...] | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if len(self.columns_crossed) < 2 or self.num_embeddings < 2:
            raise ValueError(f"feature {self.name!r}: a cross needs two columns and two rows at least.")

    @property
    def is_fitted(self) -> bool:
        """True: a hash needs no fitting."""
        return True

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        return self.num_embeddings

    def columns(self) -> tuple[str, ...]:
        return self.columns_crossed

    def wrong(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return why columns of these kinds cannot be crossed, such as a list; None if they can."""
        for at, each in enumerate(self.columns_crossed):
            found = None if self.found_crossed is None else self.found_crossed[at]
            if (kinds[each], found) == ("number", "integer"):  # for their nulls
                continue
            if found is not None and kinds[each] != found:
                return changed_kind(each, kinds[each], found, self.name)
            if kinds[each] not in ("integer", "text", "time"):
                return f"column {each!r} holds {kinds[each]}; crosses take integers, texts, times"
        return None

    def rows_of(self, array: Any) -> Ints:
        """Return the rows of a struct array of the columns."""
        hashes, missing = np.zeros(len(array), np.uint64), np.zeros(len(array), np.bool_)
        for number in range(len(self.columns_crossed)):
            column = array.field(number)
            hashes = mix(hashes ^ hashes_of(column), seed=number)
            absent = is_missing(column)
            if absent is not None:
                missing |= absent
        rows = to_range(hashes, self.num_embeddings - 1) + 1
        rows[missing] = 0
        return rows

    def row_of(self, value: Any) -> int:
        """Return the row of a tuple of values, one of each column."""
        if not isinstance(value, tuple) or len(value) != len(self.columns_crossed):
            raise ValueError(
                f"feature {self.name!r} takes {len(self.columns_crossed)} values, got {value!r}."
            )
        return int(
            self.rows_of(
                pa.StructArray.from_arrays([array_of([each]) for each in value], self.columns_crossed)
            )[0]
        )

    def values(self, table: pa.Table) -> Values:
        """Return the columns as one struct array."""
        arrays = [whole(table[each]) for each in self.columns_crossed]
        plain = [each.dictionary_decode() if pa.types.is_dictionary(each.type) else each for each in arrays]
        if self.found_crossed is not None:
            try:
                plain = [converted(*each) for each in zip(plain, self.found_crossed, strict=True)]
            except ValueError as error:
                raise DataError(
                    f"feature {self.name!r}: columns {self.columns_crossed} hold {error}"
                ) from error
        array = pa.StructArray.from_arrays(plain, names=list(self.columns_crossed))
        return Values(array, np.arange(table.num_rows + 1, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Buckets(IdFeature):
    """Numbers as IDs: ranges that are equally frequent in training. Row 0 is for null and NaN.

    Args:
        num_buckets: the largest number of buckets. There are fewer if many values are equal, because equal
            values share a bucket.
        part, unit: which part of a time to read, and the unit of integer times, as for `Number`.
        edges: the borders between buckets, ascending; fitted on the training data.

    Raises:
        ValueError: ``num_buckets`` is below 2, or part or unit is unknown; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("number", "integer", "time")

    num_buckets: int = 32
    part: DatePartName | None = None
    unit: TimeUnit = "s"
    edges: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check_time(self.name, self.part, self.unit)
        if self.num_buckets < 2:
            raise ValueError(
                f"feature {self.name!r}: num_buckets must be at least 2, got {self.num_buckets}."
            )

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        need_fitted(self)
        assert self.edges is not None
        return len(self.edges) + 2

    def fitted(self, sample: Any) -> "Buckets":
        """Return the feature fitted to the quantiles of a sample of the column."""
        values = numbers_of(sample, self.part, self.unit)
        values = values[np.isfinite(values)]
        if not len(values):
            raise DataError(
                f"feature {self.name!r}: column {self.source!r} has no numbers to fit on. Drop it."
            )
        shares = np.arange(1, self.num_buckets) / self.num_buckets
        edges = np.unique(np.quantile(values, shares, method="inverted_cdf"))
        return replace(self, found=kind_of(sample.type), edges=tuple(edges.tolist()))

    def rows_of(self, array: Any) -> Ints:
        """Return the bucket of each value."""
        need_fitted(self)
        values = numbers_of(array, self.part, self.unit)
        rows = 1 + np.searchsorted(np.asarray(self.edges, np.float64), values, side="right").astype(np.int64)
        rows[~np.isfinite(values)] = 0
        return rows


@dataclass(frozen=True, kw_only=True)
class DatePart(IdFeature):
    """A part of a time (UTC) as IDs: hour, weekday, month, ... Row 0 is for null.

    Args:
        part: month, day, weekday, hour or minute.
        unit: unit of times that are integers.

    Raises:
        ValueError: the part has no IDs, or the unit is unknown; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("time", "integer", "number")

    part: DatePartName = "hour"
    unit: TimeUnit = "s"

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        check_time(self.name, None, self.unit)
        if not DATE_PARTS.get(self.part):
            known = [name for name, size in DATE_PARTS.items() if size]
            raise ValueError(
                f"feature {self.name!r}: part must be one of {known}, got {self.part!r:.100}; others are "
                "Numbers."
            )

    @property
    def is_fitted(self) -> bool:
        """True: it needs no fitting."""
        return True

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        return DATE_PARTS[self.part] + 1

    def rows_of(self, array: Any) -> Ints:
        """Return the part of each time, counted from 1."""
        parts = pc.fill_null(parts_of(array, self.part, self.unit), -1)
        return parts.to_numpy(zero_copy_only=False).astype(np.int64) + 1  # type: ignore[no-any-return]
