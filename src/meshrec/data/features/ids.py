"""Features of IDs: values that are hashed to rows of tables, or integers that are rows themselves."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Place
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.column_feature import need_fitted, wrong_kind
from meshrec.data.features.values import (
    Kind,
    Values,
    array_of,
    converted,
    hashes_and_missing,
    integers_of,
    is_missing,
    kind_of,
    numbers_of,
    split_values_of,
    values_of,
)
from meshrec.data.hashing import UInt64s, mix, to_range
from meshrec.data.samples import Bools, Floats, Ints, Ragged


@dataclass(frozen=True, kw_only=True)
class IdFeature(ABC):
    """A feature that turns a column of values, or of lists of values, into IDs: rows of a table.

    Lists are Arrow's, or texts of several values with a ``separator`` between them, as CSV files have them.

    Args:
        name: the name of the feature.
        column: the column that it reads; None for the column with the feature's name.
        found: the kind of the column when the feature was fitted; None if it is not fitted.
        max_length: the largest number of IDs per list; None for no limit.
        keep: the end of longer lists that stays: "first" or "last".
        weights: a column with a weight for each ID; lists if the IDs are lists.
        sequence: whether the IDs of a list are ordered, the oldest first.
        table: the name of the table. Features that name the same table share its rows.
        average_length: the average number of IDs per sample; fitted.
        separator: the text between two values of a text, such as ``"|"``; None if a text is one value.

    Raises:
        ValueError: ``keep``, ``max_length`` or ``separator`` is not allowed, or does not fit the feature.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ()

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
        """The name of its column."""
        return self.name if self.column is None else self.column

    def wrong(self, kinds: Mapping[str, Kind]) -> str | None:
        """Return what is wrong with the kinds of its columns, if anything is."""
        return wrong_kind(self, self.allowed if self.separator is None else ("text",), kinds)

    @property
    def is_fitted(self) -> bool:
        """Whether the feature is fitted, or needs no fitting."""
        return self.found is not None

    @property
    @abstractmethod
    def rows(self) -> int:
        """The number of rows of its table."""

    @abstractmethod
    def rows_of(self, array: Any) -> Ints:
        """Return the row of each value of an Arrow array; null and the empty text are values, too."""

    def row_of(self, value: Any) -> int:
        """Return the row of one value, the same in training, prediction and serving."""
        need_fitted(self)
        null = pa.string() if "text" in self.allowed else pa.int64()
        array = pa.nulls(1, null) if value is None else array_of([value])
        wrong = self.wrong({self.source: _with_list(kind_of(array.type), self.found)})
        if wrong is not None and value is not None:
            raise ValueError(f"{wrong}; got the value {value!r}.")
        try:
            return int(self.rows_of(self._as_fitted(array))[0])
        except DataError as error:
            raise ValueError(f"{error}; got the value {value!r}.") from error

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the IDs and of their weights."""
        return (self.source,) if self.weights is None else (self.source, self.weights)

    def feature(self) -> Feature:
        """Return the description of the table of the IDs for the model."""
        need_fitted(self)
        return Feature(
            name=self.name,
            num_embeddings=self.rows,
            average_length=self.average_length,
            sequence=self.sequence,
            table=self.table,
        )

    def values(self, table: pa.Table) -> Values:
        """Return the values that the feature numbers."""
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
        try:
            return array if self.found is None else converted(array, self.found)
        except ValueError as error:
            raise DataError(f"column {self.source!r} holds {error}. Give it as it was") from error

    def encode(self, table: pa.Table, place: Place, kept: Bools, faults: Faults) -> Ragged:
        """Return the IDs of all samples."""
        found = self.values(table)
        rows = self.rows_of(found.array)
        self.check(rows, found, place, kept, faults)
        weights = None if self.weights is None else self._weights(table, found, place, kept, faults)
        return self._cut(Ragged(rows, found.offsets, weights))

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with damaged IDs out of ``kept``; a feature of this class has none."""
        del rows, found, place, kept, faults

    def _weights(self, table: pa.Table, found: Values, place: Place, kept: Bools, faults: Faults) -> Floats:
        assert self.weights is not None
        array, offsets = values_of(table[self.weights])
        weights = numbers_of(array, None, "s")
        good = np.diff(offsets) == np.diff(found.offsets)
        where = f"{place.name}, column {self.weights!r}: row {{row}}"
        if not good.all():
            faults.check(
                kept, good, f"{where} has another number of weights than of ids", place.first_row, place.file
            )
            padded = np.zeros(len(found.array), np.float32)
            at = np.repeat(good, np.diff(found.offsets))
            padded[at] = weights[np.repeat(good, np.diff(offsets))]
            return padded
        finite = np.isfinite(weights)
        if not finite.all():
            bad = np.add.reduceat(np.append(~finite, False), offsets[:-1]) > 0
            faults.check(
                kept,
                ~(bad & (np.diff(offsets) > 0)),
                f"{where} has a weight that is not a number",
                place.first_row,
                place.file,
            )
        return weights.astype(np.float32)

    def _cut(self, ragged: Ragged) -> Ragged:
        if self.max_length is None:
            return ragged
        lengths = np.diff(ragged.offsets)
        if lengths.max(initial=0) <= self.max_length:
            return ragged
        shorter = np.minimum(lengths, self.max_length)
        starts = ragged.offsets[:-1] if self.keep == "first" else ragged.offsets[1:] - shorter
        return ragged.ranges(starts, shorter)


