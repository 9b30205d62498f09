"""Table protocol: the interface through which all code reads, writes and moves rows.

[Note: the parts of a table]

A ``Table`` holds the rows of a single rectangle on a single rank. It has three parts: an index (keys to
slots), the memory that kernels read (``rows`` and ``state``, indexed by slot), and the storage behind that
memory, such as a file. Only a ``FixedTable`` has its rows in the memory of a parameter, at slot ``key - r0``.
The parameter of any other table has no rows, so DDP, FSDP2, clipping and ``parameters()`` have nothing to
touch; its name, ``requires_grad`` and optimizer still belong to the table.

Rows leave a table through ``stream`` and enter it through ``load``, in blocks with ascending keys.
Checkpoints, resharding and state dicts use nothing else. The blocks of a fixed table are its memory: nothing
is copied before it is written or sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshrec.tables.index import Index

Span = tuple[int, int]
"""An interval of rows or columns: first, and end (exclusive)."""


class Rectangle(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) of a table."""

    table: int  # table number
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def origin(self) -> Span:
        """First row and column."""
        return self.r0, self.c0

    @property
    def columns(self) -> Span:
        """Columns [c0, c1)."""
        return self.c0, self.c1


class RowPart(NamedTuple):
    """Name, dtype and shape of a tensor that holds a part of a table's rows or optimizer state."""

    name: str
    """``weight``, another row part such as a scale, or an optimizer slot."""
    dtype: torch.dtype
    per_row: bool
    """Whether the shape is ``[rows]``, one value per row; otherwise ``[rows, width]``."""


class RowBlock(NamedTuple):
    """Some rows of a table, or some columns of these rows."""

    keys: range | Tensor
    """Ascending keys of the rows: a range if they are consecutive, otherwise int64 [n]."""
    columns: Span
    """Table columns that ``parts`` contain."""
    parts: Mapping[str, Tensor]
    """Values by ``RowPart`` name, one row per key. A block may have only some parts."""


class Table(Protocol):
    """Rows of a table on a rank: all or a rectangle. See [Note: the parts of a table]."""

    @property
    def rectangle(self) -> Rectangle:
        """Keys and columns of this table."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """Parts of a row, ``weight`` first, followed by optimizer state."""

    @property
    def is_growable(self) -> bool:
        """Whether the number of rows changes during training, so only an index knows the keys."""

    @property
    def index(self) -> Index | None:
        """Index from keys to slots; None if the slot is ``key - r0``."""

    @property
    def rows(self) -> Tensor:
        """Memory that the kernels read, indexed by slot."""

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state that the kernels change: one tensor per state slot, indexed like ``rows``."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts by name, as a state dict has them: the memory, or ``StreamedPart`` tensors."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows in blocks with ascending keys.

        A block is valid until the table changes. The table must not change before the last block.

        Args:
            columns: columns to return; None: all.
            keys: keys to return, [first, end); None: all.
        """

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write the rows, or parts of rows, that the blocks contain. Other rows stay.

        A block is copied before the next block is requested.
        """


class TableSnapshot(Protocol):
    """The rows of a table at a fixed moment, readable while training continues."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows as ``Table.stream`` would have at that moment.

        A background checkpoint calls this in a forked process. There, memory shared between processes
        continues to change, and previously open files are closed.
        """

    def close(self) -> None:
        """Free the memory or files that hold the old rows."""


class ExternalTable(Table, Protocol):
    """Table whose rows are outside the memory of a parameter."""

    def snapshot(self) -> TableSnapshot:
        """Return a snapshot of the present rows."""


@runtime_checkable
class LazyRows(Protocol):
    """A table that computes initial rows when they are first needed."""

    def set_initial_rows(self, first: Callable[[Span], Iterable[RowBlock]]) -> None:
        """Set the function that returns the initial rows of a key interval."""


def initialize_rows(table: Table, initial: Callable[[Span], Iterable[RowBlock]], *, lazily: bool) -> None:
    """Write the initial rows of a table, or let the table compute them when they are needed.

    Args:
        table: the table.
        initial: returns the initial rows of a key interval.
        lazily: whether a table may call ``initial`` later, for the rows that it needs.
    """
    if lazily and isinstance(table, LazyRows):
        table.set_initial_rows(initial)
    else:
        table.load(initial((table.rectangle.r0, table.rectangle.r1)))


def read_weights(table: Table, keys: Tensor) -> Tensor:
    """Return the ``weight`` of some keys, int64 [n], ascending. Each key must have a row."""
    if len(keys) == 0:
        return table.rows.new_empty(0, table.rows.shape[1])
    weights = []
    for block in table.stream(keys=(int(keys[0]), int(keys[-1]) + 1)):
        here = block.keys
        if isinstance(here, range):
            first, end = torch.searchsorted(keys, torch.tensor([here.start, here.stop], device=keys.device))
            positions = keys[first:end] - here.start
        else:
            positions = torch.isin(here, keys).nonzero()[:, 0]
        weights.append(block.parts["weight"][positions])
    return torch.cat(weights)
