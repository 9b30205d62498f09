"""Feature with history timestamps, which are read by models but not by an embedding table."""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from meshrec.data.faults import DataError
from meshrec.data.features.ids import IdFeature
from meshrec.data.features.values import Kind, Values, converted, integers_of, kind_of, values_of
from meshrec.data.samples import Ints

_TOO_LATE = 10**11
"""Limit of plausible times, in seconds since 1970: after the year 5000."""


@dataclass(frozen=True, kw_only=True)
class Times(IdFeature):
    """Timestamps of the items in a history: lists of whole seconds since 1970, not decreasing.

    Args:
        history: column with the items. A row has as many timestamps as items.
    """

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "list of integer", "list of number")
    takes_whole_only: ClassVar[bool] = True
    needs_fit: ClassVar[bool] = False

    history: str

    @property
    def null_remedy(self) -> str | None:
        return "Give every item its time"

    @property
    def rows(self) -> int:
        """Number of table rows: 0, because timestamps are not looked up in an embedding table."""
        return 0

    def columns(self) -> tuple[str, ...]:
        """Return the columns with the timestamps and the items."""
        return (self.source, self.history)

    def values(self, table: pa.Table) -> Values:
        """Return the timestamps in all rows, after checking them.

        Raises:
            DataError: a row has different numbers of timestamps and items, or the timestamps decrease or are
                not seconds.
        """
        times, items = values_of(table[self.source]), values_of(table[self.history])
        differ = np.diff(times.offsets) != np.diff(items.offsets)
        if differ.any():
            row = int(differ.argmax())
            raise DataError(
                f"row {row} has {int(np.diff(items.offsets)[row])} values in column {self.history!r} and "
                f"{int(np.diff(times.offsets)[row])} in {self.source!r}. Give every item its time"
            )
        if not times.array.null_count:  # `check` reports null
            self._check_order(self.rows_of(times.array), times.offsets)
        return times

    def _check_order(self, seconds_N: Ints, offsets: Ints) -> None:
        """Raise DataError for a timestamp that is implausibly late, or earlier than the previous one."""
        # Whether time decreases from one value to the next.
        falls = np.diff(seconds_N) < 0
        inner = offsets[(offsets > offsets[0]) & (offsets < offsets[-1])] - offsets[0]
        # A decrease between the lists of two rows is fine.
        falls[inner - 1] = False
        for is_wrong, problem in (
            (seconds_N >= _TOO_LATE, "after the year 5000. Give seconds since 1970, not milliseconds"),
            (np.append(False, falls), "after a later time. Give the oldest item first"),
        ):
            if is_wrong.any():
                position = int(is_wrong.argmax())
                row = int(np.searchsorted(offsets - offsets[0], position, side="right")) - 1
                raise DataError(f"row {row} has {seconds_N[position]} in column {self.source!r}, {problem}")

    def rows_of(self, array: Any) -> Ints:
        """Return the timestamps, int64."""
        return integers_of(array if kind_of(array.type) == "integer" else converted(array, "integer"))
