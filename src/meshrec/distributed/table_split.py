"""Create the state dict tensors of a table whose shards are on several ranks, for ``TableModule``.

`FixedSplit` is for tables with a fixed number of rows, `GrowableSplit` for hashed tables.
"""

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
from meshrec.tables.hashed.key_ordered import IDS
from meshrec.tables.module import TableModule
from meshrec.tables.table import Rectangle, Span


class FixedSplit:
    """Factory of the `SplitTensor` objects in the state dict of a table with a fixed number of rows.

    Args:
        owners: rectangles (row and column ranges) on every rank in ``mesh``.
        mesh: the ranks.
    """

    is_split = True

    def __init__(self, owners: Sequence[Sequence[Rectangle]], mesh: DeviceMesh) -> None:
        self._owners, self._mesh = [list(rectangles) for rectangles in owners], mesh

    def full_parts(self, module: TableModule) -> dict[str, Tensor]:
        """Return the row parts of the whole table (weights, quantization scales, ...), as split tensors by
        name.

        They share memory with this rank's shards.
        """
        column, device = module.storage.part_column, module.weight.device
        # Tensors of every rectangle on this rank, by part name.
        tensors = [table.tensors() for table in module.tables]
        size = (module.num_rows, column(module.dim))
        return {
            part.name: self._split_tensor(
                module,
                [parts[part.name] for parts in tensors],
                torch.empty(0, dtype=part.dtype, device=device),
                size[:1] if part.per_row else size,
                column,
            )
            for part in module.storage.row_parts
        }

    def full_state(self, module: TableModule, slot: StateSlot) -> Tensor:
        """Return an optimizer state slot of the whole table, fp32, as a split tensor.

        It shares memory with this rank's shards.
        """
        # Not detached, because pickle stores a tensor object once, but two tensors with shared memory twice.
        parts = [table.tensors()[slot.name] for table in module.tables]
        like = torch.empty(0, device=module.weight.device)
        return self._split_tensor(module, parts, like, slot.shape(module.num_rows, module.dim), int)

    def any_rank(self, condition: bool) -> bool:
        """Return ``condition`` unchanged, because loading a fixed table needs no communication."""
        return condition

    def rows_loaded(self) -> None:
        """Do nothing: other ranks need not know that rows of a fixed table were loaded."""

    def _split_tensor(
        self,
        module: TableModule,
        parts: Sequence[Tensor],
        like: Tensor,
        size: Sequence[int],
        position: Callable[[int], int],
    ) -> Tensor:
        """Create a split tensor from the tensors in this rank's rectangles.

        Args:
            like: tensor from which to take the dtype and the device. On a rank without rectangles, ``parts``
                is empty and cannot show them.
            position: function from a table column to a tensor column. They differ in int4 rows, which pack
                two columns in a byte.
        """
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        def in_part(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            """Return the rectangles with table columns replaced by tensor columns."""
            return [r._replace(c0=position(r.c0), c1=position(r.c1)) for r in rectangles]

        local = LocalRectangles(parts, in_part(module.rectangles), like, size)
        return SplitTensor.of(local, [in_part(rectangles) for rectangles in self._owners], self._mesh)


class GrowableSplit:
    """Factory of the `SplitTensor` objects in the state dict of a hashed table.

    The objects have the rows that exist at the call, in key order.

    A key is a hash of an ID. See [Note: hashed tables in key order] in ``tables/hashed/key_ordered.py``.
    ``full_parts`` is collective if the table counts IDs waiting for admission. Loading is always collective.

    Args:
        table: table number.
        owners: rectangles (key and column ranges) on every rank in ``mesh``.
        mesh: the ranks; None if every rank has the whole table.
        admission_eviction: knows the number of rows in every key interval, over all ranks.
        axis: the ranks.

    Attributes:
        is_split: whether the table is split over ranks.
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
        """Return the row parts, the IDs, and the counts of waiting IDs, in key order, as split tensors by
        name.
        """
        make_split_tensor = self._key_ordered(module)
        parts = {
            part.name: make_split_tensor(part.name, part.dtype, part.per_row)
            for part in module.storage.row_parts
        }
        parts[IDS] = make_split_tensor(IDS, torch.int64, True)
        # IDs waiting for admission have counts but no rows; a checkpoint must contain them, too.
        if self._admission_eviction.storages[self._table].counts_waiting_ids:
            parts |= self._admission_counts(module)
        return parts

    def full_state(self, module: TableModule, slot: StateSlot) -> Tensor:
        """Return an optimizer state slot of the whole table in key order, fp32, as a split tensor."""
        return self._key_ordered(module)(slot.name, torch.float32, slot.per_row)

    def any_rank(self, condition: bool) -> bool:
        """Return whether ``condition`` is True on some rank. Collective if the table is split."""
        flag = torch.tensor([int(condition)])
        if self.is_split:
            all_reduce(flag, self._axis, "loading a hashed table")
        return bool(flag)

    def rows_loaded(self) -> None:
        """Count the rows on all ranks again, after rows were loaded. Collective."""
        self._admission_eviction.recount()

    def _key_ordered(self, module: TableModule) -> Callable[[str, torch.dtype, bool], Tensor]:
        """Sort this rank's rows by key, and return a function which creates split tensors from them.

        Returns:
            Function from (name, dtype, per_row) to the split tensor for a row part.
        """
        # Row counts of all intervals, over all ranks, determine where this rank's rows are in key order.
        row_span = self._row_span_function(self._admission_eviction.live[self._table])
        tables = [table.key_ordered(row_span(table.rectangle)[0]) for table in module.tables]
        tensors = [table.tensors() for table in tables]
        for table, r in zip(tables, module.rectangles, strict=True):
            assert (table.rectangle.r0, table.rectangle.r1) == row_span(r), "ranks have lost count"

        def make_split_tensor(name: str, dtype: torch.dtype, per_row: bool) -> Tensor:
            """Create the split tensor for a row part.

            Args:
                name: part name.
                dtype: part dtype.
                per_row: whether the part has a value per row.
            """
            parts = [tensor[name] for tensor in tensors]
            return self._split_tensor(module, parts, row_span, dtype, per_row=per_row)

        return make_split_tensor

    def _admission_counts(self, module: TableModule) -> dict[str, Tensor]:
        """Return the IDs waiting for admission and their counts, as split tensors by name.

        Collective if the table is split.
        """
        intervals = self._admission_eviction.intervals[self._table]
        # Number of waiting IDs in every key interval, first on this rank, then on all ranks.
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
        row_span = self._row_span_function(sizes.tolist())
        return {
            name: self._split_tensor(
                module, [parts[name] for parts in counts], row_span, torch.int64, per_row=True
            )
            for name in WAITING
        }

    def _row_span_function(self, counts: Sequence[int]) -> Callable[[Rectangle], Span]:
        """Return a function that maps a rectangle to the interval of its rows in the full table in key order.

        Args:
            counts: row count per key interval, summed over all ranks.

        Returns:
            Function from a rectangle (a table shard) to row positions [first, end).
        """
        spans = self._admission_eviction.intervals[self._table]
        edges = [span[0] for span in spans] + [spans[-1][1]]
        # Rectangles start and end at edges of the intervals, so every lookup succeeds.
        position = dict(zip(edges, accumulate(counts, initial=0), strict=True))
        return lambda rectangle: (position[rectangle.r0], position[rectangle.r1])

    def _split_tensor(
        self,
        module: TableModule,
        parts: Sequence[Tensor],
        row_span: Callable[[Rectangle], Span],
        dtype: torch.dtype,
        *,
        per_row: bool,
    ) -> Tensor:
        """Create the split tensor for a row part.

        If every rank has the whole table, return this rank's tensor instead.

        Args:
            row_span: function from a rectangle to the interval of its rows in key order.
        """
        if self._mesh is None:
            return parts[0]
        # Imported here, because torch's DTensor is slow to import.
        from meshrec.distributed.split_tensor import LocalRectangles, SplitTensor

        column = module.storage.part_column

        def in_key_order(rectangles: Sequence[Rectangle]) -> list[Rectangle]:
            """Return the rectangles with keys replaced by row positions in key order."""
            return [Rectangle(r.table, *row_span(r), *map(column, r.columns)) for r in rectangles]

        spans = self._admission_eviction.intervals[self._table]
        end = row_span(Rectangle(0, spans[0][0], spans[-1][1], 0, 0))[1]
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
