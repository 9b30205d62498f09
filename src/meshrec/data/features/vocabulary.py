"""ID feature with a vocabulary: frequent training values have a table row each."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from meshrec.data.exact_columns import as_integers, plain
from meshrec.data.faults import DataError
from meshrec.data.features.column_feature import need_fitted
from meshrec.data.features.ids import LIST_KINDS, IdFeature
from meshrec.data.features.sketches import Counts
from meshrec.data.features.values import (
    Kind,
    Values,
    array_of,
    hashes_and_missing,
    hashes_of,
    integers_of,
    is_missing,
    kind_of,
    values_of,
)
from meshrec.data.features.vocabulary_index import VocabularyIndex, integer_rows
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.samples import Bools, Codes, IdTable, Ints


@dataclass(frozen=True, kw_only=True)
class Vocabulary(IdFeature):
    """ID feature in which frequent training values have a table row each. All other values share some rows.

    Row 0 is for null, NaN and the empty string. Rows ``[1, 1 + num_unseen)`` are for values outside the
    vocabulary, by hash. The following rows are for the vocabulary, with the most frequent value first.

    Args:
        min_count: minimum occurrences in training. Features that share a table are counted together.
        max_size: maximum vocabulary size; the most frequent values are retained.
        num_unseen: rows for values outside the vocabulary.
        num_embeddings: table rows; None: as many as needed.
        vocabulary: values in the vocabulary; set by fitting.
        known_only: whether to drop values outside the vocabulary, and treat null as damage. For models of
            interaction logs (`meshrec.data.logs.interactions`), which have no such values in training.
        also: with ``known_only``, a second list column, whose values are appended to those of the first. A
            request may then leave out the first.

    Raises:
        ValueError: ``min_count`` or ``num_unseen`` is below 1; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "number", "text", *LIST_KINDS)
    row_options: ClassVar[tuple[str, ...]] = ("num_unseen",)

    min_count: int = 1
    max_size: int | None = None
    num_unseen: int = 1
    num_embeddings: int | None = None
    vocabulary: Any = None
    known_only: bool = False
    also: str | None = None

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
        """Table rows."""
        need_fitted(self)
        return self.num_embeddings or self._first + len(self.vocabulary)

    @property
    def _first(self) -> int:
        """Table row of the first value in the vocabulary."""
        return 1 + self.num_unseen

    def columns(self) -> tuple[str, ...]:
        return (*IdFeature.columns(self), *([] if self.also is None else [self.also]))

    def values(self, table: pa.Table) -> Values:
        """Return the values to convert. With ``known_only``, values outside the vocabulary are dropped."""
        values = IdFeature.values(self, table)
        if self.also is not None:
            values = _concatenated_lists(values, values_of(table[self.also]))
        return values.where(self._is_usable(values.array)) if self.known_only else values

    def aligned(self, table: pa.Table, parallel: str) -> pa.Table:
        """Remove the values that ``known_only`` drops from the feature's column and from a parallel column.

        Args:
            table: table with both list columns.
            parallel: list column with an entry per value of the feature's column, such as timestamps.
        """
        items, parallel_values = values_of(table[self.source]), values_of(table[parallel])
        if not np.array_equal(items.offsets, parallel_values.offsets):
            return table  # `Times` reports the row
        mask = self._is_usable(items.array)
        for name, values in ((self.source, items), (parallel, parallel_values)):
            position = table.column_names.index(name)
            table = table.set_column(position, name, values.where(mask).lists())
        return table

    def _is_usable(self, array: Any) -> Bools:
        """Return the mask of values that are in the vocabulary or missing; `check` reports missing ones."""
        rows, missing = self._known_rows(array)
        is_present = rows >= self._first
        return is_present if missing is None else is_present | missing

    @property
    def null_remedy(self) -> str | None:
        return "Leave it out" if self.known_only else None

    def fitted_counts(self, kind: Kind, counts: Counts) -> "Vocabulary":
        """Return the feature fitted to training data.

        Args:
            kind: column kind.
            counts: occurrence count by value, in all features that share the table.

        Raises:
            DataError: the vocabulary exceeds the table, or has bytes that are not text.
        """
        if pa.types.is_binary(counts.values.type) or pa.types.is_large_binary(counts.values.type):
            try:
                counts = Counts(counts.values.cast(pa.large_string()), counts.counts)
            except pa.ArrowInvalid as error:
                raise DataError(
                    f"feature {self.name!r}: column {self.source!r} has bytes that are not UTF-8: "
                    f"{error}. Hash it."
                ) from error
        if kind_of(counts.values.type) in ("integer", "number"):
            kind, values = _unify_number_kinds(kind, counts.values)
            if values.type != counts.values.type:
                # Converted values may be equal.
                counts = counts.with_values(values)
        ordered = counts.by_count()
        num_frequent = int(pc.sum(pc.greater_equal(ordered.counts, self.min_count)).as_py() or 0)
        size = num_frequent if self.max_size is None else min(num_frequent, self.max_size)
        if self.num_embeddings is not None and self._first + size > self.num_embeddings:
            raise DataError(
                f"feature {self.name!r}: its vocabulary has {size:,} values, with the rows for others "
                f"{self._first + size:,}, and its table {self.num_embeddings:,} rows. Raise "
                "num_embeddings or min_count, or set max_size."
            )
        return replace(self, found=kind, vocabulary=_to_canonical_type(ordered.values.slice(0, size)))

    def codes_of(self, array: Any) -> tuple[Codes, IdTable | None]:
        need_fitted(self)
        array = plain(array)
        if not array.null_count:
            if pa.types.is_dictionary(array.type) and 0 < len(array.dictionary) <= len(array):
                # Look up every distinct value once.
                codes = array.indices.to_numpy()
                wide = codes if codes.dtype == np.int32 else codes.astype(np.int64, copy=False)
                return wide, self._table_of(array.dictionary)
            # Other values outside the vocabulary have rows that depend on their hash.
            if pa.types.is_integer(array.type) and self.num_unseen == 1 and self._integer_rows is not None:
                return integers_of(array), self._integer_rows
        return self.rows_of(array), None

    def _table_of(self, dictionary: Any) -> IdTable:
        """Return the rows of a dictionary. Small ones are cached, because each window brings a copy."""
        if dictionary.nbytes > _MAX_CACHED_BYTES:
            return IdTable(self.rows_of(dictionary))
        buffers = (None if buffer is None else buffer.to_pybytes() for buffer in dictionary.buffers())
        key = (dictionary.type, dictionary.offset, len(dictionary), *buffers)
        if key not in self._dictionary_tables:
            # Lanes have different dictionaries in turn, but each of them only a few.
            if len(self._dictionary_tables) >= _MAX_CACHED:
                self._dictionary_tables.clear()
            self._dictionary_tables[key] = IdTable(self.rows_of(dictionary))
        return self._dictionary_tables[key]

    def continued(self, earlier: IdFeature) -> "Vocabulary":
        """Return this feature with an earlier vocabulary, followed by the new values in its own vocabulary.

        ``max_size`` and the table limit the number of new values. All earlier values remain.

        Raises:
            DataError: the values have another type than before, or the vocabulary exceeds the table.
        """
        assert isinstance(earlier, Vocabulary)
        kept, values = earlier.vocabulary, self.vocabulary
        # Values in lists have the type of single values.
        kinds = [kind_of(array.type) for array in (kept, values) if len(array)]
        if len(set(kinds)) == 2 and "text" in kinds:
            raise DataError(
                f"feature {self.name!r}: column {self.source!r} holds {kinds[1]}, and held {kinds[0]} in the "
                "run from which training starts. Give it as it was, or start without a run."
            )
        if len(values):
            values = values.filter(pa.array(earlier.lookup_values(values) < 0))
        if self.max_size is not None:
            values = values.slice(0, max(0, self.max_size - len(kept)))
        size = self._first + len(kept) + len(values)
        if self.num_embeddings is not None and size > self.num_embeddings:
            raise DataError(
                f"feature {self.name!r}: its vocabulary, with the values of the run from which training "
                f"starts, has {size:,} rows, and its table {self.num_embeddings:,}. Raise num_embeddings."
            )
        try:
            type_ = (kept if len(kept) else values).type
            vocabulary = pa.concat_arrays([kept.cast(type_), values.cast(type_)])
        except pa.ArrowInvalid as error:
            raise DataError(
                f"feature {self.name!r}: column {self.source!r} holds values that do not fit its vocabulary, "
                f"of {kept.type}: {error}. Give it as it was, or start without a run."
            ) from error
        found = earlier.found if earlier.name == self.name else self.found
        return replace(self, found=found, vocabulary=vocabulary)

    def rows_of(self, array: Any) -> Ints:
        """Return the table row per value, int64 [n]."""
        need_fitted(self)
        array = plain(array)
        if pa.types.is_dictionary(array.type) and len(array.dictionary) <= len(array):
            # Look up every distinct value once. Null points behind the dictionary, where row 0 is appended.
            indices = array.indices
            if indices.null_count:
                indices = pc.fill_null(indices, len(array.dictionary))
            of_row: Ints = np.append(self.rows_of(array.dictionary), 0).take(indices.to_numpy())
            return of_row
        rows, missing = self._known_rows(array)
        unseen = rows < self._first
        if unseen.any():
            # Row 0 is for missing values.
            rows[unseen] = 1 + to_range(mix(hashes_of(array.filter(pa.array(unseen)))), self.num_unseen)
        if missing is not None:
            rows[missing] = 0
        return rows

    def _known_rows(self, array: Any) -> tuple[Ints, Bools | None]:
        """Return the table row per value, int64 [n], and the mask for missing values; None if there are none.

        A row below that of the first value stands for a value outside the vocabulary. Rows of missing values
        are meaningless.
        """
        array = plain(array)
        if pa.types.is_integer(array.type) and self._integer_rows is not None:
            return self._integer_rows.of(integers_of(array)), is_missing(array)
        hashes, missing = hashes_and_missing(array)
        return self.lookup(hashes), missing

    def lookup(self, hashes: UInt64s) -> Ints:
        """Return the table row per hashed value, int64 [n]; -1 for a value outside the vocabulary."""
        rows = self._index.find(hashes)
        rows[rows >= 0] += self._first
        return rows

    def lookup_values(self, array: Any) -> Ints:
        """Return the table row per value, int64 [n]; -1 if it is missing or outside the vocabulary."""
        rows, missing = self._known_rows(self._as_fitted(array))
        rows[rows < self._first] = -1
        if missing is not None:
            rows[missing] = -1
        return rows

    # Caches, built at the first look-up. Setting attributes of a frozen dataclass is an error, but
    # cached_property does not use `__setattr__`.

    @cached_property
    def _index(self) -> VocabularyIndex:
        return VocabularyIndex(self.name, self.vocabulary)

    @cached_property
    def _integer_rows(self) -> IdTable | None:
        return integer_rows(self.vocabulary, self._first, unseen=1)

    @cached_property
    def _dictionary_tables(self) -> dict[Any, IdTable]:
        return {}

    def __getstate__(self) -> dict[str, Any]:
        # The index has no pickle, and is built again.
        return {name: value for name, value in self.__dict__.items() if name not in _CACHES}


