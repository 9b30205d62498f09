"""Tables in which any int64 is a valid ID: rows in growing memory, found by a hash index.

[Note: the life of a row]

A slot is *free*, *pending* or *alive*. ``resolve`` assigns free slots to a batch's unseen IDs and writes
their initial rows there: these slots are pending, and pinned to the batch. At the batch's update
(``admission_eviction.py``) an admitted ID's slot becomes alive with its present row. A rejected ID's slot
stays pending until no batch in flight uses it, and then becomes free. A row evicted while a batch in flight
uses it becomes pending and restarts from its initial row. So no batch reads or updates another ID's row, and
the rows read by a batch do not depend on how far ahead it was resolved.

New keys get slots in sorted order, so column shards, here and on other ranks, have equal slots.

[Note: hashed tables in key order]

In key order, a table with n rows looks like a fixed table with n rows and an additional part, ``ids``:
position p holds the row of the ID with the p-th smallest key. So split tensors, checkpoints and safetensors
need nothing else. Waiting ID counts are a second list, ``waiting_ids`` and ``waiting``.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, final
from weakref import ReferenceType, WeakSet, ref

import torch
from torch import Tensor

from meshrec.ops.index import (
    AssignedSlots,
    Fills,
    HashIndex,
    UnassignedIds,
    assign_slots,
    free_slots,
    mix,
    release_slots,
    unique,
    unmix,
)
from meshrec.ops.initial_rows import uniform_rows, write_uniform_rows
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.cached.table import RowLog, RowPartStart, RowsInFlight
from meshrec.tables.dense.rows import DenseRows, QuantisedRows
from meshrec.tables.hashed.admission import AdmissionCounts, admission_counts_for, in_span
from meshrec.tables.hashed.file import CachedKeys, HashedFile
from meshrec.tables.hashed.keys import Hashed
from meshrec.tables.hashed.memory import GrowingRows, copy_with_owner
from meshrec.tables.index import Index, Pin, Resolved
from meshrec.tables.initial import draw_rows, seed_of_rows
from meshrec.tables.storage import ExternalRows, RowStorage
from meshrec.tables.streamed import streamed_parts
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span, Table, TableSnapshot

# Shape legend: N IDs or slots.

_NONE = torch.empty(0, dtype=torch.int64)
_BLOCK_BYTES = 1 << 23  # row bytes per stream block
ALIVE = "is_alive"
"""Part name in ``HashedTable.memory`` for the liveness flag, bool by slot."""
IDS = "ids"
"""Part name for the IDs, in key order."""
_SPARE_ROWS, _MAX_SLOTS = 1 << 24, (1 << 32) - 1  # slots for pending rows, and the index limit


class PinnedRows(Pin):
    """Pin on a batch's rows in a table."""

    def __init__(
        self,
        table: "HashedTable",
        parts: Sequence[Tensor],
        pending: Tensor,
        *,
        fresh: AssignedSlots | None = None,
    ) -> None:
        self.table, self.pending, self._fresh = table, pending, fresh
        self.changes = table.accounting.changes
        """The table's ``RowAccounting.changes`` when the batch was resolved."""
        self._parts = parts
        self.arriving: RowsInFlight | None = None
        """Pin on the same rows in a file's cache. Set by ``resolve``; None for rows in memory."""

    @property
    def slots(self) -> Tensor:
        """Slots used by the batch, int64; may repeat."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat(list(self._parts))

    def fresh(self) -> AssignedSlots | None:
        """Return this batch's new rows, if the batch has no other pending rows; else None."""
        return self._fresh if self._fresh is not None and self.pending is self._fresh.slots else None

    def release(self) -> None:
        """Release the slots. The table frees pending ones at its next lookup."""
        if not self.is_released:
            self.is_released = True
            self.table.in_flight.discard(self)
            self.table.released.append(self.pending)
            if self.arriving is not None:
                self.arriving.release()

    def __del__(self) -> None:
        # A batch dropped without an update still holds pending slots. Queue them for the table's next lookup:
        # garbage collection may run in any thread, so the table itself must not change here.
        if not self.is_released:
            self.table.released.append(self.pending)


