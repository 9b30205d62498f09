"""State dict tensors for tables with shards on several ranks, for ``TableModule``."""

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshrec.comms.collectives import all_reduce
from meshrec.comms.mesh import Axis
from meshrec.optim.optimizers import StateSlot
from meshrec.tables.hashed.admission import waiting_counts
from meshrec.tables.hashed.admission_eviction import AdmissionEviction
from meshrec.tables.hashed.io import WAITING
from meshrec.tables.hashed.table import IDS
from meshrec.tables.module import TableModule
from meshrec.tables.table import Rectangle, Span


class FixedSplit:
    """Makes split tensors for a table with a fixed row count.

    Args:
        owners: rectangles by rank of ``mesh``.
        mesh: the ranks.
    """

    is_split = True

    def __init__(self, owners: Sequence[Sequence[Rectangle]], mesh: DeviceMesh) -> None:
        self._owners, self._mesh = [list(rectangles) for rectangles in owners], mesh

    def full_parts(self, module: TableModule) -> dict[str, Tensor]:
        """Return the table's row parts (weights, quantization scales, ...) by name, as split tensors.

        The split tensors share memory with the local shards.
        """
        column, device = module.storage.part_column, module.weight.device
        tensors = [table.tensors() for table in module.tables]
        size = (module.num_rows, column(module.dim))
        return {
            part.name: self._joined(
                module,
                [parts[part.name] for parts in tensors],
                torch.empty(0, dtype=part.dtype, device=device),
                size[:1] if part.per_row else size,
                column,
            )
            for part in module.storage.row_parts
        }

    def full_state(self, module: TableModule, slot: StateSlot) -> Tensor:
        """Return an optimizer state slot, fp32, as split tensor; it shares memory with the shards."""
        # Not detached, because pickle stores a tensor object once, but two tensors with shared memory twice.
        parts = [table.tensors()[slot.name] for table in module.tables]
        like = torch.empty(0, device=module.weight.device)
        return self._joined(module, parts, like, slot.shape(module.num_rows, module.dim), int)

    def any_rank(self, condition: bool) -> bool:
        """Return this rank's condition, as fixed tables load without communication."""
        return condition

    def rows_loaded(self) -> None:
        """Do nothing, because other ranks need not know about loaded rows."""

    def _joined(
        self,
        module: TableModule,
        parts: Sequence[Tensor],
        like: Tensor,
        size: Sequence[int],
        position: Callable[[int], int],
    ) -> Tensor:
        """Create a split tensor from the tensors of this rank's rectangles.

        Args:
            module: has this rank's rectangles.
            parts: a tensor per rectangle.
            like: tensor with the dtype and device, for ranks without a rectangle.
            size: full tensor size.
            position: maps a table column to a tensor column, which differs for packed int4.
        """
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        def in_part(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            return [r._replace(c0=position(r.c0), c1=position(r.c1)) for r in rectangles]

        local = LocalRectangles(parts, in_part(module.rectangles), like, size)
        return SplitTensor.of(local, [in_part(rectangles) for rectangles in self._owners], self._mesh)


class GrowableSplit:
    """Makes split tensors for a hashed table, with its current rows in key order.

    See [Note: hashed tables in key order]. ``full_parts`` is collective if IDs waiting for admission are
    counted. Loading is always collective.

    Args:
        table: table number.
        owners: rectangles (key ranges) by rank of ``mesh``.
        mesh: the ranks; None if every rank has the whole table.
        admission_eviction: has the row counts by key interval, over all ranks.
        axis: the ranks.
    """

    def __init__(
        self,
        table: int,
        owners: Sequence[Sequence[Rectangle]],
        mesh: DeviceMesh | None,
        *,
        admission_eviction: AdmissionEviction,
        axis: Axis,
    ) -> None:
        self._table, self._owners, self._mesh = table, [list(rectangles) for rectangles in owners], mesh
        self._admission_eviction, self._axis = admission_eviction, axis
        self.is_split = mesh is not None

    def full_parts(self, module: TableModule) -> dict[str, Tensor]:
        """Return the row parts, IDs and waiting ID counts by name, in key order, as split tensors."""
        joined = self._key_ordered(module)
        parts = {part.name: joined(part.name, part.dtype, part.per_row) for part in module.storage.row_parts}
        parts[IDS] = joined(IDS, torch.int64, True)
        if self._admission_eviction.storages[self._table].counts_waiting_ids:
            parts |= self._admission_counts(module)
        return parts

    def full_state(self, module: TableModule, slot: StateSlot) -> Tensor:
        """Return an optimizer state slot in key order, as split tensor."""
        return self._key_ordered(module)(slot.name, torch.float32, slot.per_row)

    def any_rank(self, condition: bool) -> bool:
        """Return whether a condition is True on some rank. Collective if the table is split."""
        flag = torch.tensor([int(condition)])
        if self.is_split:
            all_reduce(flag, self._axis, "loading a hashed table")
        return bool(flag)

    def rows_loaded(self) -> None:
        """Count the rows on all ranks again. Collective."""
        self._admission_eviction.recount()

    def _key_ordered(self, module: TableModule) -> Callable[[str, torch.dtype, bool], Tensor]:
        """Return a function from (name, dtype, per_row) to the split tensor for a row part."""
        positions = self._positions(self._admission_eviction.live[self._table])
        tables = [table.key_ordered(positions(table.rectangle)[0]) for table in module.tables]
        tensors = [table.tensors() for table in tables]
        for table, r in zip(tables, module.rectangles, strict=True):
            assert (table.rectangle.r0, table.rectangle.r1) == positions(r), "ranks have lost count"

        def joined(name: str, dtype: torch.dtype, per_row: bool) -> Tensor:
            """Create the split tensor for a row part.

            Args:
                name: part name.
                dtype: part dtype.
                per_row: whether the part has a value per row.
            """
            parts = [tensor[name] for tensor in tensors]
            return self._joined(module, parts, positions, dtype, per_row=per_row)

        return joined

    def _admission_counts(self, module: TableModule) -> dict[str, Tensor]:
        """Return IDs waiting for admission and their counts, as split tensors.

        Collective if the table is split.
        """
        intervals = self._admission_eviction.intervals[self._table]
        sizes = torch.zeros(len(intervals), dtype=torch.int64)
        counts = [waiting_counts(table.admission_counts) for table in module.tables]
        for table, parts in zip(module.tables, counts, strict=True):
            r = table.rectangle
            # All column shards count the same IDs, so only the shard with column 0 is counted.
            if r.c0 == 0:
                for number, span in enumerate(intervals):
                    if r.r0 <= span[0] and span[1] <= r.r1:
                        keys = next(table.admission_counts.stream(span), (parts[WAITING[0]][:0],))[0]
                        sizes[number] = len(keys)
        if self.is_split:
            all_reduce(sizes, self._axis, "waiting IDs")
        positions = self._positions(sizes.tolist())
        return {
            name: self._joined(
                module, [parts[name] for parts in counts], positions, torch.int64, per_row=True
            )
            for name in WAITING
        }

    def _positions(self, counts: Sequence[int]) -> Callable[[Rectangle], Span]:
        """Return a function from a rectangle to the position interval in key order.

        Args:
            counts: entry count in every key interval, over all ranks.
        """
        spans = self._admission_eviction.intervals[self._table]
        edges = [span[0] for span in spans] + [spans[-1][1]]
        position = dict(zip(edges, accumulate(counts, initial=0), strict=True))
        return lambda rectangle: (position[rectangle.r0], position[rectangle.r1])

    def _joined(
        self,
        module: TableModule,
        parts: Sequence[Tensor],
        positions: Callable[[Rectangle], Span],
        dtype: torch.dtype,
        *,
        per_row: bool,
    ) -> Tensor:
        """Create the split tensor for a row part.

        Args:
            module: has this rank's rectangles.
            parts: a tensor per rectangle, in key order.
            positions: function from a rectangle to the position interval in key order.
            dtype: part dtype.
            per_row: whether the part has a value per row.
        """
        if self._mesh is None:
            return parts[0]
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        column = module.storage.part_column

        def in_key_order(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            return [Rectangle(r.table, *positions(r), *map(column, r.columns)) for r in rectangles]

        spans = self._admission_eviction.intervals[self._table]
        end = positions(Rectangle(0, spans[0][0], spans[-1][1], 0, 0))[1]
        size = [end] if per_row else [end, column(module.dim)]
        owners = [in_key_order(rectangles) for rectangles in self._owners]
        # Drop empty pieces, because DCP identifies pieces by offset, and the next piece has the same offset.
        local = [
            (part, r)
            for part, r in zip(parts, in_key_order(module.rectangles), strict=True)
            if len(part) or not end
        ]
        if end:
            owners = [[r for r in rectangles if r.r0 < r.r1] for rectangles in owners]
        rectangles = LocalRectangles(
            [part for part, _ in local], [r for _, r in local], torch.empty(0, dtype=dtype), size
        )
        return SplitTensor.of(rectangles, owners, self._mesh)
