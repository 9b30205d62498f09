"""Column statistics for data with unknown structure, computed in a single pass over the data."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import torch

from meshrec.data.exact_columns import plain_type
from meshrec.data.features.label import Label
from meshrec.data.features.sketches import Counts, Distinct, RowSample
from meshrec.data.features.values import (
    Kind,
    are_times,
    decoded,
    floats_of,
    hashes_of,
    is_missing,
    is_utf8,
    is_whole,
    kind_of,
    split_values_of,
    values_of,
    whole,
)
from meshrec.metrics.areas import area_under_curve

_EXAMPLES = 3
"""Example values per column."""
_MAX_LABELS = 1000
"""Maximum distinct labels that are counted exactly. A label with more values does not stand for classes."""
_EXAMPLE_LENGTH = 40
"""Maximum characters of an example value."""


@dataclass
class Column:
    """Statistics of a column.

    Attributes:
        name: column name.
        kind: value kind. Floats or decimals with three or more distinct values, all integral, have the kind
            "integer"; strings that are all ISO 8601 times have the kind "time".
        type: Arrow type without dictionary encoding, as a string.
        num_rows: row count.
        num_missing: rows with null, NaN or the empty string.
        distinct: estimated distinct values; for lists, distinct elements.
        low: smallest number or time (in seconds since 1970); None for other kinds.
        high: largest number or time.
        mean_length: mean length of a list; None for other kinds.
        max_length: maximum length of a list.
        examples: some values as strings.
        quantiles: quantiles of sampled numbers or times at 0, 1, 25, 50, 75, 99 and 100 %; empty for other
            kinds.
        top_shares: shares of the most frequent values in sampled rows, in descending order, at most 20.
        signal: AUC of the column as the only predictor of the label, see `_column_auc`; None if unknown.
        counts_up: whether integers rise from row to row, like row numbers.
        separator: separator between the values in a string; None if strings are single values. With a
            separator, lengths and ``distinct`` refer to the sampled rows.
        written_number: an example such as "$1,234.56", if all strings are numbers in a format that Arrow does
            not parse; otherwise None.
        num_infinite: number of infinite values.
        has_bytes: whether some binary values are not UTF-8.
    """

    name: str
    kind: Kind
    type: str
    num_rows: int = 0
    num_missing: int = 0
    distinct: int = 0
    low: float | None = None
    high: float | None = None
    mean_length: float | None = None
    max_length: int | None = None
    examples: list[str] = field(default_factory=list)
    quantiles: list[float] = field(default_factory=list)
    top_shares: list[float] = field(default_factory=list)
    signal: float | None = None
    counts_up: bool = False
    separator: str | None = None
    written_number: str | None = None
    num_infinite: int = 0
    has_bytes: bool = False

    @property
    def missing(self) -> float:
        """Share of rows without a value."""
        return self.num_missing / max(self.num_rows, 1)


class Profile(NamedTuple):
    """Statistics of a table."""

    num_rows: int
    columns: dict[str, Column]
    """Statistics by column name, in column order."""
    sample: pa.Table
    """Random sample of the rows, in random order; all rows of a small table."""
    labels: Counts | None = None
    """Exact counts of the label values, most frequent first; None without a label, and for more than 1,000
    values.
    """


class _Sketch:
    """Accumulator for a column's statistics: call `add` for all rows, then `finished`."""

    def __init__(self, name: str, kind: pa.DataType) -> None:
        kind = plain_type(kind)
        value_type = kind.value_type if pa.types.is_dictionary(kind) else kind
        # Filled by `add`; `finished` sets the fields that need all rows or the row sample.
        self.column = Column(name, kind_of(kind), str(value_type))
        self._distinct = Distinct(np.zeros(0, np.uint64))
        # Elements of all lists so far.
        self._num_values = 0
        # First and last finite number so far.
        self._first: float | None = None
        self._last: float | None = None
        # What holds for all values so far: they rise, are integral, are strings with ISO 8601 times.
        self._rises = True
        self._is_whole = True
        self._are_times = True

    def add(self, chunks: Any) -> None:
        """Add the next rows of the column, an Arrow array."""
        column = self.column
        array, offsets = values_of(chunks)
        num = len(offsets) - 1
        column.num_rows += num
        if column.kind == "other":
            column.num_missing += chunks.null_count
            return
        lengths = np.diff(offsets)
        if column.kind.startswith("list"):
            column.num_missing += chunks.null_count
            column.max_length = max(column.max_length or 0, int(lengths.max(initial=0)))
            self._num_values += int(lengths.sum())
        # Missing numbers are counted as NaN in `_add_values`.
        elif column.kind != "number":
            missing = is_missing(array)
            column.num_missing += 0 if missing is None else int(missing.sum())
        self._distinct = self._distinct.merged(Distinct.of(array))
        if column.kind.endswith("number"):
            self._is_whole = self._is_whole and is_whole(array)
        if column.type in ("binary", "large_binary") and not column.has_bytes:
            column.has_bytes = not is_utf8(array)
        if column.kind == "text" and self._are_times:
            self._are_times = are_times(array)
        if column.kind in ("number", "integer", "time"):
            self._add_values(floats_of(array, None, "s"))

    def _add_values(self, values: npt.NDArray[np.float64]) -> None:
        """Add numbers or times (seconds since 1970) to the extremes; check whether they rise."""
        column, finite = self.column, np.isfinite(values)
        if column.kind == "number":
            column.num_missing += int(np.isnan(values).sum())
        column.num_infinite += int(np.isinf(values).sum())
        values = values[finite]
        if not len(values):
            return
        self._add_extremes(float(values.min()), float(values.max()))
        sequence = values if self._last is None else np.append(self._last, values)
        # Includes the previous block's last value, so blocks do not change the result.
        self._rises = self._rises and bool((np.diff(sequence) > 0).all())
        self._first = float(values[0]) if self._first is None else self._first
        self._last = float(values[-1])

    def _add_extremes(self, low: float, high: float) -> None:
        column = self.column
        column.low = low if column.low is None else min(column.low, low)
        column.high = high if column.high is None else max(column.high, high)

    def append(self, later: "_Sketch") -> None:
        """Add the statistics of the rows that follow directly on the rows of this sketch."""
        column, added = self.column, later.column
        column.num_rows += added.num_rows
        column.num_missing += added.num_missing
        column.num_infinite += added.num_infinite
        column.has_bytes = column.has_bytes or added.has_bytes
        if added.max_length is not None:
            column.max_length = max(column.max_length or 0, added.max_length)
        if added.low is not None and added.high is not None:
            self._add_extremes(added.low, added.high)
        self._rises = self._rises and later._rises
        # Both parts are in row order, so only the two values at their border remain to be compared.
        if later._first is not None:
            self._rises = self._rises and (self._last is None or self._last < later._first)
            self._first = later._first if self._first is None else self._first
            self._last = later._last
        self._num_values += later._num_values
        self._is_whole = self._is_whole and later._is_whole
        self._are_times = self._are_times and later._are_times
        self._distinct = self._distinct.merged(later._distinct)

    def finished(self, sample: Any) -> Column:
        """Return the statistics after all rows were added.

        Decides the column kind, and computes examples, quantiles and frequencies from sampled rows.
        """
        column = self.column
        num_values = (
            self._num_values if column.max_length is not None else column.num_rows - column.num_missing
        )
        column.distinct = min(self._distinct.count(), num_values)  # the sketch is approximate
        if column.kind == "number" and self._is_whole and column.distinct > 2:
            # Pandas writes integers with nulls as floats, and DuckDB 128-bit integers as decimals.
            column.kind = "integer"
        elif column.kind == "list of number":
            column.kind = "list of integer" if self._is_whole else "other"
        elif column.kind == "text" and self._are_times and column.num_missing < column.num_rows:
            column.kind = "time"
        column.counts_up = column.kind == "integer" and self._rises and column.num_missing == 0
        if column.max_length is not None:
            column.mean_length = self._num_values / max(column.num_rows, 1)
        values = sample.drop_null()
        column.examples = [_short(value) for value in values.slice(0, _EXAMPLES).to_pylist()]
        if column.kind == "other":
            return column
        if column.kind in ("number", "integer", "time"):
            finite_values = floats_of(sample, None, "s")
            finite_values = finite_values[np.isfinite(finite_values)]
            if len(finite_values):
                # Times as text have no running minimum and maximum.
                column.low = float(finite_values.min()) if column.low is None else column.low
                column.high = float(finite_values.max()) if column.high is None else column.high
                column.quantiles = np.quantile(finite_values, (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)).tolist()
        if column.kind == "text" and column.num_missing < column.num_rows:
            column.written_number = _written_number(values)
            if column.written_number is None:
                _find_separator(column, values)
        hashes = hashes_of(values_of(values).array)
        if len(hashes):
            counts = np.sort(np.unique(hashes, return_counts=True)[1])[::-1]
            column.top_shares = (counts[:20] / len(hashes)).tolist()
        return column


