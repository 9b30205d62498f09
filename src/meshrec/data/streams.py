"""Unbounded data: records that arrive while a model trains on them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from meshrec.comms.mesh import Axis
from meshrec.data.arrow import pa
from meshrec.data.batch import Batch
from meshrec.data.faults import Faults

Position = dict[str, Any]
"""Position in a stream: plain values, which a checkpoint and a JSON file can have."""


class Burst(NamedTuple):
    """Steps for which all records have arrived; none if no record has arrived for about a second."""

    positions: list[Position]
    """Position after each step: all records before it are consumed."""
    batches: Iterator[Batch]
    """This rank's batches, one per step. Each has ``times``."""


class ColumnTypes:
    """Arrow types of the columns in the records that this rank has read.

    The types of records may differ: JSON has no types, and the first value of a column may be null, or 1
    where later values are 1.5.

    Args:
        names: columns that features read.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        # Replaced and never changed, because another thread than that of `add` reads it.
        self._types: dict[str, Any] = {}

    @property
    def schema(self) -> Any:
        """Arrow schema; None before the first record. The type of a column without values is null."""
        return pa.schema(list(self._types.items())) if self._types else None

    def add(self, schema: Any, empty: Collection[str] = ()) -> None:
        """Add the types of further records.

        Args:
            schema: Arrow schema. Columns that features do not read are ignored.
            empty: columns that have no type of their own and no value in these records.
        """
        from meshrec.data.features.values import kind_of

        types = dict(self._types)
        for name in self._names:
            if schema.get_field_index(name) < 0:
                continue
            old, new = types.get(name), pa.null() if name in empty else schema.field(name).type
            if old is None or pa.types.is_null(old) or _widens(kind_of(old), kind_of(new)):
                types[name] = new
        self._types = types


def _widens(old: str, new: str) -> bool:
    """Return whether a kind has all numbers of an integer kind, also in lists."""
    return new != old == new.replace("number", "integer")


class Stream(ABC):
    """Records that arrive while a model trains on them, in batches for all ranks.

    With W ranks and B samples per batch, a step takes W * B records, and every rank an equal, consecutive
    part of them. The position after a step and the position before it determine which records the step has.

    Attributes:
        faults: counts of records that were left out on this rank, by reason.
        column_types: types of the columns in the records so far; on rank 0 at least.
    """

    faults: Faults
    column_types: ColumnTypes

    @abstractmethod
    def bursts(
        self,
        batch_size: int,
        *,
        position: Position | None = None,
        axis: Axis = Axis(),  # noqa: B008 - immutable
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Burst]:
        """Yield the steps for which all records have arrived. Collective: all ranks iterate together.

        While records are missing, the iterator yields a burst without steps about every second, in which the
        consumer can do work that is due, such as saving a checkpoint. The iterator exchanges messages between
        ranks, so iterate on the thread that trains, and exhaust the batches of a burst before the next one.

        Args:
            batch_size: samples per batch and rank, including damaged records.
            position: position after the last consumed step, such as that of a checkpoint; None: the start.
            axis: the ranks.
            stop: called on rank 0 when there are not enough records for a step. True ends the iterator on all
                ranks.

        Raises:
            DataError: a record that this rank reads is damaged, or records after ``position`` are gone.
            ValueError: ``batch_size`` is below 1.
        """

    def on_checkpoint(self, position: Position) -> None:  # noqa: B027 - most streams have nothing to do
        """Take note that the run will not continue from before a position. Called on every rank.

        Args:
            position: position in the oldest checkpoint from which the run may continue.
        """
