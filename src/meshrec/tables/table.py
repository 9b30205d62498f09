"""Table protocol, for all code that reads, writes or moves rows.

[Note: the parts of a table]

A ``Table`` holds the rows in a single rectangle on a single rank. It has three parts: an index (keys to
slots), the memory that kernels read (``rows`` and ``state``, indexed by slot), and the backing for that
memory. Only a ``FixedTable`` has rows in a parameter's memory, at slot ``key - r0``. Any other table's
parameter has no rows, so DDP, FSDP2, clipping and ``parameters()`` have nothing to touch; its name,
``requires_grad`` and optimizer still belong to the table.

Rows leave a table through ``stream`` and enter it through ``load``, in blocks with ascending keys.
Checkpoints, resharding and state dicts know nothing else about it. A fixed table's blocks are its memory:
nothing is copied before it is written or sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshrec.tables.index import Index

Span = tuple[int, int]
"""An interval: first row or column, and end."""


class Rectangle(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) in a table."""

    table: int
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
    """A tensor with part of a table's rows or optimizer state."""

    name: str
    """``weight``, another state dict part such as a scale, or an optimizer slot."""
    dtype: torch.dtype
    per_row: bool
    """Whether the shape is ``[rows]``, a value for all columns; otherwise ``[rows, width]``."""


class RowBlock(NamedTuple):
    """Rows in a table, or some of their columns."""

    keys: range | Tensor
    """Ascending keys: a range if they are consecutive, otherwise int64 [n]."""
    columns: Span
    """Table columns in ``parts``."""
    parts: Mapping[str, Tensor]
    """Values by ``RowPart`` name. A block may hold only some parts."""


class Table(Protocol):
    """Table rows on a rank, whole or a rectangle. See [Note: the parts of a table]."""

    @property
    def rectangle(self) -> Rectangle:
        """Keys and columns in this table."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """Row parts, ``weight`` first, followed by optimizer state."""

    @property
    def is_growable(self) -> bool:
        """Whether the number of rows changes during training, so only an index knows the keys."""

    @property
    def index(self) -> Index | None:
        """Index from keys to slots; None if the slot is ``key - r0``."""

    @property
    def rows(self) -> Tensor:
        """Kernel-visible memory, indexed by slot."""

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state changed by the kernels, by optimizer slot; indexed as ``rows``."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts by name for state dicts: the memory, or ``StreamedPart`` tensors."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows in blocks with ascending keys.

        A block is valid until the table changes. The table must not change before the last block.

        Args:
            columns: requested columns; None: all.
            keys: requested keys [first, end); None: all.
        """

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace the rows, or row parts, in the blocks. All other rows stay.

        A block is copied before the next block is requested.
        """


class TableSnapshot(Protocol):
    """Table rows at a fixed moment, while training continues."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows as ``Table.stream`` would have at that moment.

        A background checkpoint calls this in a forked process. There, memory shared between processes
        continues to change, and previously open files are closed.
        """

    def close(self) -> None:
        """Remove the memory or files with the old rows."""


class ExternalTable(Table, Protocol):
    """A rectangle with rows outside a parameter's memory."""

    def snapshot(self) -> TableSnapshot:
        """Return a snapshot of the rows."""


@runtime_checkable
class LazyRows(Protocol):
    """A table with initial rows created on demand."""

    def start_with(self, first: Callable[[Span], Iterable[RowBlock]]) -> None:
        """Take initial row values from a function of the keys."""


def start_rows(table: Table, initial: Callable[[Span], Iterable[RowBlock]], *, lazily: bool) -> None:
    """Give a table the initial rows.

    Args:
        table: the table.
        initial: returns initial rows for a key interval.
        lazily: whether a table may call ``initial`` later, when it needs the rows.
    """
    if lazily and isinstance(table, LazyRows):
        table.start_with(initial)
    else:
        table.load(initial((table.rectangle.r0, table.rectangle.r1)))


def weights_at(table: Table, keys: Tensor) -> Tensor:
    """Read ``weight`` at some keys, int64 [n], ascending. All keys must have a row."""
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
