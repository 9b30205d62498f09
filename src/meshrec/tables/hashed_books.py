"""Records of a hashed table beside its rows: the rows that batches in flight hold, and counts of its IDs."""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import ReferenceType

import torch
from torch import Tensor

from meshrec.ops.index import GivenSlots
from meshrec.tables.at_rest import AtRest


class PinnedRows:
    """The rows of one table that a batch holds; ``parts`` has their slots."""

    def __init__(
        self,
        table: object,
        parts: Sequence[Tensor],
        pending: Tensor,
        released: deque[Tensor],
        *,
        fresh: GivenSlots | None = None,
        changes: int = 0,
    ) -> None:
        self.table, self.pending, self._fresh = table, pending, fresh
        self.changes = changes
        """The number of times that IDs had been admitted or evicted when the batch was resolved."""
        self._parts, self._released = parts, released
        self.arriving: object = None
        """The pin of the rows in the cache of a file; an ``ArrivingRows``."""

    @property
    def slots(self) -> Tensor:
        """The slots, which may repeat."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat(list(self._parts))

    def fresh(self) -> GivenSlots | None:
        """Return the pending rows, if they were made for this batch and no others have joined them."""
        return self._fresh if self._fresh is not None and self.pending is self._fresh.slots else None

    def __del__(self) -> None:
        # This may run in any thread, so the rows are only queued. The table frees them at its next lookup.
        self._released.append(self.pending)


@dataclass
class TableCounts:
    """Counts of the IDs of a table since it was made, on this rank.

    Attributes:
        live: IDs that have a row now.
        new: IDs that were admitted.
        refused: new IDs in updates that were not admitted, counted once an update.
        evicted: IDs whose rows went.
        read: IDs that were looked up.
        hits: those of them that had a row.
        early: the estimated share of new IDs that a sketch admits early.
    """

    live: int = 0
    new: int = 0
    refused: int = 0
    evicted: int = 0
    read: int = 0
    hits: int = 0
    early: float = 0.0


@dataclass
class Books:
    """The records of a table beside its rows: counts, evicted keys, and the rows at rest."""

    report: TableCounts = field(default_factory=TableCounts)
    evicted: list[Tensor] = field(default_factory=list)
    """The keys of evicted rows, for the publisher of deltas; recorded if ``is_watched``."""
    is_watched: bool = False
    changes: int = 0
    """The number of times that IDs were admitted or evicted."""
    loads: int = 0
    """The number of times that rows were loaded."""
    resting: "ReferenceType[AtRest] | None" = None
    """The rows at rest, as long as a caller holds them."""

    def note_reads(self, num_read: int, num_absent: int) -> None:
        """Count the IDs that a batch has read, of which ``num_absent`` had no row."""
        self.report.read += num_read
        self.report.hits += num_read - num_absent
