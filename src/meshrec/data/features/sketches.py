"""Sketches, which summarize a column or a table in one pass: row samples, distinct values and counts.

A sketch of data is computed by merging the sketches of its parts. The result is exactly the same for any
parts in any order, so features fitted on many machines equal those fitted on one.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.exact_columns import as_integers
from meshrec.data.features.values import hashes_and_missing, is_text
from meshrec.data.hashing import UInt64s, mix
from meshrec.data.samples import Ints

SAMPLE_ROWS = 65_536
"""Rows in a `RowSample`. A quantile of a sample has a standard error of about 0.2 % of the rows."""
DISTINCT = 4096
"""Hashes in a `Distinct`. An estimate has a standard error of about 1.6 %."""

_ROW_SEED = 0x5A3B  # another seed would draw other samples, and fit other quantiles


class RowSample(NamedTuple):
    """Random sample of rows, without replacement: the rows whose row numbers have the smallest hashes.

    If the data has fewer rows than the limit of `of`, the sample has all rows.
    """

    table: pa.Table
    """The sampled rows, in ascending order of their hashes, which is a random order."""
    hashes: UInt64s
    """Hash of the row number, per sampled row, ascending."""

    @staticmethod
    def of(
        table: pa.Table, rows: Ints, limit: int = SAMPLE_ROWS, max_hash: np.uint64 | None = None
    ) -> "RowSample":
        """Sample the rows of a table, which may be a part of the data.

        Args:
            table: n data rows.
            rows: row numbers in the whole data, int64 [n].
            limit: maximum sampled rows.
            max_hash: largest row hash in the sample of the whole data, from `max_sample_hash`. Rows with
                larger hashes are left out. None: unknown.
        """
        hashes = _row_hashes(rows)
        if max_hash is not None:
            is_small = hashes <= max_hash
            table, hashes = table.filter(pa.array(is_small)), hashes[is_small]
        return _smallest(table, hashes, limit)

    def merged(self, *others: "RowSample", limit: int = SAMPLE_ROWS) -> "RowSample":
        """Return the sample of all rows from which the samples were taken."""
        samples = (self, *others)
        table = pa.concat_tables([sample.table for sample in samples], promote_options="permissive")
        return _smallest(table, np.concatenate([sample.hashes for sample in samples]), limit)


def smallest_row_hashes(rows: Iterable[Ints]) -> UInt64s:
    """Return the row hashes that a `RowSample` of these rows would have, ascending.

    Args:
        rows: row numbers in the whole data, in arrays.
    """
    smallest = np.zeros(0, np.uint64)
    for numbers in rows:
        hashes = _row_hashes(numbers)
        if len(smallest) == SAMPLE_ROWS:
            # Only few hashes are smaller, so little remains to be sorted.
            hashes = hashes[hashes < smallest[-1]]
        smallest = np.sort(np.concatenate([smallest, hashes]))[:SAMPLE_ROWS]
    return smallest


def max_sample_hash(hashes: Sequence[UInt64s]) -> np.uint64 | None:
    """Return the largest row hash in the sample of all rows; None if the sample has all rows.

    Rows with larger hashes need not be copied into the samples of parts of the data.

    Args:
        hashes: results of `smallest_row_hashes` for all parts of the data.
    """
    smallest = np.sort(np.concatenate(hashes))[:SAMPLE_ROWS]
    return smallest[-1] if len(smallest) == SAMPLE_ROWS else None


def _row_hashes(rows: Ints) -> UInt64s:
    return mix(rows.view(np.uint64), seed=_ROW_SEED)


def _smallest(table: pa.Table, hashes: UInt64s, limit: int) -> RowSample:
    """Return at most ``limit`` rows with the smallest hashes."""
    # Linear time. Only the selected hashes are sorted.
    selected = np.argpartition(hashes, limit)[:limit] if len(hashes) > limit else np.arange(len(hashes))
    order = selected[np.argsort(hashes[selected])]
    return RowSample(table.take(pa.array(order)).combine_chunks(), hashes[order])


class Distinct(NamedTuple):
    """Sketch that estimates the number of distinct values from the smallest hashes of the values.

    The estimate is exact if there are fewer values than the limit. See Bar-Yossef et al.: "Counting distinct
    elements in a data stream" (2002).
    """

    hashes: UInt64s
    """The smallest hashes, ascending and distinct."""

    @staticmethod
    def of(array: Any, limit: int = DISTINCT) -> "Distinct":
        """Sketch an Arrow array. Null, NaN and the empty string are not counted as values."""
        hashes, missing = hashes_and_missing(array)
        return Distinct(np.unique(hashes if missing is None else hashes[~missing])[:limit])

    def merged(self, other: "Distinct", limit: int = DISTINCT) -> "Distinct":
        """Return the sketch of all values from which both sketches were made."""
        return Distinct(np.unique(np.concatenate([self.hashes, other.hashes]))[:limit])

    def count(self, limit: int = DISTINCT) -> int:
        """Return the estimated distinct value count."""
        num = len(self.hashes)
        if num < limit:
            return num
        # The k-th smallest of n uniform values is about k / n.
        return round((num - 1) / (float(self.hashes[-1]) / 2.0**64))


@dataclass(frozen=True)
class Counts:
    """Exact occurrence count for every distinct value."""

    values: Any
    """Distinct values, an Arrow array."""
    counts: Any
    """Occurrence count per value, an Arrow array with int64."""

    @staticmethod
    def of(array: Any) -> "Counts":
        """Count the values in an array with numbers or strings, without null, NaN and the empty string."""
        array = array.drop_null()
        if pa.types.is_decimal(array.type) and array.type.scale <= 0:
            # Decimals and integers with equal values must be counted together.
            array = as_integers(array)
        elif pa.types.is_floating(array.type):
            array = pc.add(array.cast(pa.float64()), 0.0)  # -0.0 is 0.0
            array = array.filter(pc.invert(pc.is_nan(array)))
        if is_text(array.type):
            array = array.filter(pc.greater(pc.binary_length(array), 0))
        counted = pc.value_counts(array)
        return Counts(counted.field("values"), counted.field("counts").cast(pa.int64()))

    def merged(self, *others: "Counts") -> "Counts":
        """Return the counts of the values in all arrays together.

        Raises:
            ArrowInvalid: types have no common type, such as strings and integers, or integers beyond 2**53
                are merged with floats.
        """
        # Files may use different widths, and floats for integers with nulls.
        tables = [counts._table() for counts in (self, *others)]
        kinds = {table.schema.field("value").type for table in tables}
        if any(map(pa.types.is_floating, kinds)):
            for table in tables:
                _check_floats_hold(table["value"])
        # uint64 has no common integer type with int64, but decimals hold both exactly.
        wide = len(kinds) > 1 and any(kind == pa.uint64() or pa.types.is_decimal(kind) for kind in kinds)
        if wide and not any(map(pa.types.is_floating, kinds)):
            exact = pa.schema([("value", pa.decimal256(76, _scale(kinds))), ("count", pa.int64())])
            tables = [table.cast(exact) for table in tables]
        joined = pa.concat_tables(tables, promote_options="permissive")
        # Threads would make the order of groups random.
        grouped = joined.group_by("value", use_threads=False)
        summed = grouped.aggregate([("count", "sum")])
        return Counts(summed["value"].combine_chunks(), summed["count_sum"].combine_chunks())

    def by_count(self) -> "Counts":
        """Return the counts with the most frequent value first; equally frequent values ascend."""
        if self._is_by_count():
            return self
        order = pc.sort_indices(
            self._table(),
            sort_keys=[("count", "descending"), ("value", "ascending")],
        )
        return self.take(order)

    def _is_by_count(self) -> bool:
        """Return whether the values are in the order of `by_count` already, as after `merge_ranks`."""
        steps = np.diff(self.counts.to_numpy())
        if (steps > 0).any():
            return False
        num = max(len(steps), 0)
        ascend = pc.less(self.values.slice(0, num), self.values.slice(1, num))
        return bool(((steps < 0) | ascend.to_numpy(zero_copy_only=False)).all())

    def take(self, indices: Any) -> "Counts":
        """Return the counts at the positions in an Arrow array."""
        return Counts(self.values.take(indices), self.counts.take(indices))

    def with_values(self, values: Any) -> "Counts":
        """Return the counts for converted values, adding up the counts of values that became equal.

        Args:
            values: converted value per count, in the same order.
        """
        return Counts(values, self.counts).merged(Counts(values.slice(0, 0), self.counts.slice(0, 0)))

    def _table(self) -> pa.Table:
        return pa.table({"value": self.values, "count": self.counts})


def _check_floats_hold(values: Any) -> None:
    """Raise ArrowInvalid for decimals beyond 2**53, whose integers float64 cannot represent.

    Arrow checks integers, but rounds decimals. Without this check, the result would depend on whether
    integers became decimals before they are merged with floats.
    """
    if pa.types.is_decimal(values.type) and pc.any(pc.greater(pc.abs(values), 2**53)).as_py():
        raise pa.ArrowInvalid(
            f"the value {pc.max(pc.abs(values)).as_py()} is beyond 2**53, and is not counted with floats"
        )


def _scale(kinds: Iterable[pa.DataType]) -> int:
    """Return the scale of a decimal type for the values of all ``kinds``: their largest scale, at least 0."""
    return max((kind.scale for kind in kinds if pa.types.is_decimal(kind)), default=0)
