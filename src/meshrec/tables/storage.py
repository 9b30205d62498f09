"""Row storage: protocol for the formats in which a table's rows lie in memory.

A storage describes a table; it does not hold rows. All other code works with any storage: rectangles on a
rank, packing, optimizer, state dict, routing and output.
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
    """Row format and location of a table. A row with D values takes ``columns(D)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type of the row memory."""

    @property
    def bits(self) -> int:
        """Bits per value (code) in quantised rows; 0 for floating-point rows."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Parts of a row without optimizer state: ``weight`` first, then others such as a scale."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated. Other rows are read-only and have no optimizer state."""

    @property
    def rows_in_parameter(self) -> bool:
        """Whether the parameter's memory holds the rows. If not, the storage is an ``ExternalRows``."""

    @property
    def is_growable(self) -> bool:
        """Whether rows are added and removed during training, as in hashed tables."""

    @property
    def may_fail(self) -> bool:
        """Whether reading rows may fail on a single rank. The ranks then agree before each lookup."""

    @property
    def collects_gradients(self) -> bool:
        """Whether the backward pass can collect gradients for ``optimizer.step()``."""

    @property
    def needs_row_sums(self) -> bool:
        """Whether eviction scores depend on weights or optimizer state.

        Column shards are then cut at the same rows, so that ranks can add up their parts of the scores.
        """

    def columns(self, dim: int) -> int:
        """Return the number of elements that a row with ``dim`` values takes in memory."""

    def part_column(self, column: int) -> int:
        """Return the column of the part ``weight`` at which a table column starts.

        Both columns are equal, except in quantised rows: there, ``weight`` has bytes, with one or more values
        per byte.

        Args:
            column: table column.
        """

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Allocate uninitialized row memory ``[num_rows, columns]``.

        Args:
            num_rows: row count.
            columns: elements per row, see ``columns``.
            device: memory device.
        """

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Create an index for the rows of a table rectangle, from keys to slots (row positions in memory).

        Args:
            first_row: first row of the rectangle.
            num_rows: row count.

        Returns:
            The index; None if the slot of a key is ``key - first_row``.
        """

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes of ``num_rows`` rows with ``dim`` values each, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create initial optimizer state for new rows, one tensor per state slot of the optimizer.

        Args:
            spec: optimizer; None: no optimizer state.
            num_rows: row count.
            dim: values per row.
            device: memory device.
        """

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return views of the ``row_parts`` in row memory, in their order.

        Args:
            rows: row memory, [n, columns(dim)].
            dim: values per row.
        """

    def encode(self, values: Tensor) -> Tensor:
        """Convert row values to this format.

        Args:
            values: values of whole rows, [n, dim].

        Returns:
            Rows as they lie in memory, ``dtype`` [n, columns(dim)].

        Raises:
            ValueError: the format cannot represent a value.
        """


class ExternalRows(ABC):
    """Base class for storages that keep rows outside the parameter's memory.

    A sharded module asks the storage to create ``Table`` objects, which hold the rows. An unsharded module
    has ordinary memory (``RowStorage.allocate``). List this class before other base classes, because its
    attributes must take precedence.
    """

    # Defaults for tables in files. ``HashedRows`` overrides the last two.
    rows_in_parameter = False
    is_growable = False
    collects_gradients = False

    @property
    def needs_row_sums(self) -> bool:
        """Whether eviction depends on whole rows."""
        return False

    @property
    @abstractmethod
    def may_fail(self) -> bool:
        """Whether reading rows may fail on a single rank. The ranks then agree before each lookup."""

    @abstractmethod
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> ExternalTable:
        """Create the table of a rectangle; see [Note: the parts of a table] in ``tables/table.py``.

        Args:
            rectangle: key and column intervals.
            spec: optimizer; None: no optimizer state.
            device: module device.
        """


def slice_parts(
    storage: RowStorage,
    tensors: Mapping[str, Tensor],
    rows: slice,
    columns: Span,
    *,
    first_column: int = 0,
) -> dict[str, Tensor]:
    """Return views of some rows and columns of a table's parts.

    Args:
        storage: row format.
        tensors: row parts and optimizer state by name, each [rows] or [rows, columns].
        rows: row positions in these tensors.
        columns: table columns to return.
        first_column: table column with which the tensors start.
    """
    start, first, end = map(storage.part_column, (first_column, *columns))
    # One-dimensional parts, such as scales, belong to whole rows and have no columns to cut.
    return {
        name: tensor[rows] if tensor.dim() == 1 else tensor[rows, first - start : end - start]
        for name, tensor in tensors.items()
    }


def check_loadable(value: Tensor, name: str, storage: RowStorage) -> None:
    """Check the dtype of a state dict entry that is to be loaded into a table.

    Quantised rows can load only quantised rows. Loading does not quantise floating-point values.

    Args:
        value: ``weight`` from the state dict.
        name: name of the entry in messages.
        storage: row format.

    Raises:
        ValueError: the rows are quantised and the value has another dtype.
    """
    # Trainable rows convert any floating-point dtype on loading.
    if not storage.is_trainable and value.dtype != storage.dtype:
        raise ValueError(
            f"{name}: the table is quantised to {storage.bits} bits, and the state dict has {value.dtype}. "
            "Load values into the model as it was, and quantise it with meshrec.quant.quantize."
        )


LookUp = Callable[[Sequence[Tensor], tbe.Lookups, tbe.LookupOptions], Tensor]
"""Function that looks up rows in several tables, with the arguments and result of ``ops.tbe.forward``."""


def lookup_function(storages: Sequence[RowStorage]) -> LookUp:
    """Return the function that looks up rows in several tables at once.

    Args:
        storages: storages of the tables, in the order in which the function gets their memory.
    """
    bits = [storage.bits for storage in storages]
    # ``nbit.forward`` also takes floating-point tables, so a single quantised table decides.
    return functools.partial(nbit.forward, bits) if any(bits) else tbe.forward
