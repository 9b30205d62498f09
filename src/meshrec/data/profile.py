"""A look at data that nobody has described: one pass of sketches, and what they say of each column."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.features.sketches import Distinct, RowSample
from meshrec.data.features.values import (
    Kind,
    hashes_of,
    is_missing,
    kind_of,
    numbers_of,
    split_values_of,
    values_of,
    whole,
)

_EXAMPLES = 3
_EXAMPLE_LENGTH = 40


@dataclass
class Column:
    """A summary of the values of one column.

    Attributes:
        name, kind, type: name, kind and Arrow type of the column.
        num_rows, num_missing: number of rows, and of rows with null, NaN or empty text.
        distinct: estimated number of distinct values; for lists, of the values inside.
        low, high: range of numbers and times (seconds since 1970).
        mean_length, max_length: lengths of lists.
        examples: some values as text.
        quantiles: quantiles of numbers in a sample, at 0, 1, 25, 50, 75, 99 and 100 %.
        top_shares: shares of the most frequent values in the sample, the most frequent first.
        signal: the AUC of the column alone for the label, on rows of the sample; None if unknown.
        counts_up: whether the values rise from row to row, as row numbers do.
        separator: the text between two values, if a text holds several. Lengths and distinct values are
            then those of the sample.
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

    @property
    def missing(self) -> float:
        """Share of rows without a value."""
        return self.num_missing / max(self.num_rows, 1)


class Profile(NamedTuple):
    """The summaries of all columns in the order of the data, the number of rows, and a sample of rows."""

    num_rows: int
    columns: dict[str, Column]
    sample: pa.Table


class _Sketch:
    """The running summary of one column."""

    def __init__(self, name: str, kind: pa.DataType) -> None:
        self.column = Column(name, kind_of(kind), str(kind))
        self._distinct = Distinct(np.zeros(0, np.uint64))
        self._num_values = 0
        self._last: float | None = None
        self._rises = True

    def add(self, chunks: Any) -> None:
        """Add the values of the next rows to the summary."""
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
        elif column.kind != "number":
            missing = is_missing(array)
            column.num_missing += 0 if missing is None else int(missing.sum())
        self._distinct = self._distinct.merged(Distinct.of(array))
        if column.kind in ("number", "integer", "time"):
            self._numbers(numbers_of(array, None, "s"))

    def _numbers(self, values: npt.NDArray[np.float64]) -> None:
        column, finite = self.column, np.isfinite(values)
        if column.kind == "number":
            column.num_missing += int(np.isnan(values).sum())
        values = values[finite]
        if not len(values):
            return
        low, high = float(values.min()), float(values.max())
        column.low = low if column.low is None else min(column.low, low)
        column.high = high if column.high is None else max(column.high, high)
        before = values if self._last is None else np.append(self._last, values)
        self._rises = self._rises and bool((np.diff(before) > 0).all())
        self._last = float(values[-1])

    def finished(self, sample: Any) -> Column:
        """Return the summary, completed by the statistics of a sample."""
        column = self.column
        num_values = (
            self._num_values if column.max_length is not None else column.num_rows - column.num_missing
        )
        column.distinct = min(self._distinct.count(), num_values)  # the sketch counts about
        column.counts_up = column.kind == "integer" and self._rises and column.num_missing == 0
        if column.max_length is not None:
            column.mean_length = self._num_values / max(column.num_rows, 1)
        values = sample.drop_null()
        column.examples = [_short(each) for each in values.slice(0, _EXAMPLES).to_pylist()]
        if column.kind == "other":
            return column
        if column.kind in ("number", "integer", "time"):
            numbers = numbers_of(sample, None, "s")
            numbers = numbers[np.isfinite(numbers)]
            if len(numbers):
                column.quantiles = np.quantile(numbers, (0, 0.01, 0.25, 0.5, 0.75, 0.99, 1)).tolist()
        if column.kind == "text" and column.num_missing < column.num_rows:
            _find_separator(column, values)
        hashes = hashes_of(values_of(values).array)
        if len(hashes):
            counts = np.sort(np.unique(hashes, return_counts=True)[1])[::-1]
            column.top_shares = (counts[:20] / len(hashes)).tolist()
        return column


_SEPARATORS = "|;,"
_SEPARATED = 0.1


