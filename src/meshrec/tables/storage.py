"""Row storage: protocol for the formats in which rows are kept in memory.

All other code is independent of the format: rectangles on a rank, packing, optimizer, state dict, routing and
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
    """Format that keeps rows of ``dim`` values as rows of ``columns(dim)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the memory."""

    @property
    def bits(self) -> int:
        """Bits per code of quantised rows; 0 for floating-point rows."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Tensors that a row consists of, ``weight`` first."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated. Other rows are read-only, without optimizer state."""

    @property
    def rows_in_parameter(self) -> bool:
        """Whether a parameter's memory holds the rows. Otherwise the storage is an ``ExternalRows``."""

    @property
    def is_growable(self) -> bool:
        """Whether the number of rows changes in training: keys are hashed IDs, which are admitted and
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
        """Whether eviction depends on whole rows, so that plans should not split columns."""

    def columns(self, dim: int) -> int:
        """Return the number of elements that a row of ``dim`` values takes in memory."""

    def part_column(self, column: int) -> int:
        """Return the element of the part ``weight`` at which table column ``column`` starts."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Allocate uninitialized memory ``[num_rows, columns]``.

        Args:
            num_rows: number of rows.
            columns: elements per row, see ``columns``.
            device: memory device.
        """

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Create the index of a rectangle's rows.

        Returns None if the slot of a key is ``key - first_row``.
        """

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes that ``num_rows`` rows of ``dim`` values take, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create the optimizer state of ``num_rows`` new rows: one tensor per slot of ``spec``.

        Args:
            spec: the optimizer; None: no state.
            num_rows: number of rows.
            dim: values per row.
            device: memory device.
        """

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return the ``row_parts`` of rows in memory, as views.

        Args:
            rows: memory, [n, columns(dim)].
            dim: values per row.
        """

    def encode(self, values: Tensor) -> Tensor:
        """Convert whole rows of values ``[n, dim]`` to this format, ``[n, columns(dim)]``.

        Raises:
            ValueError: the format cannot represent a value.
        """


class ExternalRows(ABC):
    """Base class for storages whose tables keep their rows outside the memory of a parameter.

    A sharded module asks the storage for tables. An unsharded module has ordinary memory
    (``RowStorage.allocate``). List this class before other bases, so that its attributes take precedence.
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
        """Create the table of a rectangle; see [Note: the parts of a table] in ``tables/table.py``.

        Args:
            rectangle: keys and columns of the table.
            spec: optimizer of the rows; None: no state.
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
    """Return rows and columns of a table's parts, as views.

    Args:
        storage: row format.
        tensors: row parts and optimizer state by name.
        rows: positions of the rows in these tensors.
        columns: table columns to return.
        first_column: table column at which the tensors start.
    """
    start, first, end = map(storage.part_column, (first_column, *columns))
    return {
        name: tensor[rows] if tensor.dim() == 1 else tensor[rows, first - start : end - start]
        for name, tensor in tensors.items()
    }


def check_loadable(value: Tensor, name: str, storage: RowStorage) -> None:
    """Raise ValueError if read-only rows are to be loaded from values of another dtype.

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
"""Lookup function of some storages, with the arguments of ``ops.tbe.forward``."""


def lookup_function(storages: Sequence[RowStorage]) -> LookUp:
    """Return the function that looks up rows of several tables at once, given the storage of each table."""
    bits = [storage.bits for storage in storages]
    return functools.partial(nbit.forward, bits) if any(bits) else tbe.forward
