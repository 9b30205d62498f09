"""Row storage: protocol for row formats in memory.

All other code works with any format: rectangles on a rank, packing, optimizer, state dict, routing and
output.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from meshrec.ops import nbit, tbe
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.index import Index
from meshrec.tables.table import ExternalTable, Rectangle, RowPart, Span

# Shape legend: D width.


class RowStorage(Protocol):
    """Format storing ``dim`` values per row in ``columns(dim)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """Memory dtype."""

    @property
    def bits(self) -> int:
        """Bits per code in quantised rows; 0 for floating-point rows."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Tensors in a row, ``weight`` first."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated. Other rows are read-only, without optimizer state."""

    @property
    def rows_in_parameter(self) -> bool:
        """Whether a parameter's memory holds the rows. Otherwise the storage is an ``ExternalRows``."""

    @property
    def is_growable(self) -> bool:
        """Whether the row count changes in training: keys are hashed IDs, which are admitted and
        evicted.
        """

    @property
    def may_fail(self) -> bool:
        """Whether reading rows may fail on a single rank. Ranks then agree before each lookup."""

    @property
    def collects_gradients(self) -> bool:
        """Whether the backward pass can collect gradients for ``optimizer.step()``."""

    @property
    def needs_whole_rows(self) -> bool:
        """Whether eviction depends on whole rows, so plans should not split columns."""

    def columns(self, dim: int) -> int:
        """Return the element count in memory of a row with ``dim`` values."""

    def part_column(self, column: int) -> int:
        """Return the position in the part ``weight`` where table column ``column`` starts."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Allocate uninitialized memory ``[num_rows, columns]``.

        Args:
            num_rows: row count.
            columns: elements per row, see ``columns``.
            device: memory device.
        """

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Create an index for a rectangle's rows.

        Returns None if a key's slot is ``key - first_row``.
        """

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes for ``num_rows`` rows with ``dim`` values, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create optimizer state for ``num_rows`` new rows: one tensor per slot in ``spec``.

        Args:
            spec: the optimizer; None: no state.
            num_rows: row count.
            dim: values per row.
            device: memory device.
        """

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Split rows in memory into ``row_parts``, as views.

        Args:
            rows: memory, [n, columns(dim)].
            dim: values per row.
        """

    def encode(self, values: Tensor) -> Tensor:
        """Convert whole-row values ``[n, dim]`` to this format, ``[n, columns(dim)]``.

        Raises:
            ValueError: the format cannot represent a value.
        """


class ExternalRows(ABC):
    """Base class for storages with table rows outside parameter memory.

    A sharded module asks the storage for tables. An unsharded module has ordinary memory
    (``RowStorage.allocate``). List this class before other bases, so the attributes here take precedence.
    """

    rows_in_parameter = False
    is_growable = False
    collects_gradients = False

    @property
    def needs_whole_rows(self) -> bool:
        """Whether eviction depends on whole rows."""
        return False

    @property
    @abstractmethod
    def may_fail(self) -> bool:
        """Whether reading rows may fail on a single rank. Ranks then agree before each lookup."""

    @abstractmethod
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> ExternalTable:
        """Create a rectangle's table; see [Note: the parts of a table] in ``tables/table.py``.

        Args:
            rectangle: the table's keys and columns.
            spec: row optimizer; None: no state.
            device: the module's device.
        """


def slice_parts(
    storage: RowStorage,
    tensors: Mapping[str, Tensor],
    rows: slice,
    columns: Span,
    *,
    first_column: int = 0,
) -> dict[str, Tensor]:
    """Slice rows and columns from a table's parts, as views.

    Args:
        storage: row format.
        tensors: row parts and optimizer state by name.
        rows: row positions in these tensors.
        columns: table columns to return.
        first_column: first table column in the tensors.
    """
    start, first, end = map(storage.part_column, (first_column, *columns))
    return {
        name: tensor[rows] if tensor.dim() == 1 else tensor[rows, first - start : end - start]
        for name, tensor in tensors.items()
    }


def check_loadable(value: Tensor, name: str, storage: RowStorage) -> None:
    """Raise ValueError if read-only rows are to be loaded from values in another dtype.

    Quantised rows can only load codes; they do not encode values.

    Args:
        value: ``weight`` from the state dict.
        name: name in messages.
        storage: the table's row format.
    """
    if not storage.is_trainable and value.dtype != storage.dtype:
        raise ValueError(
            f"{name}: the table is quantised to {storage.bits} bits, and the state dict has {value.dtype}. "
            "Load values into the model as it was, and quantise it with meshrec.quant.quantize."
        )


LookUp = Callable[[Sequence[Tensor], tbe.Lookups, tbe.LookupOptions], Tensor]
"""Lookup function for some storages, with the ``ops.tbe.forward`` arguments."""


def lookup_function(storages: Sequence[RowStorage]) -> LookUp:
    """Return the function for looking up rows in several tables at once, given their storages."""
    bits = [storage.bits for storage in storages]
    return functools.partial(nbit.forward, bits) if any(bits) else tbe.forward
