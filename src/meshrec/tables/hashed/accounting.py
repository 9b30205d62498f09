"""Counters of a hashed table."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class TableCounts:
    """Numbers of IDs looked up, admitted and evicted since a table was created, on this rank.

    Attributes:
        live: IDs that have a row now.
        new: IDs admitted so far.
        refused: IDs without a row that an update did not admit. An ID counts at every such update.
        evicted: rows evicted so far.
        read: IDs looked up in training, including repeated ones.
        hits: IDs looked up in training that had a row or a pending slot.
        early: estimated fraction of new IDs that a count-min sketch admits too early.
    """

    live: int = 0
    new: int = 0
    refused: int = 0
    evicted: int = 0
    read: int = 0
    hits: int = 0
    early: float = 0.0


@dataclass
class RowAccounting:
    """Counters of a hashed table, and a record of evicted keys. Lives as long as the table."""

    report: TableCounts = field(default_factory=TableCounts)
    evicted: list[Tensor] = field(default_factory=list)
    """Keys of evicted rows, one int64 tensor per eviction. Recorded only if ``is_watched``; the delta
    publisher empties the list."""
    is_watched: bool = False
    """Whether to record evicted keys. Set by the delta publisher."""
    changes: int = 0
    """Number of times that rows were admitted, loaded or evicted. If equal, the live IDs are the same."""
    loads: int = 0
    """Number of ``load`` calls."""

    def note_reads(self, num_read: int, num_absent: int) -> None:
        """Count the IDs in a training lookup, repeated ones too, and those of them that had no slot."""
        self.report.read += num_read
        self.report.hits += num_read - num_absent
