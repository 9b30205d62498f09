"""Times of the items of a history, which no table reads."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from meshrec.data.encoding import Place
from meshrec.data.faults import DataError, Faults
from meshrec.data.features.ids import IdFeature, check_missing
from meshrec.data.features.values import Kind, Values, converted, integers_of, kind_of, values_of
from meshrec.data.samples import Bools, Ints


@dataclass(frozen=True, kw_only=True)
class Times(IdFeature):
    """Lists of times in whole seconds since 1970, one for each item of a history.

    Args:
        history: the column with the items.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "list of integer")

    history: str

    @property
    def is_fitted(self) -> bool:
        """True: there is nothing to fit."""
        return True

    @property
    def rows(self) -> int:
        """0: no table reads them."""
        return 0

    def columns(self) -> tuple[str, ...]:
        """Return the columns of the times and of the items."""
        return (self.source, self.history)

    def values(self, table: pa.Table) -> Values:
        """Return the times.

        Raises:
            DataError: a row has another number of times than of items.
        """
        found, items = values_of(table[self.source]), values_of(table[self.history])
        differ = np.diff(found.offsets) != np.diff(items.offsets)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"row {row} has {int(np.diff(items.offsets)[row])} values in column {self.history!r} and "
                f"{int(np.diff(found.offsets)[row])} in {self.source!r}. Give every item its time"
            )
        return found

    def rows_of(self, array: Any) -> Ints:
        """Return the times, int64."""
        return integers_of(array if kind_of(array.type) == "integer" else converted(array, "integer"))

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with null among their times out of ``kept``."""
        check_missing(self, found, place, kept, faults)