# Numbers with a currency or percent sign, in parentheses, or with grouped digits, such as ($1,234.56).
_SIGNS = "[$€£¥%]?"
_NUMBER = rf"^\s*\(?-?\s*{_SIGNS}\s*-?[0-9]+([,. '][0-9]{{3}})*([.,][0-9]+)?\s*{_SIGNS}\)?\s*$"
_NO_NUMBER = r"(?i)^\s*(-+|\?|\.|n/?a|nan|null|none)\s*$"
"""Strings that stand for a missing number."""


def _written_number(texts: Any) -> str | None:
    """Return an example if all strings are numbers in some notation, or stand for a missing number.

    The example is a string that is not a plain decimal number, such as "$1,234.56". If there is none, it is
    a string with a sign or a decimal point. Returns None if a string is not a number, or if all strings have
    digits only.
    """
    texts = _plain_texts(texts)
    if texts is None:
        return None
    # Distinct strings only, because patterns cost time per string.
    texts = texts.filter(pc.greater(pc.binary_length(texts), 0)).unique()
    is_number = pc.match_substring_regex(texts, _NUMBER)
    is_missing_number = pc.match_substring_regex(texts, _NO_NUMBER)
    if not pc.any(is_number).as_py() or not pc.all(pc.or_(is_number, is_missing_number)).as_py():
        return None
    # The example shows why the numbers were not read: first other notations, then fractions.
    for digits in (r"^-?[0-9]+(\.[0-9]+)?$", "^[0-9]+$"):
        marked = texts.filter(pc.invert(pc.match_substring_regex(texts, digits)))
        if len(marked):
            return str(pc.min(marked).as_py())
    return None