_CACHES = ("_index", "_integer_rows", "_dictionary_tables")
"""Cached attributes of `Vocabulary`, which are not fields."""
_MAX_CACHED, _MAX_CACHED_BYTES = 64, 1 << 14
"""Cached dictionaries per feature, and their maximum size: 2 MiB with their rows."""


def _concatenated_lists(first: Values, second: Values) -> Values:
    """Concatenate the lists of every sample: the values in ``first``, then the values in ``second``.

    The arguments must have the same number of samples.
    """
    samples = np.arange(len(first.offsets) - 1)
    owners = np.concatenate([np.repeat(samples, np.diff(values.offsets)) for values in (first, second)])
    array = pa.concat_arrays([first.array, second.array.cast(first.array.type)])
    return Values(array.take(pa.array(owners.argsort(kind="stable"))), first.offsets + second.offsets)


def _to_canonical_type(values: Any) -> Any:
    """Convert vocabulary values to a type that does not depend on the source column's bit width.

    Integers become int64, or stay uint64 if they do not fit. Decimals get 256 bits. Text becomes a string
    array, unless it has 2 GiB or more.
    """
    kind = values.type
    if pa.types.is_decimal(kind):
        return values.cast(pa.decimal256(76, 0))
    if pa.types.is_integer(kind):
        fits = kind != pa.uint64() or (pc.max(values).as_py() or 0) < 1 << 63
        return values.cast(pa.int64()) if fits else values
    # Offsets of a string array have 32 bits.
    return values.cast(pa.string()) if pa.types.is_large_string(kind) and values.nbytes < 1 << 31 else values


def _unify_number_kinds(kind: Kind, values: Any) -> tuple[Kind, Any]:
    """Convert vocabulary values, which may come from files with different types, to integers or floats.

    Values become floats in a column of floats, and where some value has a fraction. Otherwise they become
    integers, also from decimals with a scale and from lists of floats.
    """
    lists = "list of " if kind.startswith("list") else ""
    if kind != "number" or pa.types.is_decimal(values.type):
        try:
            return f"{lists}integer", as_integers(values)  # type: ignore[return-value]
        except ValueError:
            pass
    return f"{lists}number", values.cast(pa.float64())  # type: ignore[return-value]
