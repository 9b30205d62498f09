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

_TOO_LATE = 10**11
"""Times from here on, after the year 5000, are no seconds since 1970."""


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
            DataError: a row has another number of times than of items, or its times fall or are no seconds.
        """
        found, items = values_of(table[self.source]), values_of(table[self.history])
        differ = np.diff(found.offsets) != np.diff(items.offsets)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"row {row} has {int(np.diff(items.offsets)[row])} values in column {self.history!r} and "
                f"{int(np.diff(found.offsets)[row])} in {self.source!r}. Give every item its time"
            )
        if not found.array.null_count:  # `check` reports null
            self._check_order(self.rows_of(found.array), found.offsets)
        return found

    def _check_order(self, seconds_N: Ints, offsets: Ints) -> None:
        """Raise DataError where a time is too late for seconds, or earlier than the one before it."""
        falls = np.diff(seconds_N) < 0
        inner = offsets[(offsets > offsets[0]) & (offsets < offsets[-1])] - offsets[0]
        falls[inner - 1] = False
        for is_wrong, problem in (
            (seconds_N >= _TOO_LATE, "after the year 5000. Give seconds since 1970, not milliseconds"),
            (np.append(False, falls), "after a later time. Give the oldest item first"),
        ):
            if is_wrong.any():
                at = int(is_wrong.argmax())
                row = int(np.searchsorted(offsets - offsets[0], at, side="right")) - 1
                raise DataError(f"row {row} has {seconds_N[at]} in column {self.source!r}, {problem}")

    def rows_of(self, array: Any) -> Ints:
        """Return the times, int64."""
        return integers_of(array if kind_of(array.type) == "integer" else converted(array, "integer"))

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with null among their times out of ``kept``."""
        check_missing(self, found, place, kept, faults)
