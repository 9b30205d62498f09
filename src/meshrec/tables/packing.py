"""Layout for several rectangles of a table in a single parameter."""

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.tables.storage import RowStorage
from meshrec.tables.table import Rectangle

# U: touched rows, D: columns in a rectangle


class RowGradients(NamedTuple):
    """Touched rows in a rectangle, int64 [U], ascending, and their gradients, fp32 [U, D]."""

    rows: Tensor
    grads: Tensor


class Packing:
    """Layout for a table's rectangles in a single parameter.

    Rectangles lie one after the other, in rows as wide as the greatest common divisor of all widths. A single
    rectangle fills the whole parameter.
    """

    def __init__(self, rectangles: Sequence[Rectangle], storage: RowStorage) -> None:
        self.rectangles, self.storage = list(rectangles), storage
        self._shapes = [(r.r1 - r.r0, storage.columns(r.c1 - r.c0)) for r in rectangles]
        self._width = math.gcd(*(width for _, width in self._shapes))
        # Packed rows per rectangle row, and the first packed row by rectangle.
        self._stretch = [width // self._width for _, width in self._shapes]
        rows = [height * n for (height, _), n in zip(self._shapes, self._stretch, strict=True)]
        self._begin = list(accumulate(rows, initial=0))

    @property
    def table(self) -> int:
        """Number of the table with these rectangles."""
        return self.rectangles[0].table

    @property
    def shape(self) -> tuple[int, int]:
        """Parameter shape."""
        return self._begin[-1], self._width

    def views(self, packed: Tensor) -> list[Tensor]:
        """Return the rectangles as views into the parameter's memory."""
        if len(self._shapes) == 1:
            return [packed]
        return [
            packed[start:end].view(shape)
            for start, end, shape in zip(self._begin, self._begin[1:], self._shapes, strict=False)
        ]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge the rectangles' gradients."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts]).view(self.shape)

    def pack_rows(self, parts: Sequence[RowGradients], dtype: torch.dtype) -> Tensor:
        """Merge the rectangles' sparse gradients into a coalesced gradient."""
        rows = [
            _stretched(part.rows, n) + start
            for part, n, start in zip(parts, self._stretch, self._begin, strict=False)
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
        """Split a coalesced gradient by rectangle: the inverse of ``pack_rows``."""
        rows, grads = gradient._indices()[0], gradient._values().float()
        # Coalesced rows ascend, so every rectangle is a contiguous range.
        bounds = torch.searchsorted(rows, torch.tensor(self._begin, device=rows.device)).tolist()
        return [
            RowGradients((rows[low:high:n] - start) // n, grads[low:high].reshape(-1, n * self._width))
            for low, high, n, start in zip(bounds, bounds[1:], self._stretch, self._begin, strict=False)
        ]


def sum_of_rows(one: Tensor, other: Tensor) -> Tensor:
    """Add two sparse gradients and coalesce the sum. torch's own addition does not support fp16."""
    return torch.sparse_coo_tensor(
        torch.cat([one._indices(), other._indices()], 1),
        torch.cat([one._values(), other._values()]),
        one.shape,
        check_invariants=False,
    ).coalesce()


def _stretched(rows: Tensor, n: int) -> Tensor:
    """Return the ``n`` packed rows per row."""
    return rows if n == 1 else (rows[:, None] * n + torch.arange(n, device=rows.device)).view(-1)
