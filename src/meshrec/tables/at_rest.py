"""The rows of a hashed table at one moment, in the order of their keys, for state dicts and checkpoints.

[Note: a hashed table at rest]

At rest, a table of n rows is a fixed table of n rows with one more part, ``ids``: position p holds the row of
the ID with the p-th key. Everything that knows fixed tables (split tensors, checkpoints, safetensors) thus
knows this one. The counts of IDs that wait for admission are a second list, ``waiting_ids`` and ``waiting``.
"""

import copy
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshrec.tables.row_log import RowLog
from meshrec.tables.streamed import streamed
from meshrec.tables.table import Rectangle, RowBlock, RowPart, RowsSnapshot, Span

IDS = "ids"


class Restful(Protocol):
    """A table that can be shown at rest."""

    parts: Sequence[RowPart]
    rectangle: Rectangle

    @property
    def rows(self) -> Tensor:
        """The memory that the kernels read."""

    @property
    def num_changes(self) -> int:
        """The number of times that IDs came or went."""

    @property
    def block_rows(self) -> int:
        """The number of rows of a block."""

    def places(self, columns: Span) -> Span:
        """Return where columns lie in the part ``weight``."""

    def columns_at(self, places: Span) -> Span:
        """Return the columns that lie in a part of ``weight``."""

    def listed(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the keys, ascending, and their slots."""

    def ids_of(self, keys: Tensor) -> Tensor:
        """Return the IDs of keys."""

    def gathered(
        self,
        slots: Tensor,
        columns: Span,
        names: Iterable[str] | None = None,
        frozen: RowLog | None = None,
    ) -> dict[str, Tensor]:
        """Return the parts of some rows, as they are now or as a snapshot of their file has them."""

    def freeze(self) -> RowLog | None:
        """Return a snapshot of the rows that are in a file; None if none are."""

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, or parts of them."""


class _Parts(Mapping[str, Tensor]):
    """The parts of some rows, read when they are asked for."""

    def __init__(
        self, table: Restful, keys: Tensor, slots: Tensor, columns: Span, frozen: RowLog | None
    ) -> None:
        self._table, self._keys, self._slots, self._columns = table, keys, slots, columns
        self._frozen = frozen

    def __getitem__(self, name: str) -> Tensor:
        if name == IDS:
            return self._table.ids_of(self._keys)
        columns = self._table.columns_at(self._columns)
        return self._table.gathered(self._slots, columns, [name], self._frozen)[name]

    def __iter__(self) -> Iterator[str]:
        return iter([part.name for part in self._table.parts] + [IDS])

    def __len__(self) -> int:
        return len(self._table.parts) + 1


class AtRest:
    """The rows of a table by position; see [Note: a hashed table at rest].

    It is valid until an ID comes or goes.

    Args:
        table: the table.
        first: the position of its first row in the whole table.
    """

    def __init__(self, table: Restful, first: int = 0) -> None:
        self._table, self._first = table, first
        self._keys, self._slots = table.listed()
        r = table.rectangle
        # Columns are those of the part: state dicts show codes as they lie in bytes.
        self.rectangle = Rectangle(r.table, first, first + len(self._keys), *table.places(r.columns))
        self.parts = [*table.parts, RowPart(IDS, torch.int64, True)]
        self.index = None
        self.rows, self.state = table.rows, ()
        self._changes = table.num_changes
        self._frozen: RowLog | None = None

    def is_of(self, table: object) -> bool:
        """Return whether it shows a table as it is now."""
        return table is self._table and self._changes == self._table.num_changes

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts by name, as tensors that stream."""
        return streamed(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Stream the rows by position."""
        r = self.rectangle
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        columns = columns or r.columns
        for begin in range(first, end, self._table.block_rows):
            here = range(begin, min(begin + self._table.block_rows, end))
            own = slice(here.start - self._first, here.stop - self._first)
            parts = _Parts(self._table, self._keys[own], self._slots[own], columns, self._frozen)
            yield RowBlock(here, columns, parts)

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write rows by position. The IDs stay as they are."""

        def by_key() -> Iterator[RowBlock]:
            for block in blocks:
                assert isinstance(block.keys, range)
                keys = self._keys[block.keys.start - self._first : block.keys.stop - self._first]
                parts = {name: values for name, values in block.parts.items() if name != IDS}
                if parts:
                    yield RowBlock(keys, self._table.columns_at(block.columns), parts)

        self._table.load(by_key())

    def snapshot(self) -> RowsSnapshot:
        """Return the rows as they are now. A fork keeps memory as it is, and a log what is in a file."""
        made = copy.copy(self)
        made._frozen = self._table.freeze()
        return made

    def close(self) -> None:
        """Close the snapshot."""
        if self._frozen is not None:
            self._frozen.close()


class RestingState(dict[str, Any]):
    """The state of a table whose rows come and go: ``"step"``, and what the slots hold when they are listed.

    Args:
        step: the number of the table's updates.
        at_rest: returns the slots as they are now.
    """

    def __init__(self, step: int, at_rest: Callable[[], Mapping[str, Tensor]]) -> None:
        super().__init__(step=step)
        self._at_rest = at_rest

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """Return the names of the slots, as of now."""
        self.update(self._at_rest())
        return super().keys()

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        """Return the slots, as of now."""
        self.update(self._at_rest())
        return super().items()
