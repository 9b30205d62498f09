"""Read-only form of a hashed table for exported programs."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from meshrec.ops.index import mix
from meshrec.ops.keyed import KeyIndex, UniformInit, pack_buckets
from meshrec.tables.hashed.table import HashedRows, HashedTable
from meshrec.tables.module import TableModule

# Shape legend: n rows, C elements per row in memory (packed codes of quantized rows).

INDEX = ("buckets", "added", "added_rows")
"""Names of the key index buffers; see ``ops.keyed.naive``."""


@final
class ServedRows:
    """Reader of an unsharded hashed table's rows, which are copied into an exported package.

    The rows come block by block, sorted by key (the hash of the ID). A row has C elements in memory.

    Args:
        table: Table to read, which must not change while this object is used.
    """

    def __init__(self, table: HashedTable) -> None:
        self._table = table
        # Fixed now: keys and slots of all live rows, ascending by key.
        self._keys, self._slots = table.live_keys()

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the rows in memory."""
        return self._table.rows.dtype

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of all rows together: number of rows, and elements per row in memory."""
        return len(self._keys), self._table.rows.shape[1]

    def empty(self) -> Tensor:
        """Return an empty row tensor, [0, C]."""
        return torch.empty((0, self.shape[1]), dtype=self.dtype)

    def blocks(self) -> Iterator[Tensor]:
        """Yield blocks of rows, [block, C]."""
        for slots in self._slots.split(self._table.store.block_rows):
            yield self._table.rows.detach()[slots]

    def index(self) -> dict[str, Tensor]:
        """Return the tensors with which the exported program finds a row by key.

        They are keyed by the buffer names in `INDEX`.
        """
        # No rows are added yet. A server may add rows later without rewriting the package.
        tensors = pack_buckets(self._keys), torch.empty(2, 0, dtype=torch.int64), self.empty()
        return dict(zip(INDEX, tensors, strict=True))


def served_table(storage: HashedRows) -> TableModule:
    """Return the form of a hashed table in an exported program: rows sorted by key, and index buffers.

    torch.export requires that the kernel reads rows and index from plain tensors of dynamic size. A
    ``HashedTable`` does not have these: its row memory moves as it grows, and its index is a C++ object.

    The tensors are only examples with the right dtypes, with which a program is traced. The exported package
    contains the real tensors, which ``ServedRows`` reads from the ``HashedTable``.

    Args:
        storage: Row layout and options of the hashed table.
    """
    columns = storage.columns(storage.dim)
    # All sizes differ: torch.export would treat equal sizes as the same symbol.
    # Keys are sorted hashes, as the index requires. The values do not matter.
    keys = mix(torch.arange(101), storage.keys.seed).sort().values
    more = mix(torch.arange(200, 203), storage.keys.seed).sort().values
    added = torch.stack([more, torch.arange(3)])
    weight = nn.Parameter(torch.zeros(101, columns, dtype=storage.dtype), requires_grad=False)
    module = TableModule(storage.name, (len(weight), storage.dim), storage.row_format, weight)
    rows = torch.zeros(47, columns, dtype=storage.dtype)
    for name, tensor in zip(INDEX, (pack_buckets(keys), added, rows), strict=True):
        module.register_buffer(name, tensor)
    return module


def key_index(module: TableModule, storage: HashedRows) -> KeyIndex:
    """Return the kernel arguments: the index that finds rows by key, and the random initialization from which
    the kernel computes rows for unknown IDs.
    """
    buckets, added, added_rows = (module.get_buffer(name) for name in INDEX)
    return KeyIndex(buckets, added, added_rows, storage.keys.seed, unknown_row_init(storage))


def unknown_row_init(storage: HashedRows) -> UniformInit:
    """Return the random initialization from which an exported program computes rows for unknown IDs.

    Raises:
        ValueError: The table has a Python ``init_fn``.
    """
    if storage.init_fn is not None:
        raise ValueError(
            f"table {storage.name!r} has an init_fn, which a package cannot contain: an unknown ID would "
            "have no first row. Give weight_init_min and weight_init_max in place of init_fn."
        )
    return UniformInit(storage.initial.seed, *storage.bounds)
