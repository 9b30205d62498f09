"""Tables for IDs that nobody can number: rows in memory that grows, found by a hash index.

[Note: the life of a row]

A slot is *free*, *pending* or *alive*. ``resolve`` gives the unseen IDs of a batch free slots and writes
their first rows there: they are pending, and pinned to the batch. At the update of the batch
(``tables/turnover.py``) an ID that is due comes alive with the row that it has. One that is not stays
pending until no batch in flight has it; then its slot is free again. A row that is evicted while a batch in
flight has it becomes pending, with its first row. So nobody reads or updates the row of another ID, and what
a batch reads does not depend on how far ahead it was resolved.

Slots are given in the order of keys, so that rectangles of other columns of the same rows, here and on other
ranks, have the same ones.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final
from weakref import WeakSet, ref

import torch
from torch import Tensor

from meshrec.ops.first_rows import uniform_rows, write_uniform_rows
from meshrec.ops.index import (
    Fills,
    GivenSlots,
    HashIndex,
    UnseenIds,
    give_slots,
    mix,
    unique,
    unmix,
)
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.at_rest import AtRest
from meshrec.tables.file_hashed import CachedKeys, HashedFile
from meshrec.tables.file_rows import FileRows
from meshrec.tables.growing import GrowingRows
from meshrec.tables.hashed_books import Books, PinnedRows, TableCounts
from meshrec.tables.hashed_keys import Hashed
from meshrec.tables.hashed_parts import codes_of, columns_at, cut_columns, read_parts, write_parts
from meshrec.tables.hashed_slots import forget_rows, release_rows
from meshrec.tables.index import Index, Resolved
from meshrec.tables.initial import drawn_rows, seed_of_rows
from meshrec.tables.row_log import RowLog
from meshrec.tables.storage import DenseRows, QuantisedRows, SideRows
from meshrec.tables.table import Rectangle, RowBlock, RowPart, RowsSnapshot, Span
from meshrec.tables.waiting import Waiting, in_span, waiting_for

# N IDs or slots

_NONE = torch.empty(0, dtype=torch.int64)
_BLOCK_BYTES = 1 << 23
_SPARE_ROWS, _MOST_SLOTS = 1 << 24, (1 << 32) - 1


@final
class HashedTable:
    """The rows of the keys of a rectangle that are alive; see [Note: the life of a row].

    Args:
        rectangle: its keys (see [Note: the keys of hashed tables]) and columns.
        storage: how the rows lie, and the table's choices.
        spec: the optimizer; None: no state.
        device: the CPU.
    """

    def __init__(
        self,
        rectangle: Rectangle,
        storage: "HashedRows",
        spec: OptimizerSpec | None,
        device: torch.device | None,
    ) -> None:
        width = rectangle.c1 - rectangle.c0
        self.rectangle, self.storage = rectangle, storage
        slots = spec.state_slots() if spec is not None else ()
        self.parts: Sequence[RowPart] = [
            *storage.row_parts,
            *(RowPart(slot.name, torch.float32, slot.per_row) for slot in slots),
        ]
        row = {"weight": torch.zeros(1, storage.columns(width), dtype=storage.dtype)}
        row |= dict(
            zip([slot.name for slot in slots], storage.new_state(spec, 1, width, device), strict=True)
        )
        most = min(_MOST_SLOTS, 2 * storage.max_rows + _SPARE_ROWS)
        self.file = HashedFile.of(self.parts, row, rectangle, storage, most) if storage.file else None
        """The weights and optimizer state, if they are in a file; see [Note: hashed rows in a file]."""
        if storage.dtype.itemsize == 2 and self.file is None:
            row["key"] = torch.zeros(1, dtype=torch.int64)
        row |= {part.name: torch.zeros(1, dtype=part.dtype) for part in storage.kept_parts}
        row |= {"": torch.zeros(1, dtype=torch.bool), "pins": torch.zeros(1, dtype=torch.int32)}
        name = f"table {storage.name!r}"
        self.slots = HashIndex(most, seed=storage.keys.seed, name=name)
        self._grown = GrowingRows(list(row.values()), max_rows=most, name=name, beside=self.slots.parts)
        self.memory: dict[str, Tensor] = dict(zip(row, self._grown.tensors, strict=True))
        """The parts in memory by name, by slot. ``""`` tells which slots are alive, and ``pins`` how many
        batches in flight have a pending one; 16-bit rows have their ``key``, by which they are rounded."""
        self.waiting = self._new_waiting()
        self.in_flight: WeakSet[PinnedRows] = WeakSet()
        self.released: deque[Tensor] = deque()
        self.books = Books()

    @property
    def rows(self) -> Tensor:
        """The memory that the kernels read: all rows, or the cache of a file."""
        return self.memory["weight"] if self.file is None else self.file.table.rows

    @property
    def state(self) -> Sequence[Tensor]:
        """The optimizer state, by slot of the optimizer."""
        if self.file is not None:
            return self.file.table.state
        return [self.memory[part.name] for part in self.parts[len(self.storage.row_parts) :]]

    @property
    def slot_keys(self) -> Tensor | None:
        """The key of each slot, of 16-bit rows in memory."""
        return self.memory.get("key")

    @property
    def index(self) -> Index:
        """The table itself, or what finds its rows in the cache of a file."""
        return self if self.file is None else CachedKeys(self.resolve, self.file.slot_keys)

    @property
    def num_alive(self) -> int:
        """The number of rows."""
        return self.books.report.live

    @property
    def num_changes(self) -> int:
        """The number of times that IDs came or went."""
        return self.books.changes

    @property
    def report(self) -> TableCounts:
        """Counts of the table's IDs since it was made, on this rank."""
        self.books.report.early = self.waiting.early()
        return self.books.report

    # ---- slots ------------------------------------------------------------------------------------

    def resolve(self, keys: Tensor, *, train: bool) -> Resolved:
        """Return the slot of each key; unseen ones get pending slots with their first rows."""
        self.release()
        slots = self.slots.find(keys)
        fresh, num_absent = None, int((slots < 0).sum())
        if num_absent:
            fresh = give_slots([UnseenIds(self.slots, keys.contiguous(), slots, num_absent)])[0]
        with Fills() as fills:
            pin = self.hold([slots], train=train, fills=fills, fresh=fresh, num_absent=num_absent)
        if self.file is None:
            return Resolved(slots, pin)
        cached, pin.arriving = self.file.resolve(slots, keys, train=train)
        return Resolved(cached, pin)

    def hold(
        self,
        parts: Sequence[Tensor],
        *,
        train: bool,
        fills: Fills,
        fresh: GivenSlots | None = None,
        num_absent: int = 0,
    ) -> PinnedRows:
        """Pin the slots of a batch's keys, and write first rows to those that are ``fresh``."""
        if fresh is not None:
            self._begin(fresh.slots, fresh.ids, fills)
        if train and self.storage.is_trainable:
            self.books.note_reads(sum(map(len, parts)), num_absent)
        pending, num_pending = _NONE, self.slots.num_live - self.num_alive
        if fresh is not None and len(fresh.slots) == num_pending:
            pending = fresh.slots
            fills.add(self.memory["pins"], pending, 1)
        elif num_pending:
            fills.run()
            fresh = None
            slots = torch.cat(list(parts))
            pending = unique(slots[~self.memory[""][slots]])[0]
            self.memory["pins"][pending] += 1
        pin = PinnedRows(self, parts, pending, self.released, fresh=fresh, changes=self.books.changes)
        self.in_flight.add(pin)
        return pin

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the key that has each slot."""
        return self.slots.ids_of(slots)

    def ids_of(self, keys: Tensor) -> Tensor:
        """Return the IDs whose keys these are."""
        return unmix(keys, self.storage.keys.seed)

    def release(self, *others: "HashedTable") -> None:
        """Free the pending slots, here and in other tables, that no batch in flight has any more."""
        release_rows((self, *others))

    def revive(self, slots: Tensor, fills: Fills) -> None:
        """Mark pending rows as alive, with their present values."""
        if len(slots):
            fills.add(self.memory[""], slots, 1)
            self.books.report.live += len(slots)
            self.books.changes += 1

    def reset(self, slots: Tensor, fills: Fills) -> None:
        """Reset pending rows to their first values."""
        self._begin(slots, self.keys_of(slots), fills)

    def _begin(self, slots: Tensor, keys: Tensor, fills: Fills) -> None:
        """Write first rows with their initial optimizer state. Grow the memory if necessary."""
        if len(slots) == 0:
            return
        # A slot that is free, or was never used, is not alive and has no pins.
        kept = [each for each, name in enumerate(self.memory) if name in ("weight", "key", "pins", "")]
        num_written = int("weight" in self.memory)
        self._grown.begin(slots, self.slots.num_slots, fills, num_written=num_written, kept=kept)
        ids, columns = self.ids_of(keys), self.rectangle.columns
        if self.file is None:
            self.storage.begin_at(self.memory["weight"].data, slots, ids, columns)
        else:
            self.file.begin(slots, self.storage.begin(ids, columns))
        if self.slot_keys is not None:
            self.slot_keys.data.index_copy_(0, slots, keys)

    # ---- streams ----------------------------------------------------------------------------------

    def listed(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the keys that are alive, ascending, and their slots."""
        found, slots = self.slots.items()
        chosen = self.memory[""][slots] if self.slots.num_live > self.num_alive else None
        if keys is not None:
            inside = in_span(found, keys)
            chosen = inside if chosen is None else inside & chosen
        return (found, slots) if chosen is None else (found[chosen], slots[chosen])

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the parts of the rows at rest, see ``tables/at_rest.py``."""
        return self.at_rest().tensors()

    def at_rest(self, first: int = 0) -> AtRest:
        """Return the rows as they are now, the first of them at position ``first``.

        While nothing changes and a caller holds the result, further calls return the same object.
        """
        found = self.books.resting() if self.books.resting is not None else None
        if found is None or found.rectangle.r0 != first or not found.is_of(self):
            found = AtRest(self, first)
            self.books.resting = ref(found)
        return found

    def stream(self, columns: Span | None = None, *, keys: Span | None = None) -> Iterator[RowBlock]:
        """Yield the rows that are alive, in blocks, and then the counts of IDs that wait."""
        found, slots = self.listed(keys)
        columns = columns or self.rectangle.columns
        step = self.block_rows
        for first in range(0, len(found), step):
            here = slots[first : first + step]
            yield RowBlock(found[first : first + step], columns, self.gathered(here, columns))
        for waiting, counts in self.waiting.stream(keys):
            for first in range(0, len(waiting), 1 << 18):
                piece = slice(first, first + (1 << 18))
                yield RowBlock(waiting[piece], columns, {"waiting": counts[piece]})

    def _new_waiting(self) -> Waiting:
        span, storage = (self.rectangle.r0, self.rectangle.r1), self.storage
        keys = storage.keys if storage.is_trainable else replace(storage.keys, admit=None)
        return waiting_for(keys, storage.max_rows, span, storage.name)

    def places(self, columns: Span) -> Span:
        """Return where columns of the table lie in the part ``weight`` of the whole table's rows."""
        return self.storage.part_column(columns[0]), self.storage.part_column(columns[1])

    def columns_at(self, places: Span) -> Span:
        """Return the columns of the table that lie in a part of ``weight``: the inverse of ``places``."""
        return columns_at(places, self.storage, self.rectangle)

    @property
    def block_rows(self) -> int:
        """The number of rows of a block."""
        return max(1, _BLOCK_BYTES // max(1, self.rows[:1].nbytes))

    def gathered(
        self,
        slots: Tensor,
        columns: Span,
        names: Iterable[str] | None = None,
        frozen: RowLog | None = None,
    ) -> dict[str, Tensor]:
        """Return the parts of some rows; ``frozen``: as this snapshot of the file has them."""
        r, storage = self.rectangle, self.storage
        wanted = list(names) if names is not None else [part.name for part in self.parts]
        found = read_parts(self.memory, slots, wanted, storage, r.c1 - r.c0)
        if self.file is not None and len(found) < len(wanted):
            found |= self.file.read(slots, frozen)
        return cut_columns({name: found[name] for name in wanted}, storage, r, columns)

    def freeze(self) -> RowLog | None:
        """Return a snapshot of the rows in the file; None if a fork freezes all rows."""
        return None if self.file is None else self.file.table.snapshot()

    @torch.no_grad()
    def load(self, blocks: Iterable[RowBlock]) -> None:
        """Replace rows, or parts of them; keys that are not there come alive.

        Raises:
            ValueError: there would be more rows than the table may have.
        """
        self.release()
        self.books.loads += 1
        for block in blocks:
            keys = block.keys if isinstance(block.keys, Tensor) else torch.tensor(list(block.keys))
            if "waiting" in block.parts:
                self.waiting.load(keys, block.parts["waiting"])
                continue
            slots = self.slots.find(keys)
            absent = slots < 0
            if bool(absent.any()):
                slots[absent] = self.slots.insert(keys[absent])
            self._grown.grow(1 + int(slots.max()) if len(slots) else 0)
            new = ~self.memory[""][slots]
            with Fills() as fills:
                self._begin(slots[new], keys[new], fills)
                self.revive(slots[new], fills)
            if self.file is not None:
                self.file.load(slots, block.columns, block.parts)
            write_parts(self.memory, slots, block, self.storage, self.rectangle)

    def reserve(self, keys: Tensor) -> None:
        """Give keys without a slot, ascending, the slots of the rows that will be loaded for them."""
        self.release()
        self.slots.insert(keys)

    def clear(self) -> None:
        """Forget all rows, and the IDs that wait."""
        forget_rows([(self, self.listed()[1], ())])
        self.waiting = self._new_waiting()

    def items(self) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Return the IDs that are alive on this rank, in the order of their keys, int64 [n], copies of their
        rows, [n, columns], and of their optimizer state and the policy's parts, by name.
        """
        keys, slots = self.listed()
        parts = self.gathered(slots, self.rectangle.columns)
        return self.ids_of(keys), parts.pop("weight"), parts

    def snapshot(self) -> RowsSnapshot:
        """Return the rows as they are now, for the forked process that writes a checkpoint."""
        return self.at_rest().snapshot()


@dataclass(frozen=True)
class HashedRows(SideRows):
    """Rows of floating-point values or of codes that an index finds.

    First rows are a function of (seed, table, ID); those of codes are rounded by their minimum and maximum.

    Args:
        dtype: the type of the rows; uint8 for codes.
        keys: the limits and policies of the table's keys.
        name: the table's name.
        dim: the width of whole rows.
        max_rows: the number of rows that the table may have.
        bounds: the range of first values, which are uniform in it.
        init_fn: draws first rows instead, one row ``[1, dim]`` at a time, from torch's default generator.
        bits: bits per code; 0 for floating-point values.
        file: options of the file of weights and optimizer state; None: they are in memory.
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

    @property
    def may_fail(self) -> bool:
        """Whether rows are in a file."""
        return self.file is not None

    @property
    def form(self) -> DenseRows | QuantisedRows:
        """The storage of the rows' values, without keys."""
        return QuantisedRows(self.bits) if self.bits else DenseRows(self.dtype)

    @property
    def is_trainable(self) -> bool:
        """Whether the rows are floating-point values."""
        return self.bits == 0

    @property
    def kept_parts(self) -> tuple[RowPart, ...]:
        """The parts of a row that the eviction policy keeps."""
        policy = self.keys.evict
        return policy.parts if policy is not None and self.is_trainable else ()

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """The parts of the rows' values, and those that the eviction policy keeps."""
        return (*self.form.row_parts, *self.kept_parts)

    @property
    def counts(self) -> bool:
        """Whether IDs that wait for admission are counted."""
        return self.keys.counts and self.is_trainable

    def columns(self, dim: int) -> int:
        return self.form.columns(dim)

    def part_column(self, column: int) -> int:
        return self.form.part_column(column)

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Return the parameter's memory, which has no rows: an index finds them elsewhere."""
        return torch.empty((0, columns), dtype=self.dtype, device=device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None: a ``HashedTable`` is its own index."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes of rows, with the values that the eviction policy keeps for them."""
        own = sum(part.dtype.itemsize for part in self.kept_parts)
        return self.form.num_bytes(num_rows, dim) + num_rows * own

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        return self.form.new_state(spec, num_rows, dim, device)

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        return self.form.parts(rows, dim)

    def encode(self, numbers: Tensor) -> Tensor:
        return self.form.encode(numbers)

    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> HashedTable:
        """Make a rectangle of the table.

        Raises:
            ValueError: it would be on a GPU.
        """
        if device is not None and device.type not in ("cpu", "meta"):
            raise ValueError(
                f"table {self.name!r} has hashed keys, whose index is on the CPU; it cannot be on {device}. "
                "Put the module on the CPU, or give the table num_embeddings."
            )
        return HashedTable(rectangle, self, spec, torch.device("cpu"))

    @property
    def row_seed(self) -> int:
        """The seed of the first rows, from the table's name and seed."""
        return seed_of_rows(self.name, self.keys.seed)

    def begin_at(self, rows: Tensor, slots: Tensor, ids: Tensor, columns: Span) -> None:
        """Write the first rows of IDs to their slots."""
        if self.dtype == torch.float32 and self.init_fn is None:
            low, high = self.bounds
            write_uniform_rows(rows, slots, ids, seed=self.row_seed, low=low, high=high, column=columns[0])
            return
        rows.index_copy_(0, slots, self.begin(ids, columns))

    def begin(self, ids: Tensor, columns: Span) -> Tensor:
        """Return the first rows as they lie in memory; codes have the scale and bias of the whole row."""
        if not self.bits or columns == (0, self.dim):
            return self.encode(self.first_rows(ids, columns))
        return codes_of(self, self.encode(self.first_rows(ids)), self.dim, columns)

    def first_rows(self, ids: Tensor, columns: Span | None = None) -> Tensor:
        """Return the first values of rows, fp32 [N, columns]."""
        first, end = columns or (0, self.dim)
        if self.init_fn is None:
            low, high = self.bounds
            return uniform_rows(ids, seed=self.row_seed, low=low, high=high, columns=(first, end))
        return drawn_rows(mix(ids, self.row_seed), self.init_fn, self.dim, (first, end))
