"""Columns of an interaction log."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from meshrec.data.interactions import HISTORY, SEEN, TIMES

if TYPE_CHECKING:
    from meshrec.data.encoding import Encoding

ITEM, USER = "item", "user"
"""Names of the item feature and the user feature, whatever the columns in the data are called."""
Ties = Literal["keep", "shuffle"]


@dataclass(frozen=True, kw_only=True)
class LogColumns:
    """Names of the columns in an interaction log, and filters for its rows."""

    user: str = "user"
    """User column."""
    item: str = "item"
    """Item column."""
    time: str = "time"
    """Time column: a number, a timestamp, or text such as 2024-05-01 12:30:00."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of numbers in the time column, counted from 1970."""
    time_format: str | None = None
    """strptime format for times as text, such as %d/%m/%Y; default ISO 8601."""
    action: str | None = None
    """Column with the type of an interaction, such as view or purchase."""
    actions: tuple[str, ...] = ()
    """Interaction types to use, such as purchase; default all."""
    rating: str | None = None
    """Rating column."""
    min_rating: float | None = None
    """Minimum rating of a row to use; default all."""
    item_features: tuple[str, ...] = ()
    """Columns with further item features: values, or lists with values. An item has the values of its first
    row.
    """
    min_user_count: int = 1
    """Omit users with fewer rows, counted before items are omitted."""
    min_item_count: int = 1
    """Omit items with fewer rows, counted before users are omitted."""
    ties: Ties = "keep"
    """Order of a user's rows with equal times: "keep" their order in the data, or "shuffle" them. Shuffle if
    the data is sorted by item: otherwise a model learns the next item from that order.
    """

    def __post_init__(self) -> None:
        taken = sorted({USER, ITEM, HISTORY, SEEN, TIMES} & {*self.item_features})
        wrong = None
        if len(set(self.required())) < len(self.required()):
            wrong = f"user {self.user!r}, item {self.item!r} and time {self.time!r} must differ"
        elif taken:
            wrong = f"item_features {taken} have names that features of a log have. Rename the columns"
        elif (self.actions and self.action is None) or (self.min_rating is not None and self.rating is None):
            wrong = "actions and min_rating need the columns action and rating. Name them"
        elif min(self.min_user_count, self.min_item_count) < 1:
            counts = f"min_user_count {self.min_user_count} and min_item_count {self.min_item_count}"
            wrong = f"{counts} must be at least 1"
        if wrong is not None:
            raise ValueError(f"columns of the log: {wrong}.")

    def kinds(self, features: "Encoding | None" = None) -> dict[str, str]:
        """Return column kinds in CSV files, by name, for `read_csvs`.

        Time and rating are numeric. ``features`` that are fitted add their column kinds.
        """
        fitted = {} if features is None else features.fitted_kinds()
        return {name: "numeric" for name in (self.time, self.rating) if name is not None} | dict(fitted)

    def required(self) -> list[str]:
        """Return the columns in which a row needs a value: user, item and time."""
        return [self.user, self.item, self.time]

    def names(self) -> list[str]:
        """Return all columns to read, without duplicates."""
        optional = [name for name in (self.action, self.rating) if name is not None]
        return list(dict.fromkeys([*self.required(), *optional, *self.item_features]))
