"""The interface through which readers of tables use `meshrec.data.features.Features`.

Readers import this file only. Features import readers, because a `Join` reads a table of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from meshrec.data.dataset import Feature
from meshrec.data.faults import Faults
from meshrec.data.samples import Samples, Shape


class Place(NamedTuple):
    """Origin of some rows, such as "a.parquet: row group 3", with the number of the first row in the file."""

    name: str
    first_row: int
    file: str = ""


class Encoding(ABC):
    """The meaning of the columns of a table: turns rows into samples."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Names of the ID features."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """Shape of the samples."""

    @abstractmethod
    def described(self) -> tuple[Feature, ...]:
        """Return the features of the model."""

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """Return all columns to read."""

    @abstractmethod
    def id_columns(self) -> tuple[str, ...]:
        """Return the columns from which IDs come."""

    @abstractmethod
    def labels_of(self) -> tuple[str, ...]:
        """Return the names of the labels if there are several, otherwise nothing."""

    @property
    def dense_names(self) -> tuple[str, ...]:
        """Names of the dense columns; none if the source does not name them."""
        return ()

    @property
    def num_classes(self) -> int:
        """The number of classes of the label; 0 if it is a number."""
        return 0

    @property
    def number_edges(self) -> tuple[tuple[float, ...], ...]:
        """The edges of the bins of each dense column; empty for a column without bins."""
        return ((),) * self.shape.num_dense

    @abstractmethod
    def fitted_kinds(self) -> Mapping[str, str]:
        """Return the known kinds of columns by name: text, integer, number, ..."""

    @abstractmethod
    def wrong_columns(self, found: Any) -> list[str]:
        """Return what an Arrow schema lacks or has of a type that cannot be read; empty if everything
        fits.
        """

    @abstractmethod
    def encode(self, table: Any, place: Place, faults: Faults) -> Samples:
        """Encode a table with the right columns. Damaged rows are not ``kept``, or raise an error."""

    @abstractmethod
    def unlabelled(self) -> "Encoding":
        """Return the same encoding for data without labels."""
