"""Tables in which any int64 is a valid ID: rows in growing memory, found by a hash index.

[Note: the life of a row]

A *slot* is a row position in the table's memory. It is *free*, *pending* or *alive*. ``resolve`` looks up a
batch: it assigns free slots to the IDs that have none, and writes their initial rows there. These slots are
pending, and pinned to the batch. At the batch's update (``admission_eviction.py``) the slot of an admitted ID
becomes alive with the present row. The slot of a refused ID stays pending until no batch in flight (looked up
and not yet released) uses it, and then becomes free. If a row is evicted while a batch in flight uses it, the
slot becomes pending and gets the initial row again. So no batch reads or updates the row of another ID, and
the rows a batch reads do not depend on how early it was looked up.

New keys get slots in sorted order, so column shards, here and on other ranks, have equal slots.

[Note: hashed tables in key order]

Sorted by key, a table with n rows looks like a fixed table with n rows and an additional part, ``ids``:
position p holds the row of the ID with the p-th smallest key. So split tensors, checkpoints and safetensors
files need no other format. The counts of IDs waiting for admission are a second list, ``waiting_ids`` and
``waiting``.
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
from meshrec.tables.cached.cache import RowsInFlight
from meshrec.tables.cached.regions import InitializedPart
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.cached.table import FileSnapshot
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
_BLOCK_BYTES = 1 << 23  # weight bytes per block in ``stream``
ALIVE = "is_alive"
"""Name of the liveness flags in ``HashedTable.memory``, bool by slot."""
IDS = "ids"
"""Name of the part with the IDs, for rows in key order."""
# Spare slots for pending rows in small tables, and the limit of the index, which stores slots in 32 bits.
_SPARE_ROWS, _MAX_SLOTS = 1 << 24, (1 << 32) - 1


class PinnedRows(Pin):
    """Keeps the slots of a batch in a hashed table from being given to other IDs. Created by ``pin_slots``.

    Args:
        table: the table.
        parts: slots used by the batch, in one or more tensors; may repeat.
        pending: distinct slots used by the batch that were pending when it was resolved.
        fresh: slots first assigned for this batch, with their keys and counts; None if there are none, or if
            the batch uses other pending slots, too.
    """

    def __init__(
        self,
        table: "HashedTable",
        parts: Sequence[Tensor],
        pending: Tensor,
        *,
        fresh: AssignedSlots | None = None,
    ) -> None:
        # ``pending`` grows if rows used by the batch are evicted before its update; see ``_mark_evicted``.
        self.table, self.pending, self._fresh = table, pending, fresh
        self.changes_at_lookup = table.accounting.changes
        """``RowAccounting.changes`` when the batch was looked up: tells whether rows changed state since."""
        self._parts = parts
        self.arriving: RowsInFlight | None = None
        """Pin on the same rows in a file's cache. Set by ``resolve``; None for tables in memory."""

    @property
    def slots(self) -> Tensor:
        """Slots used by the batch, int64; may repeat."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat(list(self._parts))

    def fresh(self) -> AssignedSlots | None:
        """Return the slots first assigned for this batch.

        None if there are none, or if the batch uses other pending slots, too.
        """
        # ``_mark_evicted`` replaces ``pending`` when a row becomes pending, hence the identity check.
        return self._fresh if self._fresh is not None and self.pending is self._fresh.slots else None

    def release(self) -> None:
        """Release the slots. At its next lookup, the table frees the slots which are still pending."""
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
    key_ordered_ref: "ReferenceType[KeyOrderedRows] | None" = None
    """Weak reference to the last result of ``HashedTable.key_ordered``."""

    def note_reads(self, num_read: int, num_absent: int) -> None:
        """Count the IDs in a training lookup.

        Args:
            num_read: number of IDs, including repeated ones.
            num_absent: how many of these had no slot.
        """
        self.report.read += num_read
        self.report.hits += num_read - num_absent


@final
class HashedTable:
    """The rows of a hashed table in a rectangle, found by ID; see [Note: the life of a row].

    A rectangle is a key interval times a column interval. The key of an ID is its seeded hash, see
    [Note: the keys of hashed tables].

    Args:
        rectangle: key and column intervals on this rank.
        storage: row format and table options.
        spec: optimizer, which tells the state per row; None: no optimizer state.
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
        # ``slots`` are optimizer state slots here, not row positions.
        slots = spec.state_slots() if spec is not None else ()
        self.parts: Sequence[RowPart] = [
            *storage.row_parts,
            *(RowPart(slot.name, torch.float32, slot.per_row) for slot in slots),
        ]
        # The tensors of a single row, by name, with initial values. With a file, weight and state move there.
        row = {"weight": torch.zeros(1, storage.columns(width), dtype=storage.dtype)}
        row |= dict(
            zip([slot.name for slot in slots], storage.new_state(spec, 1, width, device), strict=True)
        )
        # Pending rows need slots in addition to the ``max_rows`` live rows.
        # Mostly address space, so a generous limit is cheap, see [Note: memory that grows].
        max_slots = min(_MAX_SLOTS, 2 * storage.max_rows + _SPARE_ROWS)
        self.file: HashedFile | None = None
        """File with weights and optimizer state; None if they are in memory. See
        [Note: hashed rows in a file]."""
        if storage.file is not None:
            initialized_parts = [
                InitializedPart(part, float(row.pop(part.name).max()))
                for part in self.parts
                if part.name in row
            ]
            self.file = HashedFile(
                rectangle,
                initialized_parts,
                storage.file,
                name=storage.name,
                dim=storage.dim,
                max_rows=max_slots,
            )
        elif storage.dtype.itemsize == 2:
            # Stochastic rounding is seeded by key, because slots differ between plans.
            row["key"] = torch.zeros(1, dtype=torch.int64)
        row |= {part.name: torch.zeros(1, dtype=part.dtype) for part in storage.policy_parts}
        row |= {ALIVE: torch.zeros(1, dtype=torch.bool), "pins": torch.zeros(1, dtype=torch.int32)}
        label = f"table {storage.name!r}"
        # Maps keys to slots, for live and pending rows.
        self.key_index = HashIndex(max_slots, seed=storage.keys.seed, name=label)
        self._growing_rows = GrowingRows(
            list(row.values()), max_rows=max_slots, name=label, other_regions=self.key_index.growing_regions
        )
        # The tensors have the order of ``row``, in which ``weight`` is first; ``_write_new_rows`` relies on
        # it.
        self.memory: dict[str, Tensor] = dict(zip(row, self._growing_rows.tensors, strict=True))
        """Tensors indexed by slot, by name: weights and optimizer state unless they are in a file, policy
        parts, ``ALIVE`` (whether a slot is alive), ``pins`` (how many batches in flight use a pending slot),
        and for 16-bit rows ``key``, which seeds their stochastic rounding. The tensor objects never change;
        see [Note: memory that grows].
        """
        # Replaced by ``clear``.
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
        # From streamed rows instead of the tensors, so reserved memory is not copied.
        copied = _rebuild((self.rectangle, self.storage, self.spec, None), self.stream(), self.report)
        memo[id(self)] = copied
        return copied

    def _check_in_memory(self) -> None:
        """Raise ValueError if the rows are in a file, which is not copied with the model."""
        # The file table raises the error.
        if self.file is not None:
            self.file.table.__reduce__()

    @property
    def rows(self) -> Tensor:
        """Weight memory that kernels read: all rows by slot, or with a file only the cached rows."""
        return self.memory["weight"] if self.file is None else self.file.table.rows

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state that kernels change, one tensor per state name, indexed like ``rows``."""
        if self.file is not None:
            return self.file.table.state
        # ``parts`` lists row parts first, then optimizer state.
        return [self.memory[part.name] for part in self.parts[len(self.storage.row_parts) :]]

    @property
    def slot_keys(self) -> Tensor | None:
        """Key per slot, int64, for 16-bit rows in memory, whose stochastic rounding depends on the key.

        None for other rows.
        """
        return self.memory.get("key")

    @property
    def index(self) -> Index:
        """Index from hashed keys to slots in ``rows``.

        If the rows are in memory, it is the table itself. If they are in a file, it maps to cache slots.
        """
        return self if self.file is None else CachedKeys(self.resolve, self.file.slot_keys)

    @property
    def num_alive(self) -> int:
        """Number of live rows in this rectangle. Pending rows do not count."""
        return self.accounting.report.live

    @property
    def num_changes(self) -> int:
        """Number of admissions, loads and evictions so far; see ``RowAccounting.changes``."""
        return self.accounting.changes

    @property
    def report(self) -> TableCounts:
        """Numbers of IDs looked up, admitted and evicted since the table was created, on this rank."""
        # Computed on request, because it reads the whole sketch.
        self.accounting.report.early = self.admission_counts.early()
        return self.accounting.report

    # ---- slots ------------------------------------------------------------------------------------

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return the slot per key, and pin the slots. A key without a slot gets one, with the initial row.

        With a file, the returned slots are positions in the cache, and the rows may still be arriving there.

        Args:
            keys: int64 [N], keys in the rectangle; may repeat.
            train: whether the rows will be updated.
        """
        # Free the finished batches' slots first, so they can be assigned again.
        self.release()
        slots = self.key_index.find(keys)
        fresh, num_absent = None, int((slots < 0).sum())
        # Also in evaluation: a new ID reads its initial row at a pending slot, freed when the batch ends.
        if num_absent:
            fresh = assign_slots([UnassignedIds(self.key_index, keys.contiguous(), slots, num_absent)])[0]
        with Fills() as fills:
            pin = self.pin_slots([slots], train=train, fills=fills, fresh=fresh, num_absent=num_absent)
        if self.file is None:
            return Resolved(slots, pin)
        # New rows are known to the file's cache by now: ``pin_slots`` has set them there.
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
        """Pin the slots used by a batch, and write initial rows to the slots just assigned.

        Args:
            parts: slots used by the batch, in one or more int64 tensors; may repeat.
            train: whether the rows will be updated.
            fills: queue for writes to the slots. The caller runs it before the rows are read.
            fresh: slots just assigned for this batch, with their keys; None: none.
            num_absent: number of entries in ``parts`` with slots just assigned.
        """
        if fresh is not None:
            self._write_new_rows(fresh.slots, fresh.ids, fills)
        # Evaluation does not count as reading.
        if train and self.storage.is_trainable:
            self.accounting.note_reads(sum(map(len, parts)), num_absent)
        # Only pending slots are counted in ``pins``. Live rows need no count: if they are evicted, the pins
        # in ``in_flight`` tell who uses them.
        pending, num_pending = _NONE, self.key_index.num_live - self.num_alive
        if fresh is not None and len(fresh.slots) == num_pending:
            # Common case: all pending slots in the table are new in this batch.
            pending = fresh.slots
            fills.add(self.memory["pins"], pending, 1)
        elif num_pending:
            # Earlier batches have pending rows, too, and this batch may use them. Read the liveness flags,
            # which queued fills may still change.
            fills.run()
            fresh = None
            slots = torch.cat(list(parts))
            pending = unique(slots[~self.memory[ALIVE][slots]])[0]
            self.memory["pins"][pending] += 1
        pin = PinnedRows(self, parts, pending, fresh=fresh)
        self.in_flight.add(pin)
        return pin

    def keys_at(self, slots: Tensor) -> Tensor:
        """Return the key per slot, int64. The slots must be pending or alive."""
        return self.key_index.ids_of(slots)

    def ids_of(self, keys: Tensor) -> Tensor:
        """Return the ID per key, int64. Inverts the hash that maps IDs to keys."""
        return unmix(keys, self.storage.keys.seed)

    def release(self, *more_tables: "HashedTable") -> None:
        """Free the pending slots that no batch in flight uses any longer.

        Args:
            more_tables: other tables to treat in the same call.
        """
        release_rows((self, *more_tables))

    def mark_alive(self, slots: Tensor, fills: Fills) -> None:
        """Make pending rows alive with their present values. They then survive the release of the batch.

        Args:
            slots: pending slots, int64 [N].
            fills: queue for the writes.
        """
        # Only the flag changes here. At an update, the kernels change the rows afterward.
        if len(slots):
            fills.add(self.memory[ALIVE], slots, 1)
            self.accounting.report.live += len(slots)
            self.accounting.changes += 1

    def reset(self, slots: Tensor, fills: Fills) -> None:
        """Write initial values to pending rows again.

        Args:
            slots: pending slots, int64 [N].
            fills: queue for the writes.
        """
        self._write_new_rows(slots, self.keys_at(slots), fills)

    def _write_new_rows(self, slots: Tensor, keys: Tensor, fills: Fills) -> None:
        """Write initial rows, optimizer state and policy values to slots. Grows the memory if necessary.

        Args:
            slots: pending slots, int64 [N].
            keys: key per slot, int64 [N].
            fills: queue for optimizer state and policy values in slots that are already in memory. Weights,
                keys and rows in a file are written at once.
        """
        if len(slots) == 0:
            return
        # Weights and keys are written below. Flags and pins are already right: a slot that was free is not
        # alive and has no pins, and a slot that is reset must keep the pins.
        unchanged = [i for i, name in enumerate(self.memory) if name in ("weight", "key", "pins", ALIVE)]
        # Fresh memory needs no initial weights either, as they are written below for these slots.
        num_written = int("weight" in self.memory)
        self._growing_rows.start_rows(
            slots, self.key_index.num_slots, fills, num_written=num_written, unchanged=unchanged
        )
        ids, columns = self.ids_of(keys), self.rectangle.columns
        # ``.data`` leaves the tensor's version counter unchanged, so torch does not count this as a write.
        if self.file is None:
            self.storage.write_new_rows(self.memory["weight"].data, slots, ids, columns)
        else:
            self.file.start_rows(slots, self.storage.new_rows(ids, columns))
        if self.slot_keys is not None:
            self.slot_keys.data.index_copy_(0, slots, keys)

    # ---- streams ----------------------------------------------------------------------------------

    def live_keys(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the live rows' keys, ascending, and their slots, both int64 [n].

        Args:
            keys: interval from which to return keys; None: all keys.
        """
        all_keys, slots = self.key_index.items()
        # The index also lists pending slots. Skip the test if there are none.
        selected = self.memory[ALIVE][slots] if self.key_index.num_live > self.num_alive else None
        if keys is not None:
            inside = in_span(all_keys, keys)
            selected = inside if selected is None else inside & selected
        return (all_keys, slots) if selected is None else (all_keys[selected], slots[selected])

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the row parts and ``ids`` by name, as tensors in key order that read values on demand."""
        return self.key_ordered().tensors()

    def key_ordered(self, first: int = 0) -> "KeyOrderedRows":
        """Return the live rows sorted by key; see [Note: hashed tables in key order].

        While the live IDs stay the same and a caller holds the result, further calls return the same object.

        Args:
            first: number of rows in the whole table before the first row in this rectangle.
        """
        rows = self.accounting.key_ordered_ref() if self.accounting.key_ordered_ref is not None else None
        if rows is None or rows.rectangle.r0 != first or not rows.is_of(self):
            rows = KeyOrderedRows(self, first)
            # Weak, so the listing lives only as long as a caller holds it.
            self.accounting.key_ordered_ref = ref(rows)
        return rows

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield blocks with the live rows by key, followed by blocks with the counts of waiting IDs.

        Args:
            columns: table columns to return; None: all in the rectangle.
            keys: key interval to return; None: all keys.
        """
        # List the keys once, then gather rows block by block, so a block's copy is the only large memory.
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
        """Create empty counters for IDs waiting for admission."""
        span, storage = (self.rectangle.r0, self.rectangle.r1), self.storage
        # Quantised tables are not trained, so they count nothing.
        keys = storage.keys if storage.is_trainable else replace(storage.keys, admit=None)
        return admission_counts_for(keys, storage.max_rows, span, storage.name)

    def part_columns(self, columns: Span) -> Span:
        """Convert an interval of table columns to an interval of columns of the row part ``weight``.

        The result equals ``columns`` for floating-point rows, and counts bytes for quantised rows.
        """
        return self.storage.part_column(columns[0]), self.storage.part_column(columns[1])

    def columns_at(self, positions: Span) -> Span:
        """Convert an interval of columns of the row part ``weight`` to table columns.

        Inverts ``part_columns``.
        """
        # Special case: the last byte of a row may be padded, so its columns do not follow from the bytes.
        if positions == self.part_columns(self.rectangle.columns):
            return self.rectangle.columns
        bits = self.storage.bits or 8
        return positions[0] * 8 // bits, positions[1] * 8 // bits

    @property
    def block_rows(self) -> int:
        """Number of rows in a block of ``stream``."""
        return max(1, _BLOCK_BYTES // max(1, self.rows[:1].nbytes))

    def gather_parts(
        self,
        slots: Tensor,
        columns: Span,
        names: Iterable[str] | None = None,
        frozen: FileSnapshot | None = None,
    ) -> dict[str, Tensor]:
        """Return copies of the rows at some slots, by part name.

        Args:
            slots: int64 [N].
            columns: table columns to return.
            names: parts to return; None: all.
            frozen: snapshot from which to read rows in a file; None: the present rows.
        """
        r, storage = self.rectangle, self.storage
        names = [part.name for part in self.parts] if names is None else list(names)
        if storage.bits:
            # A quantised row holds codes, scale and bias in the same bytes. Split them into parts.
            rows = self.memory["weight"].detach()[slots]
            coded = zip(storage.row_parts, storage.parts(rows, r.c1 - r.c0), strict=True)
            parts = {part.name: values for part, values in coded}
        else:
            parts = {name: self.memory[name].detach()[slots] for name in names if name in self.memory}
        # Read the file only if a requested part is not in memory.
        if self.file is not None and len(parts) < len(names):
            parts |= self.file.read(slots, frozen)
        first, end = (storage.part_column(column - r.c0) for column in columns)
        return {name: parts[name] if parts[name].dim() == 1 else parts[name][:, first:end] for name in names}

    def freeze(self) -> FileSnapshot | None:
        """Snapshot the rows in the file. None for rows in memory, of which a forked process has a copy."""
        return None if self.file is None else self.file.table.snapshot()

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write the rows, or row parts, from some blocks. Keys without a live row get one.

        Parts missing from the blocks keep their values, or get initial values in new rows.

        Args:
            blocks: rows by key, or counts of waiting IDs, as yielded by ``stream``.

        Raises:
            ValueError: there would be too many rows.
        """
        self.release()
        self.accounting.loads += 1
        for block in blocks:
            keys = block.keys if isinstance(block.keys, Tensor) else torch.tensor(list(block.keys))
            # A block has either rows or counts of waiting IDs.
            if "waiting" in block.parts:
                self.admission_counts.load(keys, block.parts["waiting"])
                continue
            slots = self.key_index.find(keys)
            absent = slots < 0
            if bool(absent.any()):
                slots[absent] = self.key_index.insert(keys[absent])
            # Grow before reading the flags, which have no entry for slots beyond the present height.
            self._growing_rows.grow(1 + int(slots.max()) if len(slots) else 0)
            new = ~self.memory[ALIVE][slots]
            with Fills() as fills:
                # Initial values first, because the block may lack some parts.
                self._write_new_rows(slots[new], keys[new], fills)
                self.mark_alive(slots[new], fills)
            if self.file is not None:
                self.file.load(slots, block.columns, block.parts)
            self._write(slots, block)

    def _write(self, slots: Tensor, block: RowBlock) -> None:
        """Write the block's parts that are in memory to slots.

        Args:
            slots: slot per block key, int64 [N].
            block: new values.
        """
        r, storage = self.rectangle, self.storage
        # Parts in a file were loaded by the caller; the block's other parts are in memory.
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
        """Assign slots to keys, int64 [N], ascending. Their rows must be loaded before they are used."""
        self.release()
        self.key_index.insert(keys)

    def clear(self) -> None:
        """Remove all rows, and the counts of all IDs waiting for admission."""
        # Evict instead of dropping the memory: batches in flight may use the rows.
        # No pins are exempt: any batch in flight may use the evicted rows.
        evict_rows([(self, self.live_keys()[1], ())])
        self.admission_counts = self._new_admission_counts()

    def items(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the IDs of all live rows, and copies of the rows.

        Returns:
            IDs, sorted by key, int64 [n]. Weights, [n, columns]. Optimizer state and policy parts by name.
        """
        keys, slots = self.live_keys()
        parts = self.gather_parts(slots, self.rectangle.columns)
        return self.ids_of(keys), parts.pop("weight"), parts

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows, for a process forked to write a checkpoint while training continues."""
        return self.key_ordered().snapshot()


class _LazyParts(Mapping[str, Tensor]):
    """The parts of a row block by name. A part is read from the table when it is accessed.

    So a reader that needs one part, such as ``ids``, does not read the weights.
    """

    def __init__(
        self, table: HashedTable, keys: Tensor, slots: Tensor, columns: Span, frozen: FileSnapshot | None
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
    """View of a hashed table as a fixed table with rows sorted by key.

    See [Note: hashed tables in key order]. The view lists keys and slots, and reads row values on demand. It
    is valid until an ID is admitted or evicted.

    Args:
        table: rows in a rectangle of the hashed table.
        first: number of rows in the whole table before the first row in this rectangle.
    """

    is_growable = True

    def __init__(self, table: HashedTable, first: int = 0) -> None:
        self._table, self._first = table, first
        # Fixed when the view is made. ``is_of`` tells whether they still fit the table.
        self._keys, self._slots = table.live_keys()
        r = table.rectangle
        # Columns count elements of the part ``weight``: bytes for quantised rows, as in a state dict.
        self.rectangle = Rectangle(r.table, first, first + len(self._keys), *table.part_columns(r.columns))
        self.parts = [*table.parts, RowPart(IDS, torch.int64, True)]
        self.index = None
        self.rows, self.state = table.rows, ()
        self._changes = table.num_changes
        # Set only in the copy returned by ``snapshot``, until ``close``.
        self._frozen: FileSnapshot | None = None

    def is_of(self, table: object) -> bool:
        """Return whether this view was made from ``table`` and still lists the live rows."""
        return table is self._table and self._changes == self._table.num_changes

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
        for start in range(first, end, self._table.block_rows):
            here = range(start, min(start + self._table.block_rows, end))
            positions = slice(here.start - self._first, here.stop - self._first)
            parts = _LazyParts(
                self._table, self._keys[positions], self._slots[positions], columns, self._frozen
            )
            yield RowBlock(here, columns, parts)

    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Write rows from blocks whose keys are positions. IDs do not change; a part ``ids`` is ignored."""

        def by_key() -> Iterator[RowBlock]:
            """Yield the blocks with hashed keys instead of positions."""
            for block in blocks:
                assert isinstance(block.keys, range)
                keys = self._keys[block.keys.start - self._first : block.keys.stop - self._first]
                parts = {name: values for name, values in block.parts.items() if name != IDS}
                if parts:
                    yield RowBlock(keys, self._table.columns_at(block.columns), parts)

        self._table.load(by_key())

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows, to be read in a forked process.

        The fork keeps the memory as it is now, and a log keeps the rows in a file that change afterward.
        """
        # A shallow copy: the lists of keys and slots are shared, and do not change.
        snapshot = copy.copy(self)
        snapshot._frozen = self._table.freeze()
        return snapshot

    def close(self) -> None:
        """Free the log of old rows, if this object is a snapshot; see `snapshot`."""
        if self._frozen is not None:
            self._frozen.close()


@dataclass(frozen=True)
class HashedRows(ExternalRows):
    """Description of a hashed table: row format, limits, policies and initial values.

    The initial row of an ID depends only on seed, table name and ID. In a quantised table it is quantised
    from its minimum and maximum.

    Args:
        dtype: element type of the row memory; uint8 for quantised rows.
        keys: row limit, admission and eviction policies, and seed.
        name: table name.
        dim: number of values in a whole row.
        max_rows: greatest number of live rows, over all ranks.
        bounds: lower and upper bound of uniform initial values.
        init_fn: fills an initial row ``[1, dim]`` in place from torch's default generator, instead of uniform
            values.
        bits: bits per quantised value (code); 0 for floating-point rows.
        file: options for rows in a file; None: rows in memory.
        seed_name: name used instead of ``name`` to seed the initial rows.
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
        """Whether lookups and updates may fail, because rows are in a file."""
        return self.file is not None

    @property
    def needs_whole_rows(self) -> bool:
        """Whether the eviction policy reads weights or optimizer state."""
        return self.keys.evict is not None and self.keys.evict.needs_rows

    @property
    def form(self) -> DenseRows | QuantisedRows:
        """Row format of a fixed table with the same dtype, that is, without the eviction policy's parts."""
        return QuantisedRows(self.bits) if self.bits else DenseRows(self.dtype)

    @property
    def is_trainable(self) -> bool:
        """Whether the rows can be trained. Quantised rows cannot."""
        return self.bits == 0

    @property
    def policy_parts(self) -> tuple[RowPart, ...]:
        """Values that the eviction policy stores per row, such as the time of the last use."""
        policy = self.keys.evict
        return policy.parts if policy is not None and self.is_trainable else ()

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Parts with row values, ``weight`` first, followed by the eviction policy's parts."""
        return (*self.form.row_parts, *self.policy_parts)

    @property
    def counts_waiting_ids(self) -> bool:
        """Whether the table counts the occurrences of IDs waiting for admission."""
        return self.keys.counts_waiting_ids and self.is_trainable

    def columns(self, dim: int) -> int:
        return self.form.columns(dim)

    def part_column(self, column: int) -> int:
        return self.form.part_column(column)

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Return an empty parameter, because the rows of a hashed table are outside the parameter.

        Args:
            num_rows: unused.
            columns: elements per row.
            device: memory device.
        """
        return torch.empty((0, columns), dtype=self.dtype, device=device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None, because a ``HashedTable`` is an index itself, and is created by ``table``."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes of some rows, including the eviction policy's values, without optimizer state.

        Args:
            num_rows: row count.
            dim: values per row.
        """
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
        """Create an empty table for a rectangle.

        Args:
            rectangle: key and column intervals.
            spec: optimizer; None: no optimizer state.
            device: module device, CPU or ``meta``. The rows are on the CPU in both cases.

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
        """Seed of the initial rows, derived from the table's seed and name."""
        return seed_of_rows(self.seed_name or self.name, self.keys.seed)

    def write_new_rows(self, rows: Tensor, slots: Tensor, ids: Tensor, columns: Span) -> None:
        """Write the initial rows of some IDs to slots.

        Args:
            rows: weight memory, indexed by slot.
            slots: int64 [N].
            ids: ID per slot, int64 [N].
            columns: table columns that ``rows`` holds.
        """
        # The kernel writes fp32 uniform rows directly to the slots. Other rows are built first, then copied.
        if self.dtype == torch.float32 and self.init_fn is None:
            low, high = self.bounds
            write_uniform_rows(rows, slots, ids, seed=self.row_seed, low=low, high=high, column=columns[0])
            return
        rows.index_copy_(0, slots, self.new_rows(ids, columns))

    def new_rows(self, ids: Tensor, columns: Span) -> Tensor:
        """Return the initial rows of some IDs in the format of the row memory.

        Args:
            ids: int64 [N].
            columns: table columns to return.

        Returns:
            ``dtype`` [N, memory columns]. A quantised row has codes, scale and bias.
        """
        if not self.bits or columns == (0, self.dim):
            return self.encode(self.initial_values(ids, columns))
        # Scale and bias belong to the whole row, so quantise it before cutting out the columns.
        rows = self.encode(self.initial_values(ids))
        codes = rows.new_zeros(len(rows), self.columns(columns[1] - columns[0]))
        first, end = map(self.part_column, columns)
        parts = zip(self.parts(codes, columns[1] - columns[0]), self.parts(rows, self.dim), strict=True)
        for target, part in parts:
            target.copy_(part if part.dim() == 1 else part[:, first:end])
        return codes

    def initial_values(self, ids: Tensor, columns: Span | None = None) -> Tensor:
        """Return the initial row values of some IDs before rounding to the row format, fp32 [N, columns].

        Args:
            ids: int64 [N].
            columns: table columns to return; None: all.
        """
        first, end = columns or (0, self.dim)
        if self.init_fn is None:
            low, high = self.bounds
            return uniform_rows(ids, seed=self.row_seed, low=low, high=high, columns=(first, end))
        return draw_rows(mix(ids, self.row_seed), self.init_fn, self.dim, (first, end))


def is_growable(storage: RowStorage) -> TypeGuard[HashedRows]:
    """Return whether a storage can grow, as only a hashed table's storage can."""
    return storage.is_growable


def has_growable_rows(table: Table) -> TypeGuard[HashedTable]:
    """Return whether a table can grow, as only hashed tables can."""
    return table.is_growable


def release_rows(tables: Iterable[HashedTable]) -> None:
    """Free the pending slots that no batch in flight uses any longer, in all given tables at once."""
    # Most calls find nothing released and end here.
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


def evict_rows(evictions: Iterable[tuple[HashedTable, Tensor, Collection[object]]]) -> None:
    """Evict rows from tables: free their slots, and record their keys if a publisher watches the table.

    A slot used by a batch in flight is not freed. It becomes pending and gets the initial row again.

    Args:
        evictions: tuples of a table, the slots to evict (distinct, int64), and pins of batches known to use
            none of these slots.
    """
    with Fills() as fills:
        left = [(eviction[0], *_mark_evicted(*eviction, fills)) for eviction in evictions if len(eviction[1])]
    freed = _free_slots([(table, slots) for table, _, slots in left])
    for (table, held, _), keys in zip(left, freed, strict=True):
        if table.accounting.is_watched:
            table.accounting.evicted.append(torch.cat([table.keys_at(held), keys]))


def _pop_released(table: HashedTable) -> Tensor:
    """Return the pending slots of finished batches, int64, and clear the table's list ``released``.

    A slot used by two finished batches occurs twice.
    """
    parts = [_NONE]
    # Other threads may append meanwhile: ``popleft`` and ``append`` are atomic.
    while table.released:
        parts.append(table.released.popleft())
    parts = [slots for slots in parts if len(slots)]
    return parts[0] if len(parts) == 1 else torch.cat([_NONE, *parts])


def _mark_evicted(
    table: HashedTable, slots: Tensor, updating: Collection[object], fills: Fills
) -> tuple[Tensor, Tensor]:
    """Mark rows as no longer alive, and give initial rows to the slots used by batches in flight.

    Args:
        table: table.
        slots: slots to evict, distinct, int64.
        updating: pins of batches known to use none of these slots.
        fills: queue for writes to the slots.

    Returns:
        The slots that batches in flight use, now pending; and the remaining slots, to be freed.
    """
    fills.add(table.memory[ALIVE], slots, 0)
    table.accounting.report.live -= len(slots)
    table.accounting.changes += 1
    if table.file is not None:
        # Open snapshots of the file still need these rows.
        table.file.table.log(slots.sort().values)
    # Rows of the updating batches are never victims, so only other batches may use these slots.
    # Identity suffices: pins do not define equality.
    other_pins = [pin for pin in table.in_flight if pin not in updating]
    if not other_pins and not table.released:
        return _NONE, slots
    # Which slots are victims, by slot: a lookup table for the slots used by each batch.
    pins = table.memory["pins"]
    is_victim = torch.zeros_like(table.memory[ALIVE]).index_fill_(0, slots, True)
    # ``pins`` counts users of pending slots only, and these slots were alive until now: count them here.
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
    """Remove the keys at some slots from the hash indexes, which frees the slots.

    Args:
        rows: pairs of a table and slots, int64.

    Returns:
        The removed keys, one tensor per pair.
    """
    keys = free_slots([(table.key_index, slots) for table, slots in rows])
    # Drop cached rows, too. Records in the file may stay: a slot's next row is written before it is read.
    for table, slots in rows:
        if table.file is not None and len(slots):
            table.file.table.drop(slots.sort().values)
    return keys


def _rebuild(arguments: tuple[Any, ...], blocks: Iterable[RowBlock], report: TableCounts) -> HashedTable:
    """Create a copy of a table, for ``__reduce__`` and ``__deepcopy__``.

    Args:
        arguments: constructor arguments.
        blocks: rows and counts of waiting IDs.
        report: counters.
    """
    table = HashedTable(*arguments)
    table.load(blocks)
    # ``load`` has counted the rows as live, so replace its counters afterward.
    table.accounting.report = replace(report)
    return table
