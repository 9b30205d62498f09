"""Description of the columns of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from meshrec.data.dataset import Feature
from meshrec.data.encoding import Encoding
from meshrec.data.faults import Faults
from meshrec.data.samples import Samples, Shape

if TYPE_CHECKING:
    from meshrec.data.columns import Place


@dataclass(frozen=True, kw_only=True)
class DenseColumn:
    """A column of numbers, which become float32.

    Args:
        name: name of the column.
        log: whether to take log(1 + x), where negative x counts as 0.
        missing: value for null and NaN. None: null and NaN are damage.
    """

    name: str
    log: bool = False
    missing: float | None = None


@dataclass(frozen=True, kw_only=True)
class IdColumn:
    """A column of IDs: integers or lists of integers; with ``hashed`` also strings and lists of strings.

    Args:
        name: name of the column and of the feature.
        num_embeddings: number of rows of the table. Without ``hashed``, IDs lie in ``[0, num_embeddings)``.
        hashed: whether to hash values to the rows of the table.
        missing: ID for null and the empty string. None: null is damage. If it is 0, no other value is hashed
            to row 0. Lists that are null become empty.
        average_length: average number of IDs per sample.
        sequence: whether the IDs of a list are ordered.
        table: name of the table. Features that name the same table share its rows.
    """

    name: str
    num_embeddings: int
    hashed: bool = False
    missing: int | None = None
    average_length: float = 1.0
    sequence: bool = False
    table: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.num_embeddings <= 2**32:
            raise ValueError(
                f"column {self.name!r}: num_embeddings must lie in [1, 2**32], got {self.num_embeddings}."
            )
        if self.missing is not None and not 0 <= self.missing < self.num_embeddings:
            raise ValueError(
                f"column {self.name!r}: missing must lie in [0, {self.num_embeddings}), got {self.missing}."
            )
        if self.hashed and self.missing == 0 and self.num_embeddings == 1:
            raise ValueError(f"column {self.name!r}: 1 row cannot hold hashed ids beside the missing one.")


@dataclass(frozen=True, kw_only=True)
class Schema(Encoding):
    """Columns to read from a file, and their meaning.

    Args:
        label: column of the labels, numbers or booleans. None: the data has none, such as data to be scored,
            and labels of batches are NaN.
        ids: ID columns, at least one.
        dense: dense columns, in the order of ``Batch.dense``.
        label_range: allowed labels; others are damage. Binary cross-entropy takes [0, 1]. None: any number.

    Raises:
        ValueError: a column is named twice, or there are no ID columns.
    """

    label: str | None
    ids: Sequence[IdColumn]
    dense: Sequence[DenseColumn] = ()
    label_range: tuple[float, float] | None = (0.0, 1.0)

    def __post_init__(self) -> None:
        names = self.columns()
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice or not self.ids:
            raise ValueError(
                f"a schema needs id columns, and every column once; columns given twice: {twice}, "
                f"ids: {[each.name for each in self.ids]}."
            )

    def columns(self) -> list[str]:
        """Return all column names: the label if there is one, dense columns, ID columns."""
        labels = [] if self.label is None else [self.label]
        return [*labels, *(each.name for each in self.dense), *(each.name for each in self.ids)]

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the ID columns."""
        return tuple(each.name for each in self.ids)

    @property
    def shape(self) -> Shape:
        """Shape of the samples: one label, no weights."""
        return Shape(len(self.dense), len(self.ids))

    @property
    def takes_dictionaries(self) -> bool:
        """Whether strings may come dictionary-encoded: no."""
        return False

    def id_columns(self) -> tuple[str, ...]:
        return self.keys

    def labels_of(self) -> tuple[str, ...]:
        """Return nothing, because there is at most one label."""
        return ()

    def fitted_kinds(self) -> Mapping[str, str]:
        """Return nothing, because a schema is not fitted."""
        return {}

    def wrong_columns(self, found: Any) -> list[str]:
        from meshrec.data.columns import wrong_columns

        return wrong_columns(self, found)

    def encode(self, table: Any, place: "Place", faults: Faults) -> Samples:
        from meshrec.data.columns import encode

        return encode(table, self, place, faults)

    def unlabelled(self) -> "Schema":
        """Return the same schema for data without labels."""
        return replace(self, label=None)

    def described(self) -> tuple[Feature, ...]:
        """Return the features of the model."""
        return tuple(
            Feature(
                name=each.name,
                num_embeddings=each.num_embeddings,
                average_length=each.average_length,
                sequence=each.sequence,
                table=each.table,
            )
            for each in self.ids
        )
