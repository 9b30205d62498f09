"""Layout for several table rectangles in a single parameter."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.tables.storage import RowStorage
from meshrec.tables.table import Rectangle

# Shape legend: U touched rows, D rectangle columns.


class RowGradients(NamedTuple):
    """A rectangle's touched rows, int64 [U], ascending, and row gradients, fp32 [U, D]."""

    rows: Tensor
    grads: Tensor


class Packing:
    """Layout for several table rectangles in a single parameter.

    The rectangles lie one after the other. The parameter is as wide as the greatest common divisor of all
    rectangle widths: rectangles with 8 and 12 columns share a parameter with 4 columns, and take 2 and 3
    parameter rows per row. A single rectangle is the whole parameter.
    """

    def __init__(self, rectangles: Sequence[Rectangle], storage: RowStorage) -> None:
        self.rectangles, self.storage = list(rectangles), storage
        self._shapes = [(r.r1 - r.r0, storage.columns(r.c1 - r.c0)) for r in rectangles]
        self._width = math.gcd(*(width for _, width in self._shapes))
        # Parameter rows per rectangle row; then the first parameter row per rectangle, and the end.
        self._rows_per_row = [width // self._width for _, width in self._shapes]
        rows = [height * n for (height, _), n in zip(self._shapes, self._rows_per_row, strict=True)]
        self._starts = list(accumulate(rows, initial=0))

    @property
    def table(self) -> int:
        """Table number, common to the rectangles."""
        return self.rectangles[0].table

    @property
    def shape(self) -> tuple[int, int]:
        """Parameter shape."""
        return self._starts[-1], self._width

    def views(self, packed: Tensor) -> list[Tensor]:
        """Return the rectangles as views into the parameter's memory."""
        if len(self._shapes) == 1:
            return [packed]
        return [
            packed[start:end].view(shape)
            for start, end, shape in zip(self._starts, self._starts[1:], self._shapes, strict=False)
        ]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Concatenate dense rectangle gradients into the parameter gradient."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts]).view(self.shape)

    def pack_rows(self, parts: Sequence[RowGradients], dtype: torch.dtype) -> Tensor:
        """Concatenate sparse rectangle gradients into a coalesced parameter gradient."""
        rows = [
            _parameter_rows(part.rows, n) + start
            for part, n, start in zip(parts, self._rows_per_row, self._starts, strict=False)
        ]
        grads = [part.grads.reshape(-1, self._width) for part in parts]
        return torch.sparse_coo_tensor(
            torch.cat(rows)[None],
            torch.cat(grads).to(dtype),
            self.shape,
            is_coalesced=True,
            check_invariants=False,
        )

    def unpack_rows(self, gradient: Tensor) -> list[RowGradients]:
        """Split a coalesced parameter gradient by rectangle. Inverts ``pack_rows``."""
        rows, grads = gradient._indices()[0], gradient._values().float()
        # Coalesced rows ascend, so every rectangle is a contiguous range.
        bounds = torch.searchsorted(rows, torch.tensor(self._starts, device=rows.device)).tolist()
        return [
            RowGradients((rows[low:high:n] - start) // n, grads[low:high].reshape(-1, n * self._width))
            for low, high, n, start in zip(bounds, bounds[1:], self._rows_per_row, self._starts, strict=False)
        ]


def add_sparse(one: Tensor, other: Tensor) -> Tensor:
    """Return the coalesced sum of two sparse gradients. torch's own addition does not support fp16."""
    return torch.sparse_coo_tensor(
        torch.cat([one._indices(), other._indices()], 1),
        torch.cat([one._values(), other._values()]),
        one.shape,
        check_invariants=False,
    ).coalesce()


def _parameter_rows(rows: Tensor, n: int) -> Tensor:
    """Return ``n`` parameter rows per rectangle row: rows [0, 2] with n = 2 give [0, 1, 4, 5]."""
    return rows if n == 1 else (rows[:, None] * n + torch.arange(n, device=rows.device)).view(-1)
