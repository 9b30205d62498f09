"""The frequent values of the training data, with a row for each."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import need_fitted
from meshrec.data.features.ids import IdFeature
from meshrec.data.features.sketches import Counts
from meshrec.data.features.values import (
    Kind,
    array_of,
    converted,
    hashes_and_missing,
    hashes_of,
)
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.samples import Ints


@dataclass(frozen=True, kw_only=True)
class Vocabulary(IdFeature):
    """The frequent values of the training data have a row each; all others share some.

    Row 0 is for null, NaN and the empty text, rows ``[1, 1 + num_unseen)`` are for values that are not in the
    vocabulary (a hash says which), the rest for the vocabulary, the most frequent value first.

    Args:
        min_count: how often a value must occur to be in it; those that share a table count together.
        max_size: the most values in it; the most frequent ones stay.
        num_unseen: rows for all other values.
        num_embeddings: rows of the table; None: as many as are needed.
        vocabulary: the values; fitted.

    Raises:
        ValueError: ``min_count`` or ``num_unseen`` is below 1; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "number", "text", "list of integer", "list of text")

    min_count: int = 1
    max_size: int | None = None
    num_unseen: int = 1
    num_embeddings: int | None = None
    vocabulary: Any = None

    def __post_init__(self) -> None:
        IdFeature.__post_init__(self)
        if self.min_count < 1 or self.num_unseen < 1:
            raise ValueError(
                f"feature {self.name!r}: min_count and num_unseen must be at least 1, got "
                f"{self.min_count} and {self.num_unseen}."
            )
        if self.vocabulary is not None and not isinstance(self.vocabulary, pa.Array):
            object.__setattr__(self, "vocabulary", array_of(self.vocabulary))

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        need_fitted(self)
        return self.num_embeddings or self._first + len(self.vocabulary)

    @property
    def _first(self) -> int:
        return 1 + self.num_unseen

    def fitted_counts(self, kind: Kind, counts: Counts) -> "Vocabulary":
        """Return the feature with the frequent values of the training data.

        Raises:
            DataError: they are more than the table has rows, or bytes that are no text.
        """
        ordered = counts.by_count()
        if pa.types.is_binary(ordered.values.type) or pa.types.is_large_binary(ordered.values.type):
            try:
                ordered = Counts(ordered.values.cast(pa.large_string()), ordered.counts)
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"feature {self.name!r}: column {self.source!r} has bytes that are not UTF-8: "
                    f"{error}. Hash it."
                ) from error
        if kind in ("integer", "number"):
            kind, values = _of_one_kind(kind, ordered.values)
            ordered = Counts(values, ordered.counts)
        elif kind == "list of integer":  # beside floats, where a column of the same table has nulls
            ordered = Counts(_of_one_kind("integer", ordered.values)[1], ordered.counts)
        enough = int(pc.sum(pc.greater_equal(ordered.counts, self.min_count)).as_py() or 0)
        size = enough if self.max_size is None else min(enough, self.max_size)
        if self.num_embeddings is not None and self._first + size > self.num_embeddings:
            raise DataError(
                f"feature {self.name!r}: its vocabulary has {size:,} values, with the rows for others "
                f"{self._first + size:,}, and its table {self.num_embeddings:,} rows. Raise "
                "num_embeddings or min_count, or set max_size."
            )
        return replace(self, found=kind, vocabulary=ordered.values.slice(0, size))

    def rows_of(self, array: Any) -> Ints:
        """Return the rows of values."""
        need_fitted(self)
        hashes, missing = hashes_and_missing(array)
        rows = self.lookup(hashes)
        unseen = rows < 0
        if unseen.any():
            rows[unseen] = 1 + to_range(mix(hashes[unseen]), self.num_unseen)
        if missing is not None:
            rows[missing] = 0
        return rows

    def lookup(self, hashes: UInt64s) -> Ints:
        """Return the rows of hashed values; -1 where they are not in the vocabulary."""
        known, order = self._index()
        if not len(known):
            return np.full(len(hashes), -1, np.int64)
        at = np.searchsorted(known, hashes)
        at[at == len(known)] = 0
        return np.where(known[at] == hashes, order[at] + self._first, -1)

    def lookup_values(self, array: Any) -> Ints:
        """Return the rows of values; -1 where they are missing or not in the vocabulary."""
        hashes, missing = hashes_and_missing(self._as_fitted(array))
        rows = self.lookup(hashes)
        if missing is not None:
            rows[missing] = -1
        return rows

    def _index(self) -> tuple[UInt64s, Ints]:
        """Return sorted hashes, and the place of each in the vocabulary."""
        found: tuple[UInt64s, Ints] | None = self.__dict__.get("_sorted")
        if found is None:
            hashes = hashes_of(self.vocabulary)
            order = np.argsort(hashes)
            found = hashes[order], order
            if (found[0][1:] == found[0][:-1]).any():
                raise DataError(
                    f"feature {self.name!r}: two values of the vocabulary have one 64-bit hash. Hash it."
                )
            object.__setattr__(self, "_sorted", found)
        return found


def _of_one_kind(kind: Kind, values: Any) -> tuple[Kind, Any]:
    """Convert to the fitted kind if all values are whole: some files have integers, others floats."""
    try:
        return kind, converted(values, kind)
    except ValueError:
        return "number", values
