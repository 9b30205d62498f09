"""Role of a column in a proposed recipe."""

from typing import NamedTuple

from meshrec.data.features import ColumnFeature


class ColumnChoice(NamedTuple):
    """Column role (``label``, ``time``, ``dense``, ``id``, ``list`` or ``drop``), and the reason."""

    column: str
    role: str
    reason: str
    features: tuple[ColumnFeature, ...] = ()
    rows: int | None = None
    warning: str | None = None
