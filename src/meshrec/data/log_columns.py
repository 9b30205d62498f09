"""The columns of a log of interactions."""

from dataclasses import dataclass
from typing import Literal

from meshrec.data.interactions import HISTORY, SEEN, TIMES

ITEM, USER = "item", "user"
"""Names of the features of the item and the user, whatever their columns are called."""
Ties = Literal["keep", "shuffle"]


@dataclass(frozen=True, kw_only=True)
class LogColumns:
    """The columns of a log, and the rows of it that count."""

    user: str = "user"
    """Column of the user."""
    item: str = "item"
    """Column of the item."""
    time: str = "time"
    """Column of the time: a number, a time, or text such as 2024-05-01 12:30:00."""
    time_unit: Literal["s", "ms", "us", "ns"] = "s"
    """Unit of times that are numbers, counted from 1970."""
    action: str | None = None
    """Column of the kind of interaction."""
    actions: tuple[str, ...] = ()
    """Kinds of interactions that count; if none, all of them."""
    rating: str | None = None
    """Column of the rating."""
    min_rating: float | None = None
    """Least rating that counts; if none, all of them."""
    item_features: tuple[str, ...] = ()
    """Columns with further values of items, or lists of values. The first row of an item counts."""
    min_user_count: int = 1
    """Leave out users with fewer rows, counted before any item is left out."""
    min_item_count: int = 1
    """Leave out items with fewer rows, counted before any user is left out."""
    ties: Ties = "keep"
    """Order of a user's rows of the same time: as in the data, or shuffled. Shuffle data that is sorted by
    item, because its order would tell which item comes next.
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

    def names(self) -> list[str]:
        """Return the columns to read, each once."""
        more = [each for each in (self.action, self.rating) if each is not None]
        return list(dict.fromkeys([self.user, self.item, self.time, *more, *self.item_features]))
