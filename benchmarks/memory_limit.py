"""The memory limit: the time of a loop that only touches the rows of a lookup, in the memory of the
tables.
"""

import ctypes
import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import compiled

SOURCE = Path(__file__).with_suffix(".cpp")


class Prefetch(NamedTuple):
    """A way in which the loop prefetches rows. Which one is fastest depends on the machine."""

    rows: int
    """Prefetch distance in IDs."""
    to_l1: bool
    """Whether to prefetch into the L1 cache instead of L2."""


PREFETCHES = [Prefetch(16, True), Prefetch(32, True), Prefetch(32, False), Prefetch(64, False)]


@functools.cache
def _library() -> ctypes.CDLL:
    library = compiled(SOURCE, "-O3", "-march=native", "-fopenmp")
    library.read_rows.restype = ctypes.c_float
    library.write_rows.restype = None
    library.read_lines.restype = ctypes.c_int64
    return library


class _Rows:
    """Rows of several tables in the form that the C++ functions take."""

    def __init__(self, weights: list[Tensor], ids_per_table: list[Tensor]) -> None:
        self.weights = weights  # kept alive: the loop sees their addresses only
        self.ids = torch.cat(ids_per_table).to(torch.int64)
        counts = torch.tensor([0, *(ids.numel() for ids in ids_per_table)])
        self.starts = counts.cumsum(0)
        self.tables = (ctypes.c_void_p * len(weights))(*(weight.data_ptr() for weight in weights))
        self.dim = weights[0].shape[1]

    def arguments(self, prefetch: Prefetch) -> list[object]:
        pointers = [ctypes.c_void_p(self.starts.data_ptr()), ctypes.c_void_p(self.ids.data_ptr())]
        sizes = [len(self.tables), self.dim, torch.get_num_threads(), prefetch.rows]
        return [self.tables, *pointers, *map(ctypes.c_int64, sizes), ctypes.c_bool(prefetch.to_l1)]


class MemoryLimit:
    """A loop that touches the rows of a lookup and its update.

    Args:
        weights: fp32 tables of one width, a multiple of 64. Their values are kept.
        ids_per_table: the IDs of each table, in the order of the lookup.
    """

    def __init__(self, weights: list[Tensor], ids_per_table: list[Tensor]) -> None:
        assert all(weight.dtype == torch.float32 and weight.shape[1] % 64 == 0 for weight in weights)
        self._looked_up = _Rows(weights, ids_per_table)
        self._touched = _Rows(weights, [ids.unique() for ids in ids_per_table])

    def forward(self, prefetch: Prefetch = PREFETCHES[0]) -> float:
        """Read each looked-up row once, in the order of the lookup."""
        return float(_library().read_rows(*self._looked_up.arguments(prefetch)))

    def step(self, prefetch: Prefetch = PREFETCHES[0]) -> None:
        """Read each looked-up row once, then read and write each distinct row once."""
        self.forward(prefetch)
        self.add(0.0, prefetch)

    def add(self, delta: float, prefetch: Prefetch = PREFETCHES[0]) -> None:
        """Add ``delta`` to each element of the distinct rows."""
        _library().write_rows(*self._touched.arguments(prefetch), ctypes.c_float(delta))


class LineLimit:
    """A loop that touches the cache lines of rows of any size in bytes, a multiple of 4, such as quantised
    rows.
    """

    def __init__(self, rows: list[Tensor], ids_per_table: list[Tensor]) -> None:
        assert all(table.dtype == torch.uint8 and table.shape[1] % 4 == 0 for table in rows)
        self._looked_up = _Rows(rows, ids_per_table)

    def forward(self, prefetch: Prefetch = PREFETCHES[0]) -> int:
        """Read a value from each cache line of each looked-up row, in the order of the lookup."""
        return int(_library().read_lines(*self._looked_up.arguments(prefetch)))
