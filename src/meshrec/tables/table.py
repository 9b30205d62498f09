"""The protocol of a table, for all code that reads, writes or moves rows.

[Note: what a table is]

A ``TableRows`` is the rows of one rectangle on one rank. It has three parts: an index (keys to slots), the
memory that the kernels read (``rows`` and ``state``, indexed by slot), and the backing of that memory. Only a
``FixedTable`` has its rows in the memory of a parameter, at slot ``key - r0``. The parameter of any other
table has no rows, so that DDP, FSDP2, clipping and ``parameters()`` have nothing to touch; its name, its
``requires_grad`` and its optimizer are those of the table all the same.

Rows leave a table through ``stream`` and enter it through ``load``, in blocks of ascending keys. Checkpoints,
resharding and state dicts know nothing else of it. The blocks of a fixed table are its memory: nothing is
copied before it is written or sent.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from meshrec.tables.index import Index

Span = tuple[int, int]
"""An interval: the first row or column, and the end."""


class Rectangle(NamedTuple):
    """Rows [r0, r1) and columns [c0, c1) of a table."""

    table: int
    r0: int
    r1: int
    c0: int
    c1: int

    @property
    def origin(self) -> Span:
        """The row and the column where it begins."""
        return self.r0, self.c0

    @property
    def columns(self) -> Span:
        """The columns [c0, c1)."""
        return self.c0, self.c1


class RowPart(NamedTuple):
    """One of the tensors that the rows of a table and their optimizer state consist of."""

    name: str
    """``weight``, another part of the state dict such as a scale, or a slot of the optimizer."""
    dtype: torch.dtype
    per_row: bool
    """Whether the shape is ``[rows]``, one value for all columns; otherwise it is ``[rows, width]``."""


class RowBlock(NamedTuple):
    """Rows of a table, or some columns of them."""

    keys: range | Tensor
    """The keys in ascending order: a range if they are consecutive, otherwise int64 [n]."""
    columns: Span
    """The columns of the table that ``parts`` hold."""
    parts: Mapping[str, Tensor]
    """The values of each key, by the name of a ``RowPart``. A block may hold only some of the parts."""


class TableRows(Protocol):
    """The rows of one table on one rank, whole or a rectangle of it. See [Note: what a table is]."""

    @property
    def rectangle(self) -> Rectangle:
        """The keys and columns that this table has."""

    @property
    def parts(self) -> Sequence[RowPart]:
        """The parts of its rows, ``weight`` first, and of their optimizer state."""

    @property
    def index(self) -> Index | None:
        """The index that finds the slot of a key; None if the slot is ``key - r0``."""

    @property
    def rows(self) -> Tensor:
        """The memory that the kernels read, indexed by slot."""

    @property
    def state(self) -> Sequence[Tensor]:
        """The optimizer state that the kernels change, by slot of the optimizer; indexed as ``rows``."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts by name, for state dicts: the memory, or a ``StreamedPart`` for each."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows in blocks of ascending keys.

        A block is valid until the table changes. The table must not change before the last block.

        Args:
            columns: the wanted columns; None for all.
            keys: the first wanted key, and the end; None for all.
        """

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace the rows, or the parts of rows, that the blocks hold. All others stay.

        Each block is copied before the next one is requested.
        """


class RowsSnapshot(Protocol):
    """The rows of a table as they were at one moment, while training goes on."""

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows as ``TableRows.stream`` would have done at that moment.

        A background checkpoint calls this in a forked process. There, memory that processes share goes on
        changing, and files that were open are closed.
        """

    def close(self) -> None:
        """Remove the memory or the files that kept the old rows."""


class SideTable(TableRows, Protocol):
    """A rectangle whose rows are not the memory of a parameter."""

    def snapshot(self) -> RowsSnapshot:
        """Return a snapshot of the rows."""


@runtime_checkable
class LazyRows(Protocol):
    """A table that makes its first rows when they are needed."""

    def begin_with(self, first: Callable[[Span], Iterable[RowBlock]]) -> None:
        """Take the first values of rows from a function of their keys."""


def weights_at(table: TableRows, keys: Tensor) -> Tensor:
    """Read ``weight`` of some keys, which the table must have: int64 [n], ascending."""
    if len(keys) == 0:
        return table.rows.new_empty(0, table.rows.shape[1])
    found = []
    for block in table.stream(keys=(int(keys[0]), int(keys[-1]) + 1)):
        here = block.keys
        if isinstance(here, range):
            first, end = torch.searchsorted(keys, torch.tensor([here.start, here.stop], device=keys.device))
            places = keys[first:end] - here.start
        else:
            places = torch.isin(here, keys).nonzero()[:, 0]
        found.append(block.parts["weight"][places])
    return torch.cat(found)
