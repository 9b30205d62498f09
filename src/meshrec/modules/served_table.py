"""Module that holds a hashed table which only reads, as an exported program sees it."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from meshrec.ops.index import mix
from meshrec.ops.keyed import FirstRows, FoundBy, buckets_of
from meshrec.tables.hashed import HashedRows, HashedTable

# n rows, C columns of their memory

INDEX = ("buckets", "added", "added_rows")
"""The buffers that find a row; see ``ops.keyed.naive``."""


@final
class ServedRows:
    """The rows of a whole hashed table in the order of their keys, read from the table block by block.

    Args:
        table: the table, which must not change meanwhile.
    """

    def __init__(self, table: HashedTable) -> None:
        self._table = table
        self._keys, self._slots = table.listed()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the rows' memory."""
        return self._table.rows.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the elements of each."""
        return len(self._keys), self._table.rows.shape[1]

    def empty(self) -> Tensor:
        """Return a tensor without rows, [0, C]."""
        return torch.empty((0, self.shape[1]), dtype=self.dtype)

    def blocks(self) -> Iterator[Tensor]:
        """Yield the rows, some at a time."""
        for slots in self._slots.split(self._table.block_rows):
            yield self._table.rows.detach()[slots]

    def index(self) -> dict[str, Tensor]:
        """Return the tensors that find the rows, by the names of ``INDEX``."""
        tensors = buckets_of(self._keys), torch.empty(2, 0, dtype=torch.int64), self.empty()
        return dict(zip(INDEX, tensors, strict=True))


class ServedTable(nn.Module):
    """A hashed table that only reads: ``weight`` [n, C] in key order, and the buffers of ``INDEX``.

    It holds example tensors of the right dtypes, so that a program can be traced. The package has the real
    ones.

    Args:
        storage: the layout of the rows, and the options of the table.
    """

    def __init__(self, storage: HashedRows) -> None:
        super().__init__()
        self.storage = storage
        columns = storage.columns(storage.dim)
        # All sizes differ: torch.export would take equal ones for the same.
        keys = mix(torch.arange(101), storage.keys.seed).sort().values
        more = mix(torch.arange(200, 203), storage.keys.seed).sort().values
        added = torch.stack([more, torch.arange(3)])
        self.weight = nn.Parameter(torch.zeros(101, columns, dtype=storage.dtype), requires_grad=False)
        rows = torch.zeros(47, columns, dtype=storage.dtype)
        for name, tensor in zip(INDEX, (buckets_of(keys), added, rows), strict=True):
            self.register_buffer(name, tensor)

    def found_by(self) -> FoundBy:
        """Return the tensors and the formula by which kernels find the rows."""
        buckets, added, added_rows = (self.get_buffer(name) for name in INDEX)
        first = first_rows_of(self.storage)
        return FoundBy(buckets, added, added_rows, self.storage.keys.seed, first)


def first_rows_of(storage: HashedRows) -> FirstRows:
    """Return the formula of a table's first rows.

    Raises:
        ValueError: they come from a function in Python.
    """
    if storage.init_fn is not None:
        raise ValueError(
            f"table {storage.name!r} has an init_fn, which a package cannot contain: an unknown ID would "
            "have no first row. Give weight_init_min and weight_init_max in place of init_fn."
        )
    return FirstRows(storage.row_seed, *storage.bounds)
