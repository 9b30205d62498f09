"""Tables in which any int64 is a valid ID: rows in growing memory, found by a hash index.

Its parts: ``SlotStates`` knows which slots are in use (``slots.py``), ``RowStore`` has the rows
(``row_store.py``), and ``AdmissionCounts`` counts the IDs that have no row yet (``admission.py``).
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard, final
from weakref import ReferenceType, ref

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.ops.index import (
    AssignedSlots,
    Fills,
    HashIndex,
    UnassignedIds,
    assign_slots,
    free_slots,
    unmix,
)
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.dense.rows import DenseRows, row_format
from meshrec.tables.hashed.accounting import TableCounts
from meshrec.tables.hashed.admission import AdmissionCounts, admission_counts_for
from meshrec.tables.hashed.file import CachedKeys
from meshrec.tables.hashed.initial import InitialRows
from meshrec.tables.hashed.key_ordered import KeyOrderedRows
from meshrec.tables.hashed.keys import Hashed
from meshrec.tables.hashed.memory import install_copy_hooks
from meshrec.tables.hashed.row_store import ALIVE, RowStore
from meshrec.tables.hashed.slots import PinnedRows, SlotStates, unused_slots
from meshrec.tables.index import Index, Resolved
from meshrec.tables.initial import seed_of_rows
from meshrec.tables.storage import ExternalRows, RowStorage
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span, Table, TableSnapshot

# Shape legend: N IDs or slots.

# Spare slots for pending rows in small tables, and the limit of the index, which stores slots in 32 bits.
_SPARE_ROWS, _MAX_SLOTS = 1 << 24, (1 << 32) - 1


@final
class HashedTable:
    """The rows of a hashed table in a rectangle, found by ID; see [Note: the life of a row].

    A rectangle is a key interval times a column interval. The key of an ID is its seeded hash, see
    [Note: the keys of hashed tables].

    Args:
        rectangle: key and column intervals on this rank.
        storage: row format and table options.
        spec: optimizer, which tells the state per row; None: no optimizer state.
    """

    is_growable = True

    def __init__(
        self,
        rectangle: Rectangle,
        storage: "HashedRows",
        spec: OptimizerSpec | None,
    ) -> None:
        self.rectangle, self.storage, self.spec = rectangle, storage, spec
        # Pending rows need slots in addition to the ``max_rows`` live rows.
        # Mostly address space, so a generous limit is cheap, see [Note: memory that grows].
        max_slots = min(_MAX_SLOTS, 2 * storage.max_rows + _SPARE_ROWS)
        self.key_index = HashIndex(max_slots, seed=storage.keys.seed, name=f"table {storage.name!r}")
        """Map from keys to slots, for live and pending rows."""
        self.store = RowStore(
            rectangle,
            storage.initial,
            storage.policy_parts,
            spec,
            name=storage.name,
            max_slots=max_slots,
            file=storage.file,
            index_regions=self.key_index.growing_regions,
        )
        self.memory = self.store.memory
        """See ``RowStore.memory``."""
        self.slots = SlotStates(self.key_index, self.memory[ALIVE], self.memory["pins"])
        self.accounting = self.slots.accounting
        # Replaced by ``clear``.
        self.admission_counts = self._new_admission_counts()
        self._key_ordered_ref: ReferenceType[KeyOrderedRows] | None = None
        """Weak reference to the last result of ``key_ordered``."""
        install_copy_hooks(self, self.memory)

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_in_memory()
        # A block's keys may be a view into all keys, which a pickle would repeat.
        blocks = [
            block._replace(keys=block.keys.clone() if isinstance(block.keys, Tensor) else block.keys)
            for block in self.stream()
        ]
        return _rebuild, ((self.rectangle, self.storage, self.spec), blocks, self.report)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._check_in_memory()
        # From streamed rows instead of the tensors, so reserved memory is not copied.
        copied = _rebuild((self.rectangle, self.storage, self.spec), self.stream(), self.report)
        memo[id(self)] = copied
        return copied

    def _check_in_memory(self) -> None:
        """Raise ValueError if the rows are in a file, which is not copied with the model."""
        # The file table raises the error.
        if self.store.file is not None:
            self.store.file.table.__reduce__()

    @property
    def parts(self) -> Sequence[RowPart]:
        """Row parts, ``weight`` first, then optimizer state."""
        return self.store.parts

    @property
    def rows(self) -> Tensor:
        """Weight memory that kernels read; see ``RowStore.rows``."""
        return self.store.rows

    @property
    def state(self) -> Sequence[Tensor]:
        """Optimizer state that kernels change; see ``RowStore.state``."""
        return self.store.state

    @property
    def slot_keys(self) -> Tensor | None:
        """Key per slot for stochastic rounding; see ``RowStore.slot_keys``."""
        return self.store.slot_keys

    @property
    def index(self) -> Index:
        """Index from hashed keys to slots in ``rows``.

        If the rows are in memory, it is the table itself. If they are in a file, it maps to cache slots.
        """
        return self if self.store.file is None else CachedKeys(self.resolve, self.store.file.slot_keys)

    @property
    def num_alive(self) -> int:
        """Number of live rows in this rectangle. Pending rows do not count."""
        return self.accounting.report.live

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
        if self.store.file is None:
            return Resolved(slots, pin)
        # New rows are known to the file's cache by now: ``pin_slots`` has set them there.
        cached, pin.arriving = self.store.file.resolve(slots, keys, train=train)
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
            self._start_rows(fresh.slots, fresh.ids, fills)
        # Evaluation does not count as reading.
        if train and self.storage.is_trainable:
            self.accounting.note_reads(sum(map(len, parts)), num_absent)
        return self.slots.pin(parts, fills, fresh)

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
        tables = (self, *more_tables)
        # Empty in most calls.
        if unused := unused_slots([table.slots for table in tables]):
            _free_slots([(tables[number], slots) for number, slots in unused])

    def reset(self, slots: Tensor, fills: Fills) -> None:
        """Write initial values to pending rows again.

        Args:
            slots: pending slots, int64 [N].
            fills: queue for the writes.
        """
        self._start_rows(slots, self.keys_at(slots), fills)

    def _start_rows(self, slots: Tensor, keys: Tensor, fills: Fills) -> None:
        """Write initial rows to slots; see ``RowStore.start_rows``."""
        self.store.start_rows(slots, keys, self.ids_of(keys), fills, num_slots=self.key_index.num_slots)

    # ---- streams ----------------------------------------------------------------------------------

    def live_keys(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the live rows' keys, ascending, and their slots; see ``SlotStates.live_keys``."""
        return self.slots.live_keys(keys)

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the row parts and ``ids`` by name, as tensors in key order that read values on demand."""
        return self.key_ordered().tensors()

    def key_ordered(self, first: int = 0) -> KeyOrderedRows:
        """Return the live rows sorted by key; see [Note: hashed tables in key order].

        While the live IDs stay the same and a caller holds the result, further calls return the same object.

        Args:
            first: number of rows in the whole table before the first row in this rectangle.
        """
        rows = self._key_ordered_ref() if self._key_ordered_ref is not None else None
        if rows is None or rows.rectangle.r0 != first or not rows.is_of(self.slots):
            rows = KeyOrderedRows(self.slots, self.store, self.load, self.ids_of, first)
            # Weak, so the listing lives only as long as a caller holds it.
            self._key_ordered_ref = ref(rows)
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
        step = self.store.block_rows
        for first in range(0, len(live_keys), step):
            here = slots[first : first + step]
            yield RowBlock(live_keys[first : first + step], columns, self.store.gather(here, columns))
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
            self.store.grow(1 + int(slots.max()) if len(slots) else 0)
            new = ~self.memory[ALIVE][slots]
            with Fills() as fills:
                # Initial values first, because the block may lack some parts.
                self._start_rows(slots[new], keys[new], fills)
                self.slots.mark_alive(slots[new], fills)
            self.store.write(slots, block)

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
        parts = self.store.gather(slots, self.rectangle.columns)
        return self.ids_of(keys), parts.pop("weight"), parts

    def snapshot(self) -> TableSnapshot:
        """Snapshot the present rows, for a process forked to write a checkpoint while training continues."""
        return self.key_ordered().snapshot()


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
    def needs_row_sums(self) -> bool:
        """Whether eviction scores depend on weights or optimizer state."""
        return self.keys.evict is not None and self.keys.evict.needs_rows

    @property
    def row_format(self) -> DenseRows:
        """Row format of the values alone, without the values that the eviction policy stores per row."""
        return row_format(self.dtype, self.bits)

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
        return (*self.row_format.row_parts, *self.policy_parts)

    @property
    def counts_waiting_ids(self) -> bool:
        """Whether the table counts the occurrences of IDs waiting for admission."""
        return self.keys.counts_waiting_ids and self.is_trainable

    def columns(self, dim: int) -> int:
        return self.row_format.columns(dim)

    def part_column(self, column: int) -> int:
        return self.row_format.part_column(column)

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
        """Return the bytes of some rows, including the eviction policy's values, without optimizer state."""
        policy_bytes = sum(part.dtype.itemsize for part in self.policy_parts)
        return self.row_format.num_bytes(num_rows, dim) + num_rows * policy_bytes

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
        return self.row_format.new_state(spec, num_rows, dim, device)

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        return self.row_format.parts(rows, dim)

    def encode(self, values: Tensor) -> Tensor:
        return self.row_format.encode(values)

    @override
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> HashedTable:
        """Create an empty table for a rectangle.

        Raises:
            ValueError: the device is a GPU.
        """
        if device is not None and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"table {self.name!r} has hashed keys, whose index is on the CPU; it cannot be on {device}. "
                "Put the module on the CPU, or give the table num_embeddings."
            )
        return HashedTable(rectangle, self, spec)

    @property
    def initial(self) -> InitialRows:
        """Initial rows, which depend only on seed, table name and ID."""
        seed = seed_of_rows(self.seed_name or self.name, self.keys.seed)
        return InitialRows(self.row_format, self.dim, seed, self.bounds, self.init_fn)


