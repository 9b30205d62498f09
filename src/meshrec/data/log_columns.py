"""Columns of an interaction log."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshrec.data.interactions import HISTORY, SEEN, TIMES

if TYPE_CHECKING:
    from meshrec.data.encoding import Encoding

ITEM, USER = "item", "user"
"""Feature names for item and user, whatever their columns are called."""
Ties = Literal["keep", "shuffle"]


@dataclass(frozen=True, kw_only=True)
class LogColumns:
    """Column names of a log, and row filters."""

    user: str = "user"
    """User column."""
    item: str = "item"
    """Item column."""
    time: str = "time"
    """Time column: a number, a timestamp, or text such as 2024-05-01 12:30:00."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Numeric timestamps' unit, since 1970."""
    time_format: str | None = None
    """strptime format for string timestamps, such as %d/%m/%Y; default ISO 8601."""
    action: str | None = None
    """Interaction type column."""
    actions: tuple[str, ...] = ()
    """Interaction types to use; default all."""
    rating: str | None = None
    """Rating column."""
    min_rating: float | None = None
    """Minimum rating to use; default all."""
    item_features: tuple[str, ...] = ()
    """Columns with additional item values, or lists of values. An item's first row counts."""
    min_user_count: int = 1
    """Omit users with fewer rows, counted before items are omitted."""
    min_item_count: int = 1
    """Omit items with fewer rows, counted before users are omitted."""
    ties: Ties = "keep"
    """Order of a user's simultaneous rows: data order, or shuffled. Shuffle data sorted by item, whose order
    would leak the next item.
    """

    def __post_init__(self) -> None:
        taken = sorted({USER, ITEM, HISTORY, SEEN, TIMES} & {*self.item_features})
        wrong = None
        if taken:
            wrong = f"item_features {taken} have names that features of a log have. Rename the columns"
        elif (self.actions and self.action is None) or (self.min_rating is not None and self.rating is None):
            wrong = "actions and min_rating need the columns action and rating. Name them"
        elif min(self.min_user_count, self.min_item_count) < 1:
            counts = f"min_user_count {self.min_user_count} and min_item_count {self.min_item_count}"
            wrong = f"{counts} must be at least 1"
        if wrong is not None:
            raise ValueError(f"columns of the log: {wrong}.")

    def kinds(self, features: "Encoding | None" = None) -> dict[str, str]:
        """Return column kinds for CSV files: kinds of fitted features, and numbers."""
        fitted = {} if features is None else features.fitted_kinds()
        return {name: "numeric" for name in (self.time, self.rating) if name is not None} | dict(fitted)

    def required(self) -> list[str]:
        """Return the columns in which every row has a value, without duplicates."""
        return list(dict.fromkeys([self.user, self.item, self.time]))

    def names(self) -> list[str]:
        """Return the columns to read, without duplicates."""
        optional = [name for name in (self.action, self.rating) if name is not None]
        return list(dict.fromkeys([*self.required(), *optional, *self.item_features]))
