"""Interface between table readers and `meshrec.data.features.Features`.

Readers import only this file. Features import readers, because a `Join` reads a separate table.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshrec.data.dataset import Feature
from meshrec.data.faults import Faults
from meshrec.data.samples import Bools, Ints, Samples, Shape


class RowOrigin(NamedTuple):
    """Where rows were read from, for messages."""

    name: str
    """Display name, such as "a.parquet: row group 3"."""
    first_row: int | Ints
    """Row number in the file for the first row. If rows are not consecutive: all row numbers, int64 [n]."""
    file: str = ""
    """File name, by which omitted rows are counted."""


class RowChecks(NamedTuple):
    """Validator of a table's rows while they are encoded, with a mask of the rows that are valid so far."""

    origin: RowOrigin
    """Where the rows were read from, for messages."""
    valid: Bools
    """Whether a row is valid so far, [n]; modified in place."""
    faults: Faults
    """Handles damage."""

    def require(self, good: Bools, column: str, problem: str, *, is_allowed: bool = False) -> None:
        """Report the rows that fail a check to ``faults``, and mark them in ``valid`` as invalid.

        Args:
            good: whether a row passes the check, [n].
            column: column to which the check applies.
            problem: end of the message "row 3 ...", such as "is null".
            is_allowed: whether the configuration omits failing rows, so they are not damage.

        Raises:
            DataError: rows are damaged, and ``faults`` does not skip damaged rows.
        """
        name, first_row, file = self.origin
        # `Faults.check` replaces ``{row}`` with the number of the first failing row.
        message = f"{name}, column {column!r}: row {{row}} {problem}"
        self.faults.check(self.valid, good, message, first_row, file, is_allowed=is_allowed)

    def of_first(self, num_rows: int) -> "RowChecks":
        """Return checks for the first rows only, which update the same mask.

        Example: samples in a request may share columns, which are a table with a single row. Its checks need
        only the first mask entry.
        """
        return self._replace(valid=self.valid[:num_rows])


class Encoding(ABC):
    """Meaning of the columns in a table: converts rows to samples. `Features` implements it."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """ID feature names."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Layout of the samples from `encode`."""

    @abstractmethod
    def described(self) -> tuple[Feature, ...]:
        """Return a description per feature in ``Batch.sparse``, for models, in the order of ``keys``."""

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Return all columns to read."""

    @abstractmethod
    def id_columns(self) -> tuple[str, ...]:
        """Return the columns from which IDs are read."""

    @abstractmethod
    def labels_of(self) -> tuple[str, ...]:
        """Return the label names. With a single label, return an empty tuple."""

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Dense column names; empty if unnamed."""
        return ()

    @property
    def num_classes(self) -> int:
        """Label classes; 0 for a numeric label."""
        return 0

    @property
    def number_edges(self) -> tuple[tuple[float, ...], ...]:
        """Bin edges per dense column; empty for a column without bins."""
        return ((),) * self.shape.num_dense

    @abstractmethod
    def fitted_kinds(self) -> Mapping[str, str]:
        """Return the known column kinds, by column name.

        A kind is one of `meshrec.data.features.values.Kind`, or "numeric": an integer or another number.
        """

    @abstractmethod
    def wrong_columns(self, schema: Any) -> list[str]:
        """Return a message per missing or unreadable column of an Arrow schema; empty if everything fits."""

    @abstractmethod
    def encode(self, table: Any, origin: RowOrigin, faults: Faults) -> Samples:
        """Convert a table's rows to samples.

        Args:
            table: Arrow table without `wrong_columns`.
            origin: where the rows were read from, for messages.
            faults: raises for a damaged row, or counts it; then the sample is not ``is_valid``.
        """

    @abstractmethod
    def unlabelled(self) -> "Encoding":
        """Return the same encoding for data without labels."""
