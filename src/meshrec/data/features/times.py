"""Times of the items of a history, which no table reads."""

from dataclasses import dataclass
from typing import Any, ClassVar

from meshrec.data.encoding import Place
from meshrec.data.faults import Faults
from meshrec.data.features.ids import IdFeature, check_missing
from meshrec.data.features.values import Kind, Values, converted, integers_of, kind_of
from meshrec.data.samples import Bools, Ints


@dataclass(frozen=True, kw_only=True)
class Times(IdFeature):
    """Lists of times in whole seconds since 1970, one for each item of a history."""

    allowed: ClassVar[tuple[Kind, ...]] = ("integer", "list of integer")

    @property
    def is_fitted(self) -> bool:
        """True: there is nothing to fit."""
        return True

    @property
    def rows(self) -> int:
        """0: no table reads them."""
        return 0

    def rows_of(self, array: Any) -> Ints:
        """Return the times, int64."""
        return integers_of(array if kind_of(array.type) == "integer" else converted(array, "integer"))

    def check(self, rows: Ints, found: Values, place: Place, kept: Bools, faults: Faults) -> None:
        """Take samples with null among their times out of ``kept``."""
        check_missing(self, found, place, kept, faults)
