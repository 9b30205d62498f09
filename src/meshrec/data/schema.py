"""Description of the columns of a file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshrec.data.column_kinds import DenseColumn, IdColumn
from meshrec.data.dataset import Feature
from meshrec.data.encoding import Encoding, Place
from meshrec.data.faults import Faults
from meshrec.data.samples import Samples, Shape


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

        return wrong_columns(found, label=self.label, dense=self.dense, ids=self.ids)

    def encode(self, table: Any, place: Place, faults: Faults) -> Samples:
        from meshrec.data.columns import encode

        return encode(
            table,
            place,
            faults,
            label=self.label,
            label_range=self.label_range,
            dense=self.dense,
            ids=self.ids,
        )

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
