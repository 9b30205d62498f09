"""Table protocol: the interface for reading, writing and moving the rows of a table on a rank.

[Note: the parts of a table]

A ``Table`` object holds the rows of a *rectangle*, a row interval times a column interval of an embedding
table, on a single rank. It has three parts: an index from keys to slots, the memory read by kernels
(``rows`` and ``state``, indexed by slot), and the storage behind this memory, such as a file. A *key* is a
row number, or in a hashed table the hash of an ID. A *slot* is a row position in memory.

Only a ``FixedTable`` has rows in the memory of its parameter, at slot ``key - r0``. The parameter of any
other table has no rows, so DDP, FSDP2, clipping and ``parameters()`` cannot touch them. Such a parameter
still carries the table's name, ``requires_grad`` and optimizer.

A table neither resolves keys nor updates rows by itself. Rectangles with other columns of the same rows
share an `Index`, so keys are resolved once per batch for all of them, and a fixed table needs no index. An
update is one kernel call for all tables with equal optimizers, and reads ``rows`` and ``state`` of each
(``updates.py``).

Rows leave a table through ``stream`` and enter it through ``load``, in blocks with ascending keys.
Checkpoints, resharding and state dicts use only these two methods. The blocks of a fixed table are views, so
nothing is copied before it is written or sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshrec.tables.index import Index

Span = tuple[int, int]
"""First and end (exclusive) of an interval of rows, keys or columns."""


class Rectangle(NamedTuple):
    """Rows (in a hashed table: keys) [r0, r1) and columns [c0, c1) of a table."""

    # Number of the table among those looked up together.
    table: int
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def origin(self) -> Span:
        """First row and first column."""
        return self.r0, self.c0

    @property
    def columns(self) -> Span:
        """Columns [c0, c1)."""
        return self.c0, self.c1


class RowPart(NamedTuple):
    """A row part: the name, dtype and shape of a tensor with row values or optimizer state, a row per key."""

    name: str
    """``weight``, another part of the row such as a scale, or an optimizer state slot."""
    dtype: torch.dtype
    per_row: bool
    """Whether the shape is ``[rows]``, a single value per row. Otherwise it is ``[rows, width]``."""


class RowBlock(NamedTuple):
    """Rows of a table, with all or some columns and row parts (weights, optimizer state)."""

    keys: range | Tensor
    """Row keys, ascending: a range if they are consecutive, otherwise int64 [n]."""
    columns: Span
    """Table columns that ``parts`` holds."""
    parts: Mapping[str, Tensor]
    """Values by ``RowPart`` name, one row per key. A block may have only some of the table's parts."""


class Table(Protocol):
    """Interface of a local table shard, whose rows can be read, written and moved to other ranks.

    The shard covers a row interval and a column interval of the whole table, called its rectangle. See
    [Note: the parts of a table].
    """

    @property
    def rectangle(self) -> Rectangle:
        """Key and column intervals of the rows."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """Row parts: ``weight`` first, then other row values, then optimizer state."""

    @property
    def is_growable(self) -> bool:
        """Whether rows are added and removed during training, so only the index knows the keys."""

    @property
    def index(self) -> Index | None:
        """Index from keys to slots; None if the slot is ``key - r0``."""

    @property
    def rows(self) -> Tensor:
        """Memory with the weights, which kernels read, indexed by slot."""

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state that kernels change: one tensor per state slot, indexed like ``rows``."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts by name, as in a state dict: the memory itself, or ``StreamedPart`` tensors."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows in blocks with ascending keys.

        The table must not change before the last block is yielded. A block is valid until the table changes.

        Args:
            columns: table columns to return; None: all in the rectangle.
            keys: key interval to return; None: all keys in the rectangle.
        """

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write the rows, or the parts and columns of rows, that the blocks hold. Others stay as they are.

        Copies a block before it requests the next, so a generator may reuse the memory of its blocks.

        Args:
            blocks: new values.
        """


class TableSnapshot(Protocol):
    """The rows of a table as they were at a fixed moment, which can be read while training continues."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows as ``Table.stream`` would have yielded them at that moment.

        A background checkpoint calls this in a forked process. There, memory shared between processes
        continues to change, and files that were open at the fork are closed.
        """

    def close(self) -> None:
        """Free the memory or files that hold old rows. The snapshot cannot be read afterward."""


class ExternalTable(Table, Protocol):
    """A table with rows outside the memory of its parameter, such as a hashed table or a table in a file."""

    def snapshot(self) -> TableSnapshot:
        """Return a snapshot of the present rows. It must be closed."""


@runtime_checkable
class LazyRows(Protocol):
    """A table that can compute initial rows on first use, instead of storing them when it is created."""

    def set_initial_rows(self, initial_blocks: Callable[[Span], Iterable[RowBlock]]) -> None:
        """Set the function returning the initial rows in a key interval."""


def initialize_rows(table: Table, initial: Callable[[Span], Iterable[RowBlock]], *, lazily: bool) -> None:
    """Give a table its initial rows: write them now, or let the table compute them on first use.

    Args:
        table: the table.
        initial: function returning the initial rows in a key interval.
        lazily: whether the table may call ``initial`` later, if it can (``LazyRows``).
    """
    # A lazy table writes a row's initial values when it is first used, which saves time and disk space.
    if lazily and isinstance(table, LazyRows):
        table.set_initial_rows(initial)
    else:
        table.load(initial((table.rectangle.r0, table.rectangle.r1)))


def read_weights(table: Table, keys: Tensor) -> Tensor:
    """Return the weights [n, columns] of rows by key, int64 [n] ascending. Every key must have a row."""
    if len(keys) == 0:
        return table.rows.new_empty(0, table.rows.shape[1])
    # Stream only the interval from the first to the last key, and pick the requested rows from its blocks.
    weights = []
    for block in table.stream(keys=(int(keys[0]), int(keys[-1]) + 1)):
        here = block.keys
        # A block may have other keys than those requested, because the interval covers all keys in between.
        if isinstance(here, range):
            # ``keys`` ascend, so the requested keys in a consecutive block are next to each other.
            first, end = torch.searchsorted(keys, torch.tensor([here.start, here.stop], device=keys.device))
            positions = keys[first:end] - here.start
        else:
            positions = torch.isin(here, keys).nonzero()[:, 0]
        weights.append(block.parts["weight"][positions])
    return torch.cat(weights)
