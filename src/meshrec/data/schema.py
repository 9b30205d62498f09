"""Which columns of a file are what."""

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
    """Numbers, which become float32.

    Args:
        name: the column.
        log: take log(1 + x), where x below 0 counts as 0.
        missing: what stands for null and NaN; None: these are damage.
    """

    name: str
    log: bool = False
    missing: float | None = None


@dataclass(frozen=True, kw_only=True)
class IdColumn:
    """Ids: integers, or lists of integers; with ``hashed`` also strings and lists of these.

    Args:
        name: the column, and the feature's name.
        num_embeddings: rows of the table; without ``hashed``, ids lie in ``[0, num_embeddings)``.
        hashed: hash values to the rows of the table.
        missing: the id that stands for null and for the empty string; None: null is damage. Nothing else is
            hashed to id 0 if that is it. Lists that are null become empty.
        average_length: ids per sample.
        sequence: the ids of a list have an order.
        table: features that name the same table share its rows.
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
    """What to read.

    Args:
        label: the column of labels, numbers or booleans; None: the data has none, as data to be scored. The
            labels of its batches are NaN.
        ids: at least one.
        dense: in the order of ``Batch.dense``.
        label_range: labels outside are damage: binary cross-entropy takes those in [0, 1]; None: any number.

    Raises:
        ValueError: a column is named twice, or there are no ids.
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
        """All names: the label if there is one, dense columns, ids."""
        labels = [] if self.label is None else [self.label]
        return [*labels, *(each.name for each in self.dense), *(each.name for each in self.ids)]

    @property
    def keys(self) -> tuple[str, ...]:
        """The id columns."""
        return tuple(each.name for each in self.ids)

    @property
    def shape(self) -> Shape:
        """One label, no weights."""
        return Shape(len(self.dense), len(self.ids))

    @property
    def takes_dictionaries(self) -> bool:
        """No."""
        return False

    def id_columns(self) -> tuple[str, ...]:
        """The same as the keys."""
        return self.keys

    def labels_of(self) -> tuple[str, ...]:
        """None: there is one label at most."""
        return ()

    def fitted_kinds(self) -> Mapping[str, str]:
        """Nothing: a schema is not fitted."""
        return {}

    def wrong_columns(self, found: Any) -> list[str]:
        """See `Encoding`."""
        from meshrec.data.columns import wrong_columns

        return wrong_columns(self, found)

    def encode(self, table: Any, place: "Place", faults: Faults) -> Samples:
        """See `Encoding`."""
        from meshrec.data.columns import encode

        return encode(table, self, place, faults)

    def unlabelled(self) -> "Schema":
        """The same for data without labels."""
        return replace(self, label=None)

    def described(self) -> tuple[Feature, ...]:
        """What a model needs to know of the ids."""
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
