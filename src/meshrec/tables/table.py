"""Table protocol: the interface for reading, writing and moving rows.

[Note: the parts of a table]

A ``Table`` holds a single rectangle's rows on a single rank. It has three parts: an index (keys to
slots), the memory read by kernels (``rows`` and ``state``, indexed by slot), and the storage behind that
memory, such as a file. Only a ``FixedTable`` has rows in parameter memory, at slot ``key - r0``.
Any other table's parameter has no rows, so DDP, FSDP2, clipping and ``parameters()`` have nothing to
touch; the name, ``requires_grad`` and optimizer still belong to the table.

Rows leave a table through ``stream`` and enter it through ``load``, in blocks with ascending keys.
Checkpoints, resharding and state dicts use nothing else. A fixed table's blocks are views: nothing
is copied before it is written or sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshrec.tables.index import Index

Span = tuple[int, int]
"""A row or column interval: first, and end (exclusive)."""


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
    """Name, dtype and shape of a tensor with some row values or optimizer state."""

    name: str
    """``weight``, another row part such as a scale, or an optimizer slot."""
    dtype: torch.dtype
    per_row: bool
    """Whether the shape is ``[rows]``, one value per row; otherwise ``[rows, width]``."""


class RowBlock(NamedTuple):
    """Some table rows, or some columns in these rows."""

    keys: range | Tensor
    """Ascending row keys: a range if they are consecutive, otherwise int64 [n]."""
    columns: Span
    """Table columns in ``parts``."""
    parts: Mapping[str, Tensor]
    """Values by ``RowPart`` name, one row per key. A block may have only some parts."""


class Table(Protocol):
    """Table rows on a rank: all or a rectangle. See [Note: the parts of a table]."""

    @property
    def rectangle(self) -> Rectangle:
        """This table's keys and columns."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """Row parts, ``weight`` first, followed by optimizer state."""

    @property
    def is_growable(self) -> bool:
        """Whether the row count changes during training, so only an index knows the keys."""

    @property
    def index(self) -> Index | None:
        """Index from keys to slots; None if the slot is ``key - r0``."""

    @property
    def rows(self) -> Tensor:
        """Memory read by kernels, indexed by slot."""

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state changed by kernels: one tensor per state slot, indexed like ``rows``."""

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
        """Write the rows, or row parts, from the blocks. Other rows stay.

        A block is copied before the next block is requested.
        """


class TableSnapshot(Protocol):
    """Table rows at a fixed moment, readable while training continues."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows as ``Table.stream`` would have at that moment.

        A background checkpoint calls this in a forked process. There, memory shared between processes
        continues to change, and previously open files are closed.
        """

    def close(self) -> None:
        """Free memory or files with the old rows."""


class ExternalTable(Table, Protocol):
    """Table with rows outside parameter memory."""

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows."""


@runtime_checkable
class LazyRows(Protocol):
    """A table computing initial rows on first use."""

    def set_initial_rows(self, first: Callable[[Span], Iterable[RowBlock]]) -> None:
        """Set the function for the initial rows in a key interval."""


def initialize_rows(table: Table, initial: Callable[[Span], Iterable[RowBlock]], *, lazily: bool) -> None:
    """Write a table's initial rows, or let the table compute them on first use.

    Args:
        table: the table.
        initial: returns the initial rows in a key interval.
        lazily: whether a table may call ``initial`` later, for the rows it needs.
    """
    if lazily and isinstance(table, LazyRows):
        table.set_initial_rows(initial)
    else:
        table.load(initial((table.rectangle.r0, table.rectangle.r1)))


def read_weights(table: Table, keys: Tensor) -> Tensor:
    """Return the ``weight`` for some keys, int64 [n], ascending. Every key must have a row."""
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
