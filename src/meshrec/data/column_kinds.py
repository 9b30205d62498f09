"""Descriptions of single columns of a file."""

from dataclasses import dataclass


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