def _plain_texts(texts: Any) -> Any:
    """Return strings without dictionary encoding; None if the values are binary."""
    texts = decoded(texts)
    return texts if pa.types.is_string(texts.type) or pa.types.is_large_string(texts.type) else None


# In order of preference: a comma is more often part of a text than the others.
_SEPARATORS = "|;,"
_SEPARATED = 0.1
"""Minimum share of strings with the separator, in a column with multi-valued strings."""


def _find_separator(column: Column, texts: Any) -> None:
    """Detect a multi-valued string column, such as "rock|jazz", and set its separator and list statistics.

    The separator is the first of ``|``, ``;`` and ``,`` that satisfies two conditions. At least a tenth of
    the strings contain it. It splits the strings into at least 2 distinct values, at most half as many as
    there are distinct strings. The second condition excludes sentences: they contain commas, but their parts
    rarely repeat.
    """
    texts = _plain_texts(texts)
    if texts is None:
        return
    for separator in _SEPARATORS:
        # Counted first, which is cheaper than a split of all strings.
        several = pc.match_substring(texts, separator)
        if not len(texts) or pc.sum(several).as_py() < _SEPARATED * len(texts):
            continue
        parts, offsets = split_values_of(texts, separator)
        distinct = len(parts.unique())
        # Repeated parts distinguish lists from texts that contain the character by chance.
        if 2 <= distinct <= len(texts.unique()) / 2:
            lengths = np.diff(offsets)
            column.separator, column.distinct = separator, distinct
            column.max_length, column.mean_length = int(lengths.max()), float(lengths.mean())
            return


class Profiler:
    """Statistics of consecutive rows of a table. Merging is exact: parts may be added in any process.

    Args:
        schema: Arrow schema of the table's first rows; later rows may have other types.
        label: label column; None: no label.
        max_hash: as for `RowSample.of`.
    """

    def __init__(self, schema: pa.Schema, label: str | None, max_hash: np.uint64 | None = None) -> None:
        self._label, self._max_hash = label, max_hash
        self._sketches = {field.name: _Sketch(field.name, field.type) for field in schema}
        self._sample: RowSample | None = None
        # Exact counts of the label values, until a label is a list, or there are too many values.
        self._labels: Counts | None = None
        self._has_counts = label in self._sketches
        self._num_rows = 0

    def add(self, table: pa.Table, first_row: int) -> None:
        """Add the next rows."""
        for name, sketch in self._sketches.items():
            sketch.add(whole(table[name]))
        # Row numbers in the whole table, so the sample does not depend on how it is divided.
        rows = np.arange(first_row, first_row + table.num_rows, dtype=np.int64)
        self._add_sample(RowSample.of(table, rows, max_hash=self._max_hash))
        if self._has_counts:
            labels = whole(table[self._label])
            self._add_labels(None if _is_nested(labels.type) else Counts.of(decoded(labels)))
        self._num_rows += table.num_rows

    def append(self, later: "Profiler") -> None:
        """Add the statistics of the rows that follow directly on the rows so far."""
        for name, sketch in self._sketches.items():
            sketch.append(later._sketches[name])
        if later._sample is not None:
            self._add_sample(later._sample)
        if later._labels is not None or not later._has_counts:
            self._add_labels(later._labels)
        self._num_rows += later._num_rows

    def _add_sample(self, sample: RowSample) -> None:
        self._sample = sample if self._sample is None else self._sample.merged(sample)

    def _add_labels(self, counts: Counts | None) -> None:
        """Add label counts; None if they are unknown, as for lists."""
        if counts is not None and self._labels is not None:
            counts = self._labels.merged(counts)
        self._has_counts = self._has_counts and counts is not None and len(counts.values) <= _MAX_LABELS
        self._labels = counts if self._has_counts else None

    def profile(self) -> Profile:
        """Return the statistics after all rows were added, which may be called once.

        Raises:
            ValueError: the table has no rows.
        """
        sample, label = self._sample, self._label
        # Merging orders the values by how the rows were divided.
        labels = None if self._labels is None else self._labels.by_count()
        if sample is None or not self._num_rows:
            raise ValueError("there is no row to look at. Name files that have some.")
        columns = {
            name: sketch.finished(whole(sample.table[name])) for name, sketch in self._sketches.items()
        }
        # Columns can be compared with the label if it is a number or has two classes.
        truth = None
        if label in columns and columns[label].kind in ("integer", "number"):
            truth = floats_of(sample.table[label], None, "s")
        elif label is not None and labels is not None and len(labels.values) == 2:
            truth = Label(column=label, classes=labels.values.to_pylist()).targets(whole(sample.table[label]))
        if truth is not None:
            for name, column in columns.items():
                if name != label and column.kind != "other":
                    column.signal = _column_auc(whole(sample.table[name]), column.kind, truth)
        return Profile(self._num_rows, columns, sample.table, labels)


