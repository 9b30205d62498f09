"""The count of in-place writes to a table, which tells its own updates from foreign writes."""

import operator
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import increment_version

from meshrec.ops.versions import changed_message

_version: Callable[[Tensor], int] = operator.attrgetter("_version")


class OwnWrites:
    """The number of in-place writes to some tables that their own update has made.

    torch counts all in-place writes to a tensor. A gradient stays valid when the update of another batch
    changes the table in between (it does not depend on the rows), but not when the user loads or writes
    weights; the difference of the two counts tells them apart.

    Args:
        names: the names of the tables, for messages.
        weights: their parameters.
    """

    def __init__(self, names: Sequence[str], weights: Sequence[Tensor]) -> None:
        self._names, self._weights = list(names), list(weights)
        self._own = [0] * len(self._weights)
        self._lock = threading.Lock()

    def place_of(self, weight: Tensor) -> int:
        """Return the place of one of the ``weights``, as ``count`` takes it."""
        return next(place for place, each in enumerate(self._weights) if each is weight)

    def foreign(self) -> list[int]:
        """Return how often somebody else has written to each table."""
        with self._lock:
            return list(map(operator.sub, map(_version, self._weights), self._own))

    def count(self, places: Sequence[int]) -> None:
        """Count one write of the update itself to each of the tables at ``places`` among ``weights``."""
        with self._lock:
            increment_version([self._weights[place] for place in places])
            for place in places:
                self._own[place] += 1

    def check(self, before: Sequence[int]) -> None:
        """Raise if somebody else has written to a table since ``foreign`` gave ``before``.

        Raises:
            ValueError: names the table.
        """
        found = self.foreign()
        if found == before:
            return
        for name, now, then in zip(self._names, found, before, strict=True):
            if now != then:
                raise ValueError(changed_message(name))

    def check_held(self, weights: Sequence[Tensor]) -> None:
        """Raise if a module has other parameters than those that are updated.

        Raises:
            ValueError: names the parameter that was replaced.
        """
        if all(map(operator.is_, weights, self._weights)):
            return
        number = next(n for n, weight in enumerate(weights) if weight is not self._weights[n])
        raise ValueError(
            f"the parameter of {self._names[number]} was replaced by another one after the module was fused; "
            "its optimizer would go on to train the old one. Copy the new values into the parameter that is "
            "there (parameter.data.copy_(values), or load_state_dict without assign=True)."
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy has other parameters, whose versions start again; a lock cannot be copied.
        return OwnWrites, (self._names, self._weights)
