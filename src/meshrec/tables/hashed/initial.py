"""Initial rows of hashed tables, which depend only on seed and ID."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from meshrec.ops.index import mix
from meshrec.ops.initial_rows import uniform_rows, write_uniform_rows
from meshrec.tables.dense.rows import DenseRows
from meshrec.tables.initial import draw_rows
from meshrec.tables.table import Span

# Shape legend: N IDs or slots.


@dataclass(frozen=True)
class InitialRows:
    """Initial rows of all possible IDs. A quantised row is quantised from its minimum and maximum.

    Args:
        row_format: storage format of the values.
        dim: number of values in a whole row.
        seed: seed of the table's rows.
        bounds: lower and upper bound of uniform values.
        init_fn: fills a row ``[1, dim]`` in place from torch's default generator; None: uniform values.
    """

    row_format: DenseRows
    dim: int
    seed: int
    bounds: tuple[float, float]
    init_fn: Callable[[Tensor], object] | None

    def write(self, rows: Tensor, slots: Tensor, ids: Tensor, columns: Span) -> None:
        """Write the initial rows of some IDs to slots.

        Args:
            rows: weight memory, indexed by slot.
            slots: int64 [N].
            ids: ID per slot, int64 [N].
            columns: table columns that ``rows`` holds.
        """
        # The kernel writes fp32 uniform rows directly to the slots. Other rows are built first, then copied.
        if self.row_format.dtype == torch.float32 and self.init_fn is None:
            low, high = self.bounds
            write_uniform_rows(rows, slots, ids, seed=self.seed, low=low, high=high, column=columns[0])
            return
        rows.index_copy_(0, slots, self.rows(ids, columns))

    def rows(self, ids: Tensor, columns: Span) -> Tensor:
        """Return the initial rows of some IDs in the format of the row memory.

        Args:
            ids: int64 [N].
            columns: table columns to return.

        Returns:
            ``dtype`` [N, memory columns]. A quantised row has codes, scale and bias.
        """
        if not self.row_format.bits or columns == (0, self.dim):
            return self.row_format.encode(self.values(ids, columns))
        # Scale and bias belong to the whole row, so quantise it before cutting out the columns.
        rows = self.row_format.encode(self.values(ids))
        codes = rows.new_zeros(len(rows), self.row_format.columns(columns[1] - columns[0]))
        first, end = map(self.row_format.part_column, columns)
        parts = zip(
            self.row_format.parts(codes, columns[1] - columns[0]),
            self.row_format.parts(rows, self.dim),
            strict=True,
        )
        for target, part in parts:
            target.copy_(part if part.dim() == 1 else part[:, first:end])
        return codes

    def values(self, ids: Tensor, columns: Span | None = None) -> Tensor:
        """Return the initial row values of some IDs before rounding to the row format, fp32 [N, columns].

        Args:
            ids: int64 [N].
            columns: table columns to return; None: all.
        """
        first, end = columns or (0, self.dim)
        if self.init_fn is None:
            low, high = self.bounds
            return uniform_rows(ids, seed=self.seed, low=low, high=high, columns=(first, end))
        return draw_rows(mix(ids, self.seed), self.init_fn, self.dim, (first, end))
