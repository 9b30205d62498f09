"""View of a hashed table as a fixed table, for state dicts, checkpoints and safetensors files.

[Note: hashed tables in key order]

Sorted by key, a table with n rows looks like a fixed table with n rows and an additional part, ``ids``:
position p holds the row of the ID with the p-th smallest key. So split tensors, checkpoints and safetensors
files need no other format. The counts of IDs waiting for admission are a second list, ``waiting_ids`` and
``waiting``.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from meshrec.tables.cached.table import FileSnapshot
from meshrec.tables.hashed.row_store import RowStore
from meshrec.tables.hashed.slots import SlotStates
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span, TableSnapshot

IDS = "ids"
"""Name of the part with the IDs, for rows in key order."""


class _LazyParts(Mapping[str, Tensor]):
    """The parts of a row block by name. A part is read from the table when it is accessed.

    So a reader that needs one part, such as ``ids``, does not read the weights.
    """

    def __init__(
        self,
        store: RowStore,
        ids: Callable[[], Tensor],
        slots: Tensor,
        columns: Span,
        frozen: FileSnapshot | None,
    ) -> None:
        self._store, self._ids, self._slots, self._columns = store, ids, slots, columns
        self._frozen = frozen

    def __getitem__(self, name: str) -> Tensor:
        if name == IDS:
            return self._ids()
        columns = self._store.columns_at(self._columns)
        return self._store.gather(self._slots, columns, [name], self._frozen)[name]

    def __iter__(self) -> Iterator[str]:
        return iter([part.name for part in self._store.parts] + [IDS])

    def __len__(self) -> int:
        return len(self._store.parts) + 1


class KeyOrderedRows:
    """View of a hashed table as a fixed table with rows sorted by key.

    See [Note: hashed tables in key order]. The view lists keys and slots, and reads row values on demand. It
    is valid until an ID is admitted or evicted.

    Args:
        states: slot states of a table rectangle.
        store: rows of the rectangle.
        load: method ``HashedTable.load``.
        ids_of: method ``HashedTable.ids_of``.
        first: number of rows in the whole table before the first row in this rectangle.
    """

    is_growable = True

    def __init__(
        self,
        states: SlotStates,
        store: RowStore,
        load: Callable[[Iterable[RowBlock]], None],
        ids_of: Callable[[Tensor], Tensor],
        first: int = 0,
    ) -> None:
        self._states, self._store, self._load, self._ids_of, self._first = states, store, load, ids_of, first
        # Fixed when the view is made. ``is_of`` tells whether they still fit the table.
        self._keys, self._slots = states.live_keys()
        r = store.rectangle
        # Columns count elements of the part ``weight``: bytes for quantised rows, as in a state dict.
        self.rectangle = Rectangle(r.table, first, first + len(self._keys), *store.part_columns(r.columns))
        self.parts = [*store.parts, RowPart(IDS, torch.int64, True)]
        self.index = None
        self.rows, self.state = store.rows, ()
        self._changes = states.accounting.changes
        # Set only in the copy returned by ``snapshot``, until ``close``.
        self._frozen: FileSnapshot | None = None

    def is_of(self, states: SlotStates) -> bool:
        """Return whether this view was made from a table with these slot states and lists the live rows."""
        return states is self._states and self._changes == states.accounting.changes

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts by name, as tensors that read values on demand."""
        return streamed_parts(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows sorted by hashed key, in blocks. ``RowBlock.keys`` has positions in this order.

        Args:
            columns: columns of the part ``weight``; None: all.
            keys: interval of positions; None: all rows in the rectangle.
        """
        r = self.rectangle
        # Keys are positions here; ``_first`` converts them to indices in the local lists.
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        columns = columns or r.columns
        for start in range(first, end, self._store.block_rows):
            here = range(start, min(start + self._store.block_rows, end))
            positions = slice(here.start - self._first, here.stop - self._first)
            ids = partial(self._ids_of, self._keys[positions])
            parts = _LazyParts(self._store, ids, self._slots[positions], columns, self._frozen)
            yield RowBlock(here, columns, parts)

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write rows from blocks whose keys are positions. IDs do not change; a part ``ids`` is ignored."""

        def by_key() -> Iterator[RowBlock]:
            """Yield the blocks with hashed keys instead of positions."""
            for block in blocks:
                assert isinstance(block.keys, range)
                keys = self._keys[block.keys.start - self._first : block.keys.stop - self._first]
                parts = {name: values for name, values in block.parts.items() if name != IDS}
                # A block may have only IDs, which are not loaded.
                if parts:
                    yield RowBlock(keys, self._store.columns_at(block.columns), parts)

        self._load(by_key())

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows, to be read in a forked process.

        The fork keeps the memory as it is now, and a log keeps the rows in a file that change afterward.
        """
        # A shallow copy: the lists of keys and slots are shared, and do not change.
        snapshot = copy.copy(self)
        snapshot._frozen = self._store.freeze()
        return snapshot

    def close(self) -> None:
        """Free the log of old rows, if this object is a snapshot; see `snapshot`."""
        if self._frozen is not None:
            self._frozen.close()
