"""Rows of a hashed table by slot, in memory or partly in a file."""

from collections.abc import Iterable, Sequence
from typing import final

import torch
from torch import Tensor

from meshrec.ops.index import Fills
from meshrec.ops.prefault import GrowingRegion
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.cached.regions import InitializedPart
from meshrec.tables.cached.rows import FileRows
from meshrec.tables.cached.table import FileSnapshot
from meshrec.tables.hashed.file import HashedFile
from meshrec.tables.hashed.initial import InitialRows
from meshrec.tables.hashed.memory import GrowingRows
from meshrec.tables.table import Rectangle, RowBlock, RowPart, Span

_BLOCK_BYTES = 1 << 23  # weight bytes per block
ALIVE = "is_alive"
"""Name of the liveness flags in ``RowStore.memory``, bool by slot."""


@final
class RowStore:
    """Rows of a hashed table rectangle by slot: weights, optimizer state, and values of the eviction policy.

    If the rows are in a file, a slot here is an index slot, see [Note: hashed rows in a file].

    Args:
        rectangle: key and column intervals.
        initial: initial rows, and the row format.
        policy_parts: values that the eviction policy stores per row.
        spec: optimizer; None: no optimizer state.
        name: table name.
        max_slots: greatest number of slots.
        file: options for rows in a file; None: all rows are in memory.
        index_regions: memory of the hash index, which grows with the rows.
    """

    def __init__(
        self,
        rectangle: Rectangle,
        initial: InitialRows,
        policy_parts: Sequence[RowPart],
        spec: OptimizerSpec | None,
        *,
        name: str,
        max_slots: int,
        file: FileRows | None,
        index_regions: Sequence[GrowingRegion],
    ) -> None:
        width = rectangle.c1 - rectangle.c0
        self.rectangle, self._initial, self._row_format = rectangle, initial, initial.row_format
        # Optimizer state slots, not row positions.
        state_slots = spec.state_slots() if spec is not None else ()
        row_parts = [*self._row_format.row_parts, *policy_parts]
        self.parts = [*row_parts, *(RowPart(slot.name, torch.float32, slot.per_row) for slot in state_slots)]
        """Row parts, ``weight`` first, then optimizer state."""
        self._num_row_parts = len(row_parts)
        # The tensors of a single row, by name, with initial values. With a file, weight and state move there.
        row = {"weight": torch.zeros(1, self._row_format.columns(width), dtype=self._row_format.dtype)}
        new_state = self._row_format.new_state(spec, 1, width, torch.device("cpu"))
        row |= dict(zip([slot.name for slot in state_slots], new_state, strict=True))
        self.file: HashedFile | None = None
        """File with weights and optimizer state; None if they are in memory. See
        [Note: hashed rows in a file]."""
        if file is not None:
            initialized_parts = [
                InitializedPart(part, float(row.pop(part.name).max()))
                for part in self.parts
                if part.name in row
            ]
            self.file = HashedFile(
                rectangle, initialized_parts, file, name=name, dim=initial.dim, max_rows=max_slots
            )
        elif self._row_format.dtype.itemsize == 2:
            # Stochastic rounding is seeded by key, because slots differ between plans.
            row["key"] = torch.zeros(1, dtype=torch.int64)
        row |= {part.name: torch.zeros(1, dtype=part.dtype) for part in policy_parts}
        row |= {ALIVE: torch.zeros(1, dtype=torch.bool), "pins": torch.zeros(1, dtype=torch.int32)}
        self._growing_rows = GrowingRows(
            list(row.values()), max_rows=max_slots, name=f"table {name!r}", other_regions=index_regions
        )
        # The tensors have the order of ``row``, in which ``weight`` is first; ``start_rows`` relies on it.
        self.memory: dict[str, Tensor] = dict(zip(row, self._growing_rows.tensors, strict=True))
        """Tensors indexed by slot, by name: weights and optimizer state unless they are in a file, policy
        parts, ``ALIVE`` (whether a slot is alive), ``pins`` (how many batches in flight use a pending slot),
        and for 16-bit rows ``key``, which seeds their stochastic rounding. The tensor objects never change;
        see [Note: memory that grows].
        """

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
        return [self.memory[part.name] for part in self.parts[self._num_row_parts :]]

    @property
    def slot_keys(self) -> Tensor | None:
        """Key per slot, int64, for 16-bit rows in memory, whose stochastic rounding depends on the key.

        None for other rows.
        """
        return self.memory.get("key")

    @property
    def block_rows(self) -> int:
        """Number of rows in a block of ``stream``."""
        return max(1, _BLOCK_BYTES // max(1, self.rows[:1].nbytes))

    def grow(self, num_slots: int) -> None:
        """Give the memory at least ``num_slots`` slots."""
        self._growing_rows.grow(num_slots)

    def start_rows(self, slots: Tensor, keys: Tensor, ids: Tensor, fills: Fills, *, num_slots: int) -> None:
        """Write initial rows, optimizer state and policy values to slots. Grows the memory if necessary.

        Args:
            slots: pending slots, int64 [N].
            keys: key per slot, int64 [N].
            ids: ID per slot, int64 [N].
            fills: queue for optimizer state and policy values in slots that are already in memory. Weights,
                keys and rows in a file are written at once.
            num_slots: number of slots that the memory must have afterward.
        """
        if len(slots) == 0:
            return
        # Weights and keys are written below. Flags and pins are already right: a slot that was free is not
        # alive and has no pins, and a slot that is reset must keep the pins.
        unchanged = [i for i, name in enumerate(self.memory) if name in ("weight", "key", "pins", ALIVE)]
        # Fresh memory needs no initial weights either, as they are written below for these slots.
        num_written = int("weight" in self.memory)
        self._growing_rows.start_rows(slots, num_slots, fills, num_written=num_written, unchanged=unchanged)
        # ``.data`` leaves the tensor's version counter unchanged, so torch does not count this as a write.
        if self.file is None:
            self._initial.write(self.memory["weight"].data, slots, ids, self.rectangle.columns)
        else:
            self.file.start_rows(slots, self._initial.rows(ids, self.rectangle.columns))
        if self.slot_keys is not None:
            self.slot_keys.data.index_copy_(0, slots, keys)

    def gather(
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
        r, row_format = self.rectangle, self._row_format
        names = [part.name for part in self.parts] if names is None else list(names)
        if row_format.bits:
            # A quantised row holds codes, scale and bias in the same bytes. Split them into parts.
            rows = self.memory["weight"].detach()[slots]
            coded = zip(row_format.row_parts, row_format.parts(rows, r.c1 - r.c0), strict=True)
            parts = {part.name: values for part, values in coded}
        else:
            parts = {name: self.memory[name].detach()[slots] for name in names if name in self.memory}
        # Read the file only if a requested part is not in memory.
        if self.file is not None and len(parts) < len(names):
            parts |= self.file.read(slots, frozen)
        first, end = (row_format.part_column(column - r.c0) for column in columns)
        return {name: parts[name] if parts[name].dim() == 1 else parts[name][:, first:end] for name in names}

    def write(self, slots: Tensor, block: RowBlock) -> None:
        """Write the parts in a block to slots. Other parts keep their values."""
        r, row_format = self.rectangle, self._row_format
        if self.file is not None:
            self.file.load(slots, block.columns, block.parts)
        targets = {name: tensor.detach() for name, tensor in self.memory.items()}
        if row_format.bits:
            views = row_format.parts(targets["weight"], r.c1 - r.c0)
            targets = {part.name: view for part, view in zip(row_format.row_parts, views, strict=True)}
        first, end = (row_format.part_column(column - r.c0) for column in block.columns)
        for name, values in block.parts.items():
            # Parts in the file have no tensor in memory.
            if (target := targets.get(name)) is not None:
                local = target if target.dim() == 1 else target[:, first:end]
                local[slots] = values.to(target.dtype)

    def drop(self, slots: Tensor) -> None:
        """Forget the rows in some slots, int64, whose keys were removed from the index."""
        # Records in the file may stay: a slot's next row is written before it is read.
        if self.file is not None and len(slots):
            self.file.table.drop(slots.sort().values)

    def log(self, slots: Tensor) -> None:
        """Log the rows in some slots, int64, for open snapshots, before the rows change or are dropped."""
        if self.file is not None:
            self.file.table.log(slots.sort().values)

    def freeze(self) -> FileSnapshot | None:
        """Snapshot the rows in the file. None for rows in memory, of which a forked process has a copy."""
        return None if self.file is None else self.file.table.snapshot()

    def part_columns(self, columns: Span) -> Span:
        """Convert an interval of table columns to an interval of columns of the row part ``weight``.

        The result equals ``columns`` for floating-point rows, and counts bytes for quantised rows.
        """
        return self._row_format.part_column(columns[0]), self._row_format.part_column(columns[1])

    def columns_at(self, positions: Span) -> Span:
        """Convert an interval of columns of the row part ``weight`` to table columns.

        Inverts ``part_columns``.
        """
        # Special case: the last byte of a row may be padded, so its columns do not follow from the bytes.
        if positions == self.part_columns(self.rectangle.columns):
            return self.rectangle.columns
        bits = self._row_format.bits or 8
        return positions[0] * 8 // bits, positions[1] * 8 // bits
