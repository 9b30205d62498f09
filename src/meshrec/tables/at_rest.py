"""The rows of a hashed table at one moment, in the order of their keys, for state dicts and checkpoints.

[Note: a hashed table at rest]

At rest, a table of n rows is a fixed table of n rows with one more part, ``ids``: position p holds the row of
the ID with the p-th key. Everything that knows fixed tables (split tensors, checkpoints, safetensors) thus
knows this one. The counts of IDs that wait for admission are a second list, ``waiting_ids`` and ``waiting``.
"""

from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from meshrec.tables.streamed import streamed
from meshrec.tables.table import Rectangle, RowBlock, RowPart, RowsSnapshot, Span

IDS = "ids"


class Restful(Protocol):
    """What a table at rest asks of the table."""

    parts: Sequence[RowPart]
    rectangle: Rectangle
    rows: Tensor

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

    def gathered(self, slots: Tensor, columns: Span, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Return the parts of some rows."""

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, or parts of them."""


class _Parts(Mapping[str, Tensor]):
    """The parts of some rows, read when they are asked for."""

    def __init__(self, table: Restful, keys: Tensor, slots: Tensor, columns: Span) -> None:
        self._table, self._keys, self._slots, self._columns = table, keys, slots, columns

    def __getitem__(self, name: str) -> Tensor:
        if name == IDS:
            return self._table.ids_of(self._keys)
        columns = self._table.columns_at(self._columns)
        return self._table.gathered(self._slots, columns, [name])[name]

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

    def is_of(self, table: object) -> bool:
        """Return whether it shows a table as it is now."""
        return table is self._table and self._changes == self._table.num_changes

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts by name, as tensors that stream."""
        return streamed(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows by position."""
        r = self.rectangle
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        columns = columns or r.columns
        for begin in range(first, end, self._table.block_rows):
            here = range(begin, min(begin + self._table.block_rows, end))
            own = slice(here.start - self._first, here.stop - self._first)
            yield RowBlock(here, columns, _Parts(self._table, self._keys[own], self._slots[own], columns))

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
        """Return itself: a fork keeps the memory as it is."""
        return self

    def close(self) -> None:
        """Do nothing."""


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