def _with_list(kind: Kind, found: Kind | None) -> Kind:
    """Return ``kind`` as the kind of lists, if the feature was fitted on lists."""
    return f"list of {kind}" if found is not None and found.startswith("list") else kind  # type: ignore[return-value]


_ID_KINDS: tuple[Kind, ...] = ("integer", "text", "time", "number", "list of integer", "list of text")


@dataclass(frozen=True, kw_only=True)
class Hashed(IdFeature):
    """A feature whose values are hashed to rows. It needs no fitting, and values may share a row.

    The row is the upper half of the 64-bit hash (`meshrec.data.features.hashes_of`, mixed with the seed if
    it is not 0) times the number of rows, shifted down. With ``missing``, row 0 is reserved for null, NaN
    and the empty text, and all other values are hashed to the other rows.

    Args:
        num_embeddings: the number of rows.
        seed: the seed of the hash. With another seed, other values share rows.
        missing: whether null, NaN and empty texts get row 0. Otherwise they are damage.

    Raises:
        ValueError: ``num_embeddings`` is not in [2, 2**32]; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = _ID_KINDS

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
    def is_fitted(self) -> bool:
        """True: a hash needs no fitting."""
        return True

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        return self.num_embeddings

    def rows_of(self, array: Any) -> Ints:
        """Return the rows of values."""
        return self.rows_of_hashes(*hashes_and_missing(array))

    def rows_of_hashes(self, hashes: UInt64s, missing: Bools | None) -> Ints:
        """Return the rows of hashed values."""
        if self.seed:
            hashes = mix(hashes, seed=self.seed)
        if not self.missing:
            return to_range(hashes, self.num_embeddings)
        rows = to_range(hashes, self.num_embeddings - 1)
        rows += 1
        if missing is not None:
            rows[missing] = 0
        return rows

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with null out of ``kept``, unless ``missing`` says otherwise."""
        if not self.missing:
            check_missing(self, found, place, kept, faults)


def check_missing(feature: IdFeature, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
    """Take samples with null among their values out of ``kept``."""
    missing = is_missing(found.array)
    if missing is not None:
        total = np.concatenate([[0], np.cumsum(missing)])
        good = total[found.offsets[1:]] == total[found.offsets[:-1]]
        where = (
            f"{place.name}, column {feature.source!r}: row {{row}} is null. Set missing=True of feature "
            f"{feature.name!r}"
        )
        faults.check(kept, good, where, place.first_row, place.file)


@dataclass(frozen=True, kw_only=True)
class Integer(IdFeature):
    """A feature whose integers in ``[0, num_embeddings)`` are rows. Other integers are damage.

    Args:
        num_embeddings: the number of rows.
        missing: the row of null; None if null is damage.

    Raises:
        ValueError: ``num_embeddings`` is below 1, or ``missing`` is no row; or as for `IdFeature`.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "list of integer")

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
    def is_fitted(self) -> bool:
        """True: it needs no fitting."""
        return True

    @property
    def rows(self) -> int:
        """The number of rows of its table."""
        return self.num_embeddings

    def rows_of(self, array: Any) -> Ints:
        """Return the integers; -1 where one is outside the table."""
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        rows = integers_of(array)
        if array.null_count:
            null = array.is_null().to_numpy(zero_copy_only=False)
            rows = np.where(null, -1 if self.missing is None else self.missing, rows)
        return np.where(rows.view(np.uint64) < self.num_embeddings, rows, -1)

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with IDs outside the table out of ``kept``."""
        outside = rows < 0
        if outside.any():
            total = np.concatenate([[0], np.cumsum(outside)])
            first = found.array[int(outside.argmax())].as_py()
            if first is None:
                what = f"null. Give feature {self.name!r} missing=, the row that null has"
            else:
                what = f"the id {first}, outside [0, {self.num_embeddings}). Raise num_embeddings of feature "
                what += f"{self.name!r}, or hash it"
            where = f"{place.name}, column {self.source!r}: row {{row}} has {what}"
            good = total[found.offsets[1:]] == total[found.offsets[:-1]]
            faults.check(kept, good, where, place.first_row, place.file)
            rows[outside] = 0

    def row_of(self, value: Any) -> int:
        """Return the integer. ValueError if it is outside the table."""
        row = IdFeature.row_of(self, value)
        if row < 0:
            raise ValueError(f"feature {self.name!r}: {value!r} lies outside [0, {self.num_embeddings}).")
        return row
