"""Interface between table readers and `meshrec.data.features.Features`.

Readers import only this file. Features import readers, because a `Join` reads a separate table.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshrec.data.dataset import Feature
from meshrec.data.faults import Faults
from meshrec.data.samples import Bools, Samples, Shape


class RowOrigin(NamedTuple):
    """Origin of rows, such as "a.parquet: row group 3", with the number of the first row in the file."""

    name: str
    first_row: int
    file: str = ""


class RowChecks(NamedTuple):
    """Checks of a table's rows while they are encoded."""

    origin: RowOrigin
    """Row source, for messages."""
    valid: Bools
    """Whether a row is valid so far, [n]; modified in place."""
    faults: Faults
    """Handles damage."""

    def require(self, good: Bools, column: str, problem: str, *, is_allowed: bool = False) -> None:
        """Mark the rows that fail a check as invalid, or raise DataError.

        Args:
            good: whether a row passes, [n].
            column: checked column.
            problem: predicate of the message, such as "is null"; the row is its subject.
            is_allowed: failing rows are omitted by configuration, and are not damage.
        """
        name, first_row, file = self.origin
        message = f"{name}, column {column!r}: row {{row}} {problem}"
        self.faults.check(self.valid, good, message, first_row, file, is_allowed=is_allowed)

    def of_first(self, num_rows: int) -> "RowChecks":
        """Return the checks of the first rows, such as the only row that all samples of a request share."""
        return self._replace(valid=self.valid[:num_rows])


class Encoding(ABC):
    """Column semantics of a table: converts rows to samples."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """ID feature names."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Sample shape."""

    @abstractmethod
    def described(self) -> tuple[Feature, ...]:
        """Return the model's features."""

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Return all columns to read."""

    @abstractmethod
    def id_columns(self) -> tuple[str, ...]:
        """Return the source columns for IDs."""

    @abstractmethod
    def labels_of(self) -> tuple[str, ...]:
        """Return label names if there are several, otherwise nothing."""

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
        """Return known column kinds by name: text, integer, number, ..., or numeric: any number."""

    @abstractmethod
    def wrong_columns(self, schema: Any) -> list[str]:
        """Return a message per missing or unreadable column of an Arrow schema; empty if everything fits."""

    @abstractmethod
    def encode(self, table: Any, origin: RowOrigin, faults: Faults) -> Samples:
        """Encode a table with the right columns. Damaged rows are not ``kept``, or raise an error.

        Args:
            table: Arrow table.
            origin: row source, for messages.
            faults: handles damage.
        """

    @abstractmethod
    def unlabelled(self) -> "Encoding":
        """Return the same encoding for data without labels."""