def is_growable(storage: RowStorage) -> TypeGuard[HashedRows]:
    """Return whether a storage can grow, as only a hashed table's storage can."""
    return storage.is_growable


def has_growable_rows(table: Table) -> TypeGuard[HashedTable]:
    """Return whether a table can grow, as only hashed tables can."""
    return table.is_growable


def evict_rows(evictions: Iterable[tuple[HashedTable, Tensor, Collection[object]]]) -> None:
    """Evict rows from tables: free their slots, and record their keys if a publisher watches the table.

    A slot used by a batch in flight is not freed. It becomes pending and gets the initial row again.

    Args:
        evictions: tuples of a table, the slots to evict (distinct, int64), and pins of batches known to use
            none of these slots.
    """
    left = []
    with Fills() as fills:
        for table, slots, updating in evictions:
            if len(slots):
                # Open snapshots of a file still need these rows.
                table.store.log(slots)
                held, unused = table.slots.mark_evicted(slots, updating, fills)
                if len(held):
                    table.reset(held, fills)
                left.append((table, held, unused))
    freed = _free_slots([(table, slots) for table, _, slots in left])
    for (table, held, _), keys in zip(left, freed, strict=True):
        if table.accounting.is_watched:
            table.accounting.evicted.append(torch.cat([table.keys_at(held), keys]))


def _free_slots(rows: Sequence[tuple[HashedTable, Tensor]]) -> list[Tensor]:
    """Remove the keys at some slots of tables, which frees the slots, and return the keys per table."""
    keys = free_slots([(table.key_index, slots) for table, slots in rows])
    for table, slots in rows:
        table.store.drop(slots)
    return keys


def _rebuild(arguments: tuple[Any, ...], blocks: Iterable[RowBlock], report: TableCounts) -> HashedTable:
    """Create a copy of a table, for ``__reduce__`` and ``__deepcopy__``."""
    table = HashedTable(*arguments)
    table.load(blocks)
    # ``load`` has counted the rows as live, so replace its counters afterward.
    table.accounting.report = replace(report)
    return table
