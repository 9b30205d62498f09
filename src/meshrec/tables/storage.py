"""Row formats: a protocol for the memory layout of rows, in whole tables and in rectangles.

Everything else about a table is format-independent: rectangles on a rank, packing, optimizer, state dict,
routing and output.
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

# D width


class RowStorage(Protocol):
    """Format that stores rows of ``dim`` values as rows of ``columns(dim)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """Memory dtype."""

    @property
    def bits(self) -> int:
        """Bits per code in quantised rows; 0 for floating-point rows."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """Row parts, ``weight`` first."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated. Other rows are read-only, without optimizer state."""

    @property
    def rows_in_parameter(self) -> bool:
        """Whether a parameter's memory holds the rows. Otherwise the storage is an ``ExternalRows``."""

    @property
    def is_growable(self) -> bool:
        """Whether the number of rows changes during training: keys are hashed IDs, admitted and evicted."""

    @property
    def may_fail(self) -> bool:
        """Whether rows may fail to arrive on a single rank: ranks then agree before every lookup."""

    @property
    def collects_gradients(self) -> bool:
        """Whether gradients can be collected for ``optimizer.step()``."""

    @property
    def needs_whole_rows(self) -> bool:
        """Whether evictions depend on whole rows, so plans should not cut columns."""

    def columns(self, dim: int) -> int:
        """Return the elements per row of ``dim`` values."""

    def part_column(self, column: int) -> int:
        """Return the offset in the part ``weight`` at which ``column`` starts."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Allocate uninitialized memory ``[num_rows, columns]``.

        Args:
            num_rows: rows.
            columns: elements per row, see ``columns``.
            device: memory device.
        """

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Create the index for a rectangle's rows. Return None if a key's slot is ``key - first_row``."""

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes for ``num_rows`` rows of ``dim`` values, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create optimizer state for ``num_rows`` new rows, a tensor per slot in ``spec``.

        Args:
            spec: the optimizer; None: no state.
            num_rows: rows.
            dim: values per row.
            device: memory device.
        """

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return the ``row_parts`` for rows of ``dim`` values, as views into their memory."""

    def encode(self, values: Tensor) -> Tensor:
        """Convert whole rows of values ``[n, dim]`` to this format.

        Raises:
            ValueError: the format cannot represent a value.
        """


class ExternalRows(ABC):
    """Storage whose tables keep their rows outside a parameter's memory.

    A sharded module asks it for tables. An unsharded module has ordinary memory (``RowStorage.allocate``).
    List it before other bases, so these capabilities win.
    """

    rows_in_parameter = False
    is_growable = False
    collects_gradients = False

    @property
    def needs_whole_rows(self) -> bool:
        """Whether evictions depend on whole rows."""
        return False

    @property
    @abstractmethod
    def may_fail(self) -> bool:
        """Whether rows may fail to arrive on a single rank: ranks then agree before every lookup."""

    @abstractmethod
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> ExternalTable:
        """Create a table for a rectangle; see [Note: the parts of a table] in ``tables/table.py``.

        Args:
            rectangle: keys and columns.
            spec: the rows' optimizer; None: no state.
            device: the module's device.
        """


def cut(
    storage: RowStorage,
    tensors: Mapping[str, Tensor],
    rows: slice,
    columns: Span,
    *,
    first_column: int = 0,
) -> dict[str, Tensor]:
    """Cut rows and columns from a table's parts.

    Args:
        storage: row format.
        tensors: row parts and optimizer state by name.
        rows: positions in these tensors.
        columns: table columns.
        first_column: table column at which the tensors start.
    """
    start, first, end = map(storage.part_column, (first_column, *columns))
    return {
        name: tensor[rows] if tensor.dim() == 1 else tensor[rows, first - start : end - start]
        for name, tensor in tensors.items()
    }


def check_loadable(value: Tensor, name: str, storage: RowStorage) -> None:
    """Raise ValueError for a state dict's ``weight`` that read-only rows would have to encode.

    Such rows load values in their own dtype only.

    Args:
        value: the state dict's tensor.
        name: name in messages.
        storage: the table's row format.
    """
    if not storage.is_trainable and value.dtype != storage.dtype:
        raise ValueError(
            f"{name}: the table is quantised to {storage.bits} bits, and the state dict has {value.dtype}. "
            "Load values into the model as it was, and quantise it with meshrec.quant.quantize."
        )


LookUp = Callable[[Sequence[Tensor], tbe.Lookups, tbe.LookupOptions], Tensor]
"""Lookup function for some storages, with the arguments of ``ops.tbe.forward``."""


def lookup_of(storages: Sequence[RowStorage]) -> LookUp:
    """Return the function that looks up rows in several tables at once, given storage by table."""
    bits = [storage.bits for storage in storages]
    return functools.partial(nbit.forward, bits) if any(bits) else tbe.forward
