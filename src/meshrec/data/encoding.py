"""How rows of a table become samples."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from meshrec.data.dataset import Feature
from meshrec.data.faults import Faults
from meshrec.data.samples import Samples, Shape

if TYPE_CHECKING:
    from meshrec.data.columns import Place


class Encoding(ABC):
    """What a source of tables needs to know to make samples of their rows: a `Schema`, or `Features`."""

    @property
    @abstractmethod
    def keys(self) -> tuple[str, ...]:
        """Names of the ids."""

    @property
    @abstractmethod
    def shape(self) -> Shape:
        """What its samples look like."""

    @property
    @abstractmethod
    def takes_dictionaries(self) -> bool:
        """Whether texts may come as numbers into a dictionary, as Parquet has them."""

    @abstractmethod
    def described(self) -> tuple[Feature, ...]:
        """What a model needs to know of the ids."""

    @abstractmethod
    def columns(self) -> Sequence[str]:
        """All columns to read."""

    @abstractmethod
    def id_columns(self) -> tuple[str, ...]:
        """The columns that ids come from."""

    @abstractmethod
    def labels_of(self) -> tuple[str, ...]:
        """Names of the labels where there are several; otherwise empty."""

    @abstractmethod
    def fitted_kinds(self) -> Mapping[str, str]:
        """What columns are known to hold, by name: text, integer, number, ...; empty where nothing is."""

    @abstractmethod
    def wrong_columns(self, found: Any) -> list[str]:
        """What an Arrow schema lacks, or has of a type that cannot be read; empty if nothing."""

    @abstractmethod
    def encode(self, table: Any, place: "Place", faults: Faults) -> Samples:
        """The samples of a table with the right columns; damaged rows are not ``kept``, or an error."""

    @abstractmethod
    def unlabelled(self) -> "Encoding":
        """The same for data without labels."""