def profile(tables: Iterable[pa.Table], label: str | None) -> Profile:
    """Compute the statistics of a large table in a single pass.

    Args:
        tables: consecutive rows of the table, as Arrow tables with the same schema.
        label: label column, for ``Column.signal`` and ``Profile.labels``; None: no label.

    Raises:
        ValueError: the tables have no rows.
    """
    profiler: Profiler | None = None
    num_rows = 0
    for table in tables:
        profiler = profiler or Profiler(table.schema, label)
        profiler.add(table, num_rows)
        num_rows += table.num_rows
    return (profiler or Profiler(pa.schema([]), label)).profile()


def _is_nested(kind: pa.DataType) -> bool:
    """Return whether values of a type are not counted as labels."""
    return kind_of(kind) == "other" or kind_of(kind).startswith("list")


def _column_auc(array: Any, kind: Kind, labels: npt.NDArray[np.float64]) -> float | None:
    """Return how well a single column predicts the label: the AUC, at least 1/2.

    Two predictions are tried, and the larger AUC is returned:

    - the value itself, ascending or descending (only for numbers and times);
    - the mean label of the rows with the same value, computed on half the rows and evaluated on the other
      half.

    A label above the mean label counts as positive.

    Args:
        labels: labels, [n]. Rows with a non-finite label are skipped.

    Returns:
        The AUC; None for lists, or if the sample lacks positive or negative labels.
    """
    is_finite = np.isfinite(labels)
    positive = labels > labels[is_finite].mean() if is_finite.any() else is_finite
    if kind.startswith("list") or positive[is_finite].all() or not positive[is_finite].any():
        # An AUC needs both classes.
        return None
    areas = []
    if kind in ("number", "integer", "time"):
        values = floats_of(array, None, "s")
        usable = is_finite & np.isfinite(values)
        area = _auc(values[usable], positive[usable])
        areas += [] if area is None else [max(area, 1 - area)]
    hashes = hashes_of(array)
    half = np.arange(len(hashes)) % 2 == 0  # sampled rows are in random order
    # Number the distinct values.
    keys, key_of_row = np.unique(hashes, return_inverse=True)
    fitted, evaluated = half & is_finite, ~half & is_finite
    num = np.bincount(key_of_row[fitted], minlength=len(keys))
    sums = np.bincount(key_of_row[fitted], positive[fitted], minlength=len(keys))
    prior = positive[fitted].mean() if fitted.any() else 0.5
    # Smoothed by one prior sample, so unseen values get the mean.
    area = _auc(((sums + prior) / (num + 1))[key_of_row][evaluated], positive[evaluated])
    areas += [] if area is None else [max(area, 0.5)]
    return max(areas, default=None)


def _auc(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float | None:
    """Return the AUC of scores [n] for a mask of the positive rows [n]; None if a class has no row."""
    return area_under_curve(torch.from_numpy(scores), torch.from_numpy(positive))


def _short(value: Any) -> str:
    """Return a value as a string for people, rounded and cut if it is long."""
    text = f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)
    return text if len(text) <= _EXAMPLE_LENGTH else text[: _EXAMPLE_LENGTH - 1] + "…"
