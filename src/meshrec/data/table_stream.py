"""Records that arrive, as Arrow tables, for readers that do not encode them."""

from abc import ABC, abstractmethod
from typing import Any


class TableStream(ABC):
    """Records that arrive, as Arrow tables with the same columns.

    Attributes:
        name: name for messages, without secrets.
        logged: after a call of `read` that returned records, what its repetition takes as ``logged``: a JSON
            value.
        is_waiting: whether `read` has returned None although there may be records, because the source does
            not answer.
    """

    name: str
    logged: Any = None
    is_waiting = False

    @abstractmethod
    def read(self, logged: Any = None) -> Any:
        """Return the next records as a table; None if there are none now.

        Args:
            logged: what an earlier object had in ``logged`` after a call that started at the same position.
                The same records are then returned, or None while they have not arrived. None: records that
                have not been read before.

        Raises:
            DataError: a record or file is damaged, or has changed or vanished.
        """

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position as plain values, from which another object continues."""

    @abstractmethod
    def close(self) -> None:
        """Release connections and open files. The object is not used afterwards."""