def _find_separator(column: Column, texts: Any) -> None:
    """Set the separator of a column whose texts hold several values.

    A tenth of the texts must have the separator, and there must be at most half as many different parts as
    whole texts: sentences have commas, too, but their parts rarely repeat.
    """
    if pa.types.is_dictionary(texts.type):
        texts = texts.dictionary_decode()
    if not pa.types.is_string(texts.type) and not pa.types.is_large_string(texts.type):
        return
    for separator in _SEPARATORS:
        several = pc.match_substring(texts, separator)
        if not len(texts) or pc.sum(several).as_py() < _SEPARATED * len(texts):
            continue
        parts, offsets = split_values_of(texts, separator)
        distinct = len(parts.unique())
        if 2 <= distinct <= len(texts.unique()) / 2:
            lengths = np.diff(offsets)
            column.separator, column.distinct = separator, distinct
            column.max_length, column.mean_length = int(lengths.max()), float(lengths.mean())
            return


def profile(tables: Iterable[pa.Table], label: str | None) -> Profile:
    """Measure tables of one schema in one pass.

    Args:
        tables: the data, a part at a time.
        label: the column to learn, for ``Column.signal``; None if there is none.

    Raises:
        ValueError: there are no rows.
    """
    sketches: dict[str, _Sketch] = {}
    sample: RowSample | None = None
    num_rows = 0
    for table in tables:
        if not sketches:
            sketches = {each.name: _Sketch(each.name, each.type) for each in table.schema}
        for name, sketch in sketches.items():
            sketch.add(whole(table[name]))
        mine = RowSample.of(table, np.arange(num_rows, num_rows + table.num_rows, dtype=np.int64))
        sample = mine if sample is None else sample.merged(mine)
        num_rows += table.num_rows
    if sample is None or not num_rows:
        raise ValueError("there is no row to look at. Name files that have some.")
    columns = {name: sketch.finished(whole(sample.table[name])) for name, sketch in sketches.items()}
    if label in columns and columns[label].kind in ("integer", "number"):
        truth = numbers_of(sample.table[label], None, "s")
        for name, column in columns.items():
            if name != label and column.kind != "other":
                column.signal = signal(whole(sample.table[name]), column.kind, truth)
    return Profile(num_rows, columns, sample.table)


def signal(array: Any, kind: Kind, truth: npt.NDArray[np.float64]) -> float | None:
    """Return the AUC with which a column alone orders rows by a label: the larger of two, each at least 1/2.

    One orders rows by the value itself. The other orders them by the label's mean at each value, learned on
    half of the rows and evaluated on the other half. The label counts as 1 above its mean.
    """
    good = np.isfinite(truth)
    positive = truth > truth[good].mean() if good.any() else good
    if kind.startswith("list") or positive[good].all() or not positive[good].any():
        return None
    found = []
    if kind in ("number", "integer", "time"):
        values = numbers_of(array, None, "s")
        at = good & np.isfinite(values)
        area = _area(values[at], positive[at])
        found += [] if area is None else [max(area, 1 - area)]
    hashes = hashes_of(array)
    half = np.arange(len(hashes)) % 2 == 0  # rows of a sample are in random order
    keys, places = np.unique(hashes, return_inverse=True)
    learns, judges = half & good, ~half & good
    num = np.bincount(places[learns], minlength=len(keys))
    sums = np.bincount(places[learns], positive[learns], minlength=len(keys))
    prior = positive[learns].mean() if learns.any() else 0.5
    area = _area(((sums + prior) / (num + 1))[places][judges], positive[judges])
    found += [] if area is None else [max(area, 0.5)]
    return max(found, default=None)


def _area(scores: npt.NDArray[np.float64], positive: npt.NDArray[np.bool_]) -> float | None:
    num_positive = int(positive.sum())
    num_others = len(positive) - num_positive
    if not num_positive or not num_others:
        return None
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    middle = np.cumsum(counts) - (counts - 1) / 2
    return float(
        (middle[places][positive].sum() - num_positive * (num_positive + 1) / 2) / (num_positive * num_others)
    )


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) and not value.is_integer() else str(value)
    return text if len(text) <= _EXAMPLE_LENGTH else text[: _EXAMPLE_LENGTH - 1] + "…"