@dataclass
class TableCounts:
    """ID counters since a table was created, on this rank.

    Attributes:
        live: IDs with a row now.
        new: admitted IDs.
        refused: new IDs not admitted, counted once per update.
        evicted: IDs whose rows were evicted.
        read: IDs looked up in training.
        hits: IDs looked up in training that had a row.
        early: estimated fraction of new IDs admitted early by a sketch.
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
    """A table's counters and change records."""

    report: TableCounts = field(default_factory=TableCounts)
    evicted: list[Tensor] = field(default_factory=list)
    """Evicted rows' keys, one tensor per eviction, for the delta publisher; recorded if ``is_watched``."""
    is_watched: bool = False
    changes: int = 0
    """Admission and eviction count so far."""
    loads: int = 0
    """``load`` calls so far."""
    key_ordered_ref: "ReferenceType[KeyOrderedRows] | None" = None
    """Rows in key order, which exist only while a caller holds them."""

    def note_reads(self, num_read: int, num_absent: int) -> None:
        """Count a batch's IDs, with ``num_absent`` IDs without a row."""
        self.report.read += num_read
        self.report.hits += num_read - num_absent


@final
class HashedTable:
    """Rows of a hashed table rectangle; see [Note: the life of a row].

    Args:
        rectangle: keys (see [Note: the keys of hashed tables]) and columns.
        storage: row format and table options.
        spec: optimizer; None: no state.
        device: the CPU.
    """

    is_growable = True

    def __init__(
        self,
        rectangle: Rectangle,
        storage: "HashedRows",
        spec: OptimizerSpec | None,
        device: torch.device | None,
    ) -> None:
        width = rectangle.c1 - rectangle.c0
        self.rectangle, self.storage, self.spec = rectangle, storage, spec
        slots = spec.state_slots() if spec is not None else ()
        self.parts: Sequence[RowPart] = [
            *storage.row_parts,
            *(RowPart(slot.name, torch.float32, slot.per_row) for slot in slots),
        ]
        # A row's tensors in memory, by name. With a file, weight and state move there.
        row = {"weight": torch.zeros(1, storage.columns(width), dtype=storage.dtype)}
        row |= dict(
            zip([slot.name for slot in slots], storage.new_state(spec, 1, width, device), strict=True)
        )
        # Pending rows come in addition to ``max_rows`` live rows.
        most = min(_MAX_SLOTS, 2 * storage.max_rows + _SPARE_ROWS)
        self.file: HashedFile | None = None
        """Weights and optimizer state, if they are in a file; see [Note: hashed rows in a file]."""
        if storage.file is not None:
            starts = [
                RowPartStart(part, float(row.pop(part.name).max())) for part in self.parts if part.name in row
            ]
            self.file = HashedFile(
                rectangle, starts, storage.file, name=storage.name, dim=storage.dim, max_rows=most
            )
        elif storage.dtype.itemsize == 2:
            row["key"] = torch.zeros(1, dtype=torch.int64)
        row |= {part.name: torch.zeros(1, dtype=part.dtype) for part in storage.policy_parts}
        row |= {ALIVE: torch.zeros(1, dtype=torch.bool), "pins": torch.zeros(1, dtype=torch.int32)}
        label = f"table {storage.name!r}"
        self.slots = HashIndex(most, seed=storage.keys.seed, name=label)
        self._grown = GrowingRows(
            list(row.values()), max_rows=most, name=label, other_regions=self.slots.growing_regions
        )
        self.memory: dict[str, Tensor] = dict(zip(row, self._grown.tensors, strict=True))
        """In-memory parts by name, indexed by slot. ``ALIVE`` tells which slots are alive, ``pins`` how many
        batches in flight use a pending slot. 16-bit rows have a ``key``, by which they are rounded.
        """
        self.admission_counts = self._new_admission_counts()
        # Batches between ``resolve`` and ``release``. Weak, so a dropped batch leaves by itself.
        self.in_flight: WeakSet[PinnedRows] = WeakSet()
        # Pending slots from finished batches, until the next lookup frees them.
        self.released: deque[Tensor] = deque()
        self.accounting = RowAccounting()
        copy_with_owner(self, self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_in_memory()
        # A block's keys may be a view into all keys, which a pickle would repeat.
        blocks = [
            block._replace(keys=block.keys.clone() if isinstance(block.keys, Tensor) else block.keys)
            for block in self.stream()
        ]
        return _rebuild, ((self.rectangle, self.storage, self.spec, None), blocks, self.report)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._check_in_memory()
        copied = _rebuild((self.rectangle, self.storage, self.spec, None), self.stream(), self.report)
        memo[id(self)] = copied
        return copied

    def _check_in_memory(self) -> None:
        """Raise ValueError if the rows are in a file, which is not copied with the model."""
        if self.file is not None:
            self.file.table.__reduce__()

    @property
    def rows(self) -> Tensor:
        """Memory read by kernels: all rows, or a file's cache."""
        return self.memory["weight"] if self.file is None else self.file.table.rows

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state, one tensor per state slot."""
        if self.file is not None:
            return self.file.table.state
        return [self.memory[part.name] for part in self.parts[len(self.storage.row_parts) :]]

    @property
    def slot_keys(self) -> Tensor | None:
        """Key per slot, for 16-bit rows in memory; None otherwise."""
        return self.memory.get("key")

    @property
    def index(self) -> Index:
        """The table itself; or an index into a file's cache."""
        return self if self.file is None else CachedKeys(self.resolve, self.file.slot_keys)

    @property
    def num_alive(self) -> int:
        """Row count."""
        return self.accounting.report.live

    @property
    def num_changes(self) -> int:
        """Admission and eviction count so far."""
        return self.accounting.changes

    @property
    def report(self) -> TableCounts:
        """ID counters since the table was created, on this rank."""
        self.accounting.report.early = self.admission_counts.early()
        return self.accounting.report

    # ---- slots ------------------------------------------------------------------------------------

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return the slot per key. New keys get pending slots with initial rows."""
        self.release()
        slots = self.slots.find(keys)
        fresh, num_absent = None, int((slots < 0).sum())
        if num_absent:
            fresh = assign_slots([UnassignedIds(self.slots, keys.contiguous(), slots, num_absent)])[0]
        with Fills() as fills:
            pin = self.pin_slots([slots], train=train, fills=fills, fresh=fresh, num_absent=num_absent)
        if self.file is None:
            return Resolved(slots, pin)
        cached, pin.arriving = self.file.resolve(slots, keys, train=train)
        return Resolved(cached, pin)

    def pin_slots(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: AssignedSlots | None = None,
        num_absent: int = 0,
    ) -> PinnedRows:
        """Pin slots for a batch, and write initial rows to new ones.

        Args:
            parts: slots used by the batch.
            train: whether the rows will be updated.
            fills: queue for the writes.
            fresh: keys just assigned slots.
            num_absent: entries in ``parts`` for such keys.
        """
        if fresh is not None:
            self._write_new_rows(fresh.slots, fresh.ids, fills)
        if train and self.storage.is_trainable:
            self.accounting.note_reads(sum(map(len, parts)), num_absent)
        pending, num_pending = _NONE, self.slots.num_live - self.num_alive
        if fresh is not None and len(fresh.slots) == num_pending:
            pending = fresh.slots
            fills.add(self.memory["pins"], pending, 1)
        elif num_pending:
            # Older batches also have pending rows, so read the flags, which the fills may still change.
            fills.run()
            fresh = None
            slots = torch.cat(list(parts))
            pending = unique(slots[~self.memory[ALIVE][slots]])[0]
            self.memory["pins"][pending] += 1
        pin = PinnedRows(self, parts, pending, fresh=fresh)
        self.in_flight.add(pin)
        return pin

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the row keys at these slots."""
        return self.slots.ids_of(slots)

    def ids_of(self, keys: Tensor) -> Tensor:
        """Return the IDs for these keys. Inverts the ID mix."""
        return unmix(keys, self.storage.keys.seed)

    def release(self, *more_tables: "HashedTable") -> None:
        """Free pending slots no longer used by any batch in flight, in this table and others."""
        release_rows((self, *more_tables))

    def mark_alive(self, slots: Tensor, fills: Fills) -> None:
        """Make pending rows alive, with their present values.

        Args:
            slots: pending slots, int64 [N].
            fills: queue for the writes.
        """
        if len(slots):
            fills.add(self.memory[ALIVE], slots, 1)
            self.accounting.report.live += len(slots)
            self.accounting.changes += 1

    def reset(self, slots: Tensor, fills: Fills) -> None:
        """Reset pending rows to their initial values.

        Args:
            slots: pending slots, int64 [N].
            fills: queue for the writes.
        """
        self._write_new_rows(slots, self.keys_of(slots), fills)

    def _write_new_rows(self, slots: Tensor, keys: Tensor, fills: Fills) -> None:
        """Write initial rows and optimizer state to slots. Grows the memory if necessary."""
        if len(slots) == 0:
            return
        # A free or unused slot is not alive and has no pins.
        unchanged = [i for i, name in enumerate(self.memory) if name in ("weight", "key", "pins", ALIVE)]
        num_written = int("weight" in self.memory)
        self._grown.start_rows(
            slots, self.slots.num_slots, fills, num_written=num_written, unchanged=unchanged
        )
        ids, columns = self.ids_of(keys), self.rectangle.columns
        if self.file is None:
            self.storage.write_new_rows(self.memory["weight"].data, slots, ids, columns)
        else:
            self.file.start_rows(slots, self.storage.new_rows(ids, columns))
        if self.slot_keys is not None:
            self.slot_keys.data.index_copy_(0, slots, keys)

    # ---- streams ----------------------------------------------------------------------------------

    def live_keys(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return live rows' keys, ascending, and slots: both int64 [n].

        Args:
            keys: key interval; None: all keys.
        """
        all_keys, slots = self.slots.items()
        selected = self.memory[ALIVE][slots] if self.slots.num_live > self.num_alive else None
        if keys is not None:
            inside = in_span(all_keys, keys)
            selected = inside if selected is None else inside & selected
        return (all_keys, slots) if selected is None else (all_keys[selected], slots[selected])

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts in key order, by name; see [Note: hashed tables in key order]."""
        return self.key_ordered().tensors()

    def key_ordered(self, first: int = 0) -> "KeyOrderedRows":
        """Return the present rows in key order.

        Args:
            first: this rectangle's first row position in the whole table.

        While nothing changes and a caller holds the result, further calls return the same object.
        """
        rows = self.accounting.key_ordered_ref() if self.accounting.key_ordered_ref is not None else None
        if rows is None or rows.rectangle.r0 != first or not rows.is_of(self):
            rows = KeyOrderedRows(self, first)
            # Weak, so the listing lives only as long as a caller holds it.
            self.accounting.key_ordered_ref = ref(rows)
        return rows

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the live rows in blocks, followed by waiting ID counts."""
        live_keys, slots = self.live_keys(keys)
        columns = columns or self.rectangle.columns
        step = self.block_rows
        for first in range(0, len(live_keys), step):
            here = slots[first : first + step]
            yield RowBlock(live_keys[first : first + step], columns, self.gather_parts(here, columns))
        for waiting, counts in self.admission_counts.stream(keys):
            for first in range(0, len(waiting), 1 << 18):
                piece = slice(first, first + (1 << 18))
                yield RowBlock(waiting[piece], columns, {"waiting": counts[piece]})

    def _new_admission_counts(self) -> AdmissionCounts:
        """Create empty counters for waiting IDs."""
        span, storage = (self.rectangle.r0, self.rectangle.r1), self.storage
        keys = storage.keys if storage.is_trainable else replace(storage.keys, admit=None)
        return admission_counts_for(keys, storage.max_rows, span, storage.name)

    def part_columns(self, columns: Span) -> Span:
        """Return where table columns are in the whole table's ``weight`` part: bytes, for quantised rows."""
        return self.storage.part_column(columns[0]), self.storage.part_column(columns[1])

    def columns_at(self, positions: Span) -> Span:
        """Return the table columns at an interval in the ``weight`` part. Inverts ``part_columns``."""
        if positions == self.part_columns(self.rectangle.columns):
            return self.rectangle.columns
        bits = self.storage.bits or 8
        return positions[0] * 8 // bits, positions[1] * 8 // bits

    @property
    def block_rows(self) -> int:
        """Rows per stream block."""
        return max(1, _BLOCK_BYTES // max(1, self.rows[:1].nbytes))

    def gather_parts(
        self,
        slots: Tensor,
        columns: Span,
        names: Iterable[str] | None = None,
        frozen: RowLog | None = None,
    ) -> dict[str, Tensor]:
        """Return the rows at some slots, by part name.

        Args:
            slots: int64 [N].
            columns: table columns to return.
            names: parts to return; None: all.
            frozen: file snapshot to read from; None: present rows.
        """
        r, storage = self.rectangle, self.storage
        names = [part.name for part in self.parts] if names is None else list(names)
        if storage.bits:
            rows = self.memory["weight"].detach()[slots]
            coded = zip(storage.row_parts, storage.parts(rows, r.c1 - r.c0), strict=True)
            parts = {part.name: values for part, values in coded}
        else:
            parts = {name: self.memory[name].detach()[slots] for name in names if name in self.memory}
        if self.file is not None and len(parts) < len(names):
            parts |= self.file.read(slots, frozen)
        first, end = (storage.part_column(column - r.c0) for column in columns)
        return {name: parts[name] if parts[name].dim() == 1 else parts[name][:, first:end] for name in names}

    def freeze(self) -> RowLog | None:
        """Snapshot the rows in the file. None for rows in memory, which a fork freezes."""
        return None if self.file is None else self.file.table.snapshot()

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write rows, or row parts, from the blocks. Keys without a row get one.

        Raises:
            ValueError: there would be too many rows.
        """
        self.release()
        self.accounting.loads += 1
        for block in blocks:
            keys = block.keys if isinstance(block.keys, Tensor) else torch.tensor(list(block.keys))
            if "waiting" in block.parts:
                self.admission_counts.load(keys, block.parts["waiting"])
                continue
            slots = self.slots.find(keys)
            absent = slots < 0
            if bool(absent.any()):
                slots[absent] = self.slots.insert(keys[absent])
            self._grown.grow(1 + int(slots.max()) if len(slots) else 0)
            new = ~self.memory[ALIVE][slots]
            with Fills() as fills:
                self._write_new_rows(slots[new], keys[new], fills)
                self.mark_alive(slots[new], fills)
            if self.file is not None:
                self.file.load(slots, block.columns, block.parts)
            self._write(slots, block)

    def _write(self, slots: Tensor, block: RowBlock) -> None:
        """Write a block's in-memory parts."""
        r, storage = self.rectangle, self.storage
        targets = {name: tensor.detach() for name, tensor in self.memory.items()}
        if storage.bits:
            views = storage.parts(targets["weight"], r.c1 - r.c0)
            targets = {part.name: view for part, view in zip(storage.row_parts, views, strict=True)}
        first, end = (storage.part_column(column - r.c0) for column in block.columns)
        for name, values in block.parts.items():
            if (target := targets.get(name)) is not None:
                local = target if target.dim() == 1 else target[:, first:end]
                local[slots] = values.to(target.dtype)

    def reserve(self, keys: Tensor) -> None:
        """Assign slots to keys without one, ascending. Rows must be loaded later."""
        self.release()
        self.slots.insert(keys)

    def clear(self) -> None:
        """Remove all rows and all waiting ID counts."""
        evict_rows([(self, self.live_keys()[1], ())])
        self.admission_counts = self._new_admission_counts()

    def items(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return live rows' IDs, and copies of the rows.

        Returns:
            IDs in key order, int64 [n]; rows, [n, columns]; optimizer state and policy parts, by name.
        """
        keys, slots = self.live_keys()
        parts = self.gather_parts(slots, self.rectangle.columns)
        return self.ids_of(keys), parts.pop("weight"), parts

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows, for the forked process writing a checkpoint."""
        return self.key_ordered().snapshot()


class _Parts(Mapping[str, Tensor]):
    """Row parts by name, read from the table on access."""

    def __init__(
        self, table: HashedTable, keys: Tensor, slots: Tensor, columns: Span, frozen: RowLog | None
    ) -> None:
        self._table, self._keys, self._slots, self._columns = table, keys, slots, columns
        self._frozen = frozen

    def __getitem__(self, name: str) -> Tensor:
        if name == IDS:
            return self._table.ids_of(self._keys)
        columns = self._table.columns_at(self._columns)
        return self._table.gather_parts(self._slots, columns, [name], self._frozen)[name]

    def __iter__(self) -> Iterator[str]:
        return iter([part.name for part in self._table.parts] + [IDS])

    def __len__(self) -> int:
        return len(self._table.parts) + 1


class KeyOrderedRows:
    """A table's rows by position in key order; see [Note: hashed tables in key order].

    Valid until an ID is admitted or evicted.

    Args:
        table: table.
        first: the first row's position in the whole table.
    """

    is_growable = True

    def __init__(self, table: HashedTable, first: int = 0) -> None:
        self._table, self._first = table, first
        self._keys, self._slots = table.live_keys()
        r = table.rectangle
        # Columns refer to the part: state dicts show codes as they lie in bytes.
        self.rectangle = Rectangle(r.table, first, first + len(self._keys), *table.part_columns(r.columns))
        self.parts = [*table.parts, RowPart(IDS, torch.int64, True)]
        self.index = None
        self.rows, self.state = table.rows, ()
        self._changes = table.num_changes
        self._frozen: RowLog | None = None

    def is_of(self, table: object) -> bool:
        """Return whether this object still shows the present rows in ``table``."""
        return table is self._table and self._changes == self._table.num_changes

    def tensors(self) -> dict[str, Tensor]:
        """Return the parts by name, as tensors streaming values."""
        return streamed_parts(self)

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows in blocks, by position."""
        r = self.rectangle
        first, end = (r.r0, r.r1) if keys is None else (max(keys[0], r.r0), min(keys[1], r.r1))
        columns = columns or r.columns
        for start in range(first, end, self._table.block_rows):
            here = range(start, min(start + self._table.block_rows, end))
            positions = slice(here.start - self._first, here.stop - self._first)
            parts = _Parts(self._table, self._keys[positions], self._slots[positions], columns, self._frozen)
            yield RowBlock(here, columns, parts)

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write rows by position. IDs do not change."""

        def by_key() -> Iterator[RowBlock]:
            for block in blocks:
                assert isinstance(block.keys, range)
                keys = self._keys[block.keys.start - self._first : block.keys.stop - self._first]
                parts = {name: values for name, values in block.parts.items() if name != IDS}
                if parts:
                    yield RowBlock(keys, self._table.columns_at(block.columns), parts)

        self._table.load(by_key())

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows. A fork freezes memory, and a log freezes a file."""
        snapshot = copy.copy(self)
        snapshot._frozen = self._table.freeze()
        return snapshot

    def close(self) -> None:
        """Close the snapshot."""
        if self._frozen is not None:
            self._frozen.close()


@dataclass(frozen=True)
class HashedRows(ExternalRows):
    """Storage for hashed tables: floating-point or quantised rows, found by a hash index.

    Initial rows depend on (seed, table, ID); quantised initial rows are rounded by minimum and
    maximum.

    Args:
        dtype: row dtype; uint8 for codes.
        keys: table limits and policies.
        name: table name.
        dim: whole-row width.
        max_rows: row limit.
        bounds: range for uniform initial values.
        init_fn: draws initial rows instead, one row ``[1, dim]`` at a time, from torch's default generator.
        bits: bits per code; 0 for floating-point values.
        file: file options for weights and optimizer state; None: in memory.
        seed_name: name for seeding initial rows; None: ``name``.
    """

    dtype: torch.dtype
    keys: Hashed
    name: str
    dim: int
    max_rows: int
    bounds: tuple[float, float]
    init_fn: Callable[[Tensor], object] | None = field(default=None, compare=False)
    bits: int = 0
    file: FileRows | None = None
    seed_name: str | None = None
    is_growable = True
    collects_gradients = True

    @property
    def may_fail(self) -> bool:
        """Whether rows are in a file."""
        return self.file is not None

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the eviction policy reads rows."""
        return self.keys.evict is not None and self.keys.evict.needs_rows

    @property
    def form(self) -> DenseRows | QuantisedRows:
        """Storage for the row values themselves, without keys."""
        return QuantisedRows(self.bits) if self.bits else DenseRows(self.dtype)

    @property
    def is_trainable(self) -> bool:
        """Whether the rows can be trained: they are floating-point values."""
        return self.bits == 0

    @property
    def policy_parts(self) -> tuple[RowPart, ...]:
        """Values stored by the eviction policy per row."""
        policy = self.keys.evict
        return policy.parts if policy is not None and self.is_trainable else ()

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Row value parts, followed by eviction policy parts."""
        return (*self.form.row_parts, *self.policy_parts)

    @property
    def counts_waiting_ids(self) -> bool:
        """Whether waiting IDs' occurrences are counted."""
        return self.keys.counts_waiting_ids and self.is_trainable

    def columns(self, dim: int) -> int:
        return self.form.columns(dim)

    def part_column(self, column: int) -> int:
        return self.form.part_column(column)

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Return parameter memory without rows: hashed table rows are outside the parameter.

        Args:
            num_rows: unused.
            columns: elements per row.
            device: memory device.
        """
        return torch.empty((0, columns), dtype=self.dtype, device=device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None: a ``HashedTable`` is also the index."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return row bytes, including eviction policy values."""
        policy_bytes = sum(part.dtype.itemsize for part in self.policy_parts)
        return self.form.num_bytes(num_rows, dim) + num_rows * policy_bytes

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create initial optimizer state; see ``DenseRows.new_state``.

        Args:
            spec: optimizer; None: no state.
            num_rows: row count.
            dim: values per row.
            device: memory device.
        """
        return self.form.new_state(spec, num_rows, dim, device)

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        return self.form.parts(rows, dim)

    def encode(self, values: Tensor) -> Tensor:
        return self.form.encode(values)

    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> HashedTable:
        """Create a rectangle's table.

        Args:
            rectangle: keys and columns.
            spec: optimizer; None: no state.
            device: module device, CPU or ``meta``.

        Raises:
            ValueError: the device is a GPU.
        """
        if device is not None and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"table {self.name!r} has hashed keys, whose index is on the CPU; it cannot be on {device}. "
                "Put the module on the CPU, or give the table num_embeddings."
            )
        return HashedTable(rectangle, self, spec, torch.device("cpu"))

    @property
    def row_seed(self) -> int:
        """Seed for initial rows, from the table's seed and name."""
        return seed_of_rows(self.seed_name or self.name, self.keys.seed)

    def write_new_rows(self, rows: Tensor, slots: Tensor, ids: Tensor, columns: Span) -> None:
        """Write initial rows for IDs to slots.

        Args:
            rows: memory indexed by slot.
            slots: int64 [N].
            ids: int64 [N].
            columns: table columns in ``rows``.
        """
        if self.dtype == torch.float32 and self.init_fn is None:
            low, high = self.bounds
            write_uniform_rows(rows, slots, ids, seed=self.row_seed, low=low, high=high, column=columns[0])
            return
        rows.index_copy_(0, slots, self.new_rows(ids, columns))

    def new_rows(self, ids: Tensor, columns: Span) -> Tensor:
        """Return initial rows for IDs in memory format. Codes have the whole row's scale and bias."""
        if not self.bits or columns == (0, self.dim):
            return self.encode(self.initial_values(ids, columns))
        rows = self.encode(self.initial_values(ids))
        codes = rows.new_zeros(len(rows), self.columns(columns[1] - columns[0]))
        first, end = map(self.part_column, columns)
        parts = zip(self.parts(codes, columns[1] - columns[0]), self.parts(rows, self.dim), strict=True)
        for target, part in parts:
            target.copy_(part if part.dim() == 1 else part[:, first:end])
        return codes

    def initial_values(self, ids: Tensor, columns: Span | None = None) -> Tensor:
        """Return initial row values for IDs, fp32 [N, columns]."""
        first, end = columns or (0, self.dim)
        if self.init_fn is None:
            low, high = self.bounds
            return uniform_rows(ids, seed=self.row_seed, low=low, high=high, columns=(first, end))
        return draw_rows(mix(ids, self.row_seed), self.init_fn, self.dim, (first, end))


def is_growable(storage: RowStorage) -> TypeGuard[HashedRows]:
    """Return whether a storage's tables are hashed."""
    return storage.is_growable


def has_growable_rows(table: Table) -> TypeGuard[HashedTable]:
    """Return whether a table is hashed."""
    return table.is_growable


def release_rows(tables: Iterable[HashedTable]) -> None:
    """Free pending table slots not used by any batch in flight."""
    releasing = [(table, ended) for table in tables if table.released and len(ended := _pop_released(table))]
    if releasing:
        free, counts = release_slots(
            [table.memory["pins"] for table, _ in releasing],
            [table.memory[ALIVE] for table, _ in releasing],
            [slots for _, slots in releasing],
        )
        if len(free):
            listed = zip(releasing, free.split(counts.tolist()), strict=True)
            _free_slots([(table, table_slots) for (table, _), table_slots in listed if len(table_slots)])


def evict_rows(going: Iterable[tuple[HashedTable, Tensor, Collection[object]]]) -> None:
    """Evict rows. A row used by a batch in flight becomes pending, with initial values.

    Args:
        going: per table: the table, the slots to evict, and pins of batches using none of these
            slots.
    """
    with Fills() as fills:
        left = [(eviction[0], *_mark_evicted(*eviction, fills)) for eviction in going if len(eviction[1])]
    freed = _free_slots([(table, slots) for table, _, slots in left])
    for (table, held, _), keys in zip(left, freed, strict=True):
        if table.accounting.is_watched:
            table.accounting.evicted.append(torch.cat([table.keys_of(held), keys]))


def _pop_released(table: HashedTable) -> Tensor:
    """Return finished batches' pending slots; a slot used by two batches occurs twice."""
    parts = [_NONE]
    while table.released:
        parts.append(table.released.popleft())
    parts = [slots for slots in parts if len(slots)]
    return parts[0] if len(parts) == 1 else torch.cat([_NONE, *parts])


def _mark_evicted(
    table: HashedTable, slots: Tensor, updating: Collection[object], fills: Fills
) -> tuple[Tensor, Tensor]:
    """Mark rows as evicted. Returns the slots used by batches in flight, and the slots to free."""
    fills.add(table.memory[ALIVE], slots, 0)
    table.accounting.report.live -= len(slots)
    table.accounting.changes += 1
    if table.file is not None:
        table.file.table.log(slots.sort().values)
    # The updating batches' own rows are never victims, so only other batches may pin these.
    other_pins = [pin for pin in table.in_flight if pin not in updating]
    if not other_pins and not table.released:
        return _NONE, slots
    pins = table.memory["pins"]
    is_victim = torch.zeros_like(table.memory[ALIVE]).index_fill_(0, slots, True)
    for pin in other_pins:
        held = unique(pin.slots[is_victim[pin.slots]])[0]
        pin.pending = torch.cat([pin.pending, held])
        pins[held] += 1
    is_held = pins.index_select(0, slots) > 0
    if not bool(is_held.any()):
        return _NONE, slots
    held = slots[is_held]
    table.reset(held, fills)
    return held, slots[~is_held]


def _free_slots(rows: Sequence[tuple[HashedTable, Tensor]]) -> list[Tensor]:
    """Remove the IDs at some slots from the indexes, and return the keys, per table."""
    keys = free_slots([(table.slots, slots) for table, slots in rows])
    for table, slots in rows:
        if table.file is not None and len(slots):
            table.file.table.drop(slots.sort().values)
    return keys


def _rebuild(arguments: tuple[Any, ...], blocks: Iterable[RowBlock], report: TableCounts) -> HashedTable:
    """Create a table from the pickled form: constructor arguments, rows, and counters."""
    table = HashedTable(*arguments)
    table.load(blocks)
    table.accounting.report = replace(report)
    return table
