"""Layout of several table rectangles in a single parameter."""

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
    """Sparse gradient of a table shard (a `Rectangle`), with only the rows touched by a batch."""

    rows: Tensor
    """Touched rows or slots, ascending, int64 [U]."""
    grads: Tensor
    """Gradient per row, fp32 [U, D]."""


class Packing:
    """Layout of several rectangles of a table in a single parameter.

    A rectangle is a row interval times a column interval. A rank may hold several rectangles of a table, but
    a table has a single parameter per rank. The rectangles follow each other in the parameter, which is as
    wide as the greatest common divisor of all rectangle widths. For example, rectangles with 8 and 12 columns
    share a parameter with 4 columns. A row of the first takes 2 parameter rows, and a row of the second takes
    3. A single rectangle is the whole parameter.

    Args:
        rectangles: rectangles of the same table.
        storage: row format.
    """

    def __init__(self, rectangles: Sequence[Rectangle], storage: RowStorage) -> None:
        self.rectangles, self.storage = list(rectangles), storage
        # Shape of each rectangle in memory.
        self._shapes = [(r.r1 - r.r0, storage.columns(r.c1 - r.c0)) for r in rectangles]
        # A common divisor, so that every rectangle fills whole parameter rows and is a view without gaps.
        self._width = math.gcd(*(width for _, width in self._shapes))
        # How many parameter rows a row takes, per rectangle.
        self._rows_per_row = [width // self._width for _, width in self._shapes]
        # ``_starts``: first parameter row of each rectangle, followed by the parameter's height.
        rows = [height * n for (height, _), n in zip(self._shapes, self._rows_per_row, strict=True)]
        self._starts = list(accumulate(rows, initial=0))

    @property
    def table(self) -> int:
        """Number of the table to which all rectangles belong."""
        return self.rectangles[0].table

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the parameter."""
        return self._starts[-1], self._width

    def views(self, packed: Tensor) -> list[Tensor]:
        """Return a view of each rectangle in the parameter's memory.

        Args:
            packed: tensor with the parameter's shape.
        """
        # Return the tensor itself, so a single rectangle keeps its identity.
        if len(self._shapes) == 1:
            return [packed]
        return [
            packed[start:end].view(shape)
            for start, end, shape in zip(self._starts, self._starts[1:], self._shapes, strict=False)
        ]

    def pack(self, parts: Sequence[Tensor]) -> Tensor:
        """Merge the dense gradients of all rectangles into the gradient of the parameter."""
        if len(parts) == 1:
            return parts[0]
        return torch.cat([part.reshape(-1) for part in parts]).view(self.shape)

    def pack_rows(self, parts: Sequence[RowGradients], dtype: torch.dtype) -> Tensor:
        """Merge the row gradients of all rectangles into a sparse gradient of the parameter.

        Args:
            parts: gradients per rectangle.
            dtype: dtype of the result.

        Returns:
            A coalesced sparse tensor with the parameter's shape.
        """
        rows = [
            _parameter_rows(part.rows, n) + start
            for part, n, start in zip(parts, self._rows_per_row, self._starts, strict=False)
        ]
        grads = [part.grads.reshape(-1, self._width) for part in parts]
        # Coalesced by construction: rows are distinct, and ascend within and across rectangles.
        return _sparse(torch.cat(rows)[None], torch.cat(grads).to(dtype), self.shape, is_coalesced=True)

    def unpack_rows(self, gradient: Tensor) -> list[RowGradients]:
        """Split a coalesced sparse gradient of the parameter by rectangle. Inverts ``pack_rows``."""
        rows, grads = gradient._indices()[0], gradient._values().float()
        # The rows of a coalesced gradient ascend, so the rows of a rectangle are next to each other.
        bounds = torch.searchsorted(rows, torch.tensor(self._starts, device=rows.device)).tolist()
        return [
            RowGradients((rows[low:high:n] - start) // n, grads[low:high].reshape(-1, n * self._width))
            for low, high, n, start in zip(bounds, bounds[1:], self._rows_per_row, self._starts, strict=False)
        ]


def add_sparse(one: Tensor, other: Tensor) -> Tensor:
    """Return the sum of two sparse gradients as a coalesced sparse tensor."""
    # torch's addition of sparse tensors does not support fp16.
    indices = torch.cat([one._indices(), other._indices()], 1)
    values = torch.cat([one._values(), other._values()])
    return _sparse(indices, values, one.shape, is_coalesced=False).coalesce()


def _sparse(indices: Tensor, values: Tensor, shape: Sequence[int], *, is_coalesced: bool) -> Tensor:
    """Return a sparse tensor with the given rows of a matrix, without checks."""
    # torch 2.12's sparse_coo_tensor warns that invariants are not checked, even with check_invariants=False.
    sparse: Tensor = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors(
        1,
        1,
        shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=is_coalesced,
    )
    return sparse


def _parameter_rows(rows: Tensor, n: int) -> Tensor:
    """Return the ``n`` parameter rows of each rectangle row: rows [0, 2] with n = 2 give [0, 1, 4, 5]."""
    return rows if n == 1 else (rows[:, None] * n + torch.arange(n, device=rows.device)).view(-1)
