"""Row formats: one protocol for the memory layout of rows, in whole tables and in rectangles of them.

Everything else about a table is the same for every format: the rectangles of a rank, how they share a
parameter, the optimizer, the state dict, routing and output.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from meshrec.ops import nbit, tbe
from meshrec.ops.memory import empty_pages
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.index import Index
from meshrec.tables.table import Rectangle, RowPart, SideTable, Span

# D width

# ``ops.tbe.forward`` without a call in between: every lookup comes by here.
_look_up: Callable[..., Tensor] = torch.ops.meshrec.tbe_forward.default


class RowStorage(Protocol):
    """Rows of ``dim`` numbers as rows of ``columns(dim)`` elements of ``dtype``."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the memory."""

    @property
    def bits(self) -> int:
        """Bits per code of quantised rows; 0 for floating-point rows."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """The parts of a row, ``weight`` first."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated. Other rows are read-only and have no optimizer state."""

    def columns(self, dim: int) -> int:
        """Return the number of elements that a row of ``dim`` values takes."""

    def part_column(self, column: int) -> int:
        """Return the offset in the part ``weight`` at which the value of ``column`` begins."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Make uninitialised memory ``[num_rows, columns]``."""

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Make the index of a rectangle's rows. Return None if the slot of a key is ``key - first_row``."""

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes of ``num_rows`` rows of ``dim`` values, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Make the optimizer state of ``num_rows`` new rows, one tensor per slot of ``spec``."""

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return the ``row_parts`` of rows of ``dim`` values, as views of their memory."""

    def encode(self, numbers: Tensor) -> Tensor:
        """Convert whole rows of values ``[n, dim]`` to this format.

        Raises:
            ValueError: the format cannot hold a value.
        """


class SideRows(ABC):
    """A storage whose tables keep their rows themselves, and not in the memory of a parameter.

    A sharded module asks it for its tables. An unsharded one has ordinary memory (``RowStorage.allocate``).
    """

    @property
    @abstractmethod
    def may_fail(self) -> bool:
        """Whether rows may fail to come on one rank alone: ranks then ask each other before each lookup."""

    @abstractmethod
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> SideTable:
        """Make a rectangle of a table; see [Note: what a table is] in ``tables/table.py``.

        ``spec``: the optimizer that will change the rows.
        """


@dataclass(frozen=True)
class DenseRows:
    """Floating-point rows: fp32, fp16 or bf16, ``dim`` elements each, with fp32 state beside them."""

    dtype: torch.dtype
    is_trainable = True
    bits = 0

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("weight", self.dtype, False),)

    def columns(self, dim: int) -> int:
        return dim

    def part_column(self, column: int) -> int:
        return column

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        return empty_pages((num_rows, columns), self.dtype, device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        return num_rows * dim * self.dtype.itemsize

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Make fp32 state, one tensor ``[num_rows]`` or ``[num_rows, dim]`` per slot of the spec."""
        return [
            empty_pages(slot.shape(num_rows, dim), torch.float32, device).fill_(slot.initial_value)
            for slot in (spec.state_slots() if spec is not None else ())
        ]

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        return [rows]

    def encode(self, numbers: Tensor) -> Tensor:
        return numbers.to(self.dtype)


@dataclass(frozen=True)
class QuantisedRows:
    """Rows of codes of 8, 4 or 2 bits, each with a scale and a bias for its numbers; read only.

    A rectangle of some columns has the scale and the bias of the whole row, so that its numbers are those
    that the whole table has. See ``ops.nbit``.
    """

    bits: int
    dtype = torch.uint8
    is_trainable = False
    row_parts = (
        RowPart("weight", torch.uint8, False),
        RowPart("weight_qscale", torch.float16, True),
        RowPart("weight_qbias", torch.float16, True),
    )

    def columns(self, dim: int) -> int:
        """Return the bytes of scale, bias and codes, a multiple of 4."""
        return nbit.row_bytes(dim, self.bits)

    def part_column(self, column: int) -> int:
        """Return the byte of the column's code. Columns may be cut where a byte begins."""
        return nbit.code_bytes(column, self.bits)

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        return empty_pages((num_rows, columns), self.dtype, device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Return the bytes of the rows, with their padding."""
        return num_rows * self.columns(dim)

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        assert spec is None
        return []

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return codes, scales and biases."""
        params = rows.view(torch.float16)
        codes = rows[:, nbit.PARAM_BYTES : nbit.PARAM_BYTES + self.part_column(dim)]
        return [codes, params[:, 0], params[:, 1]]

    def encode(self, numbers: Tensor) -> Tensor:
        """Convert the rows to codes with FBGEMM's rounding."""
        return nbit.quantize(numbers, self.bits)


def cut(
    storage: RowStorage,
    tensors: Mapping[str, Tensor],
    rows: slice,
    columns: Span,
    *,
    first_column: int = 0,
) -> dict[str, Tensor]:
    """Return some rows and some columns of the parts of a table.

    Args:
        storage: how its rows lie.
        tensors: by name the parts of the rows and of their optimizer state.
        rows: positions in these tensors.
        columns: columns of the table.
        first_column: the column of the table at which the tensors begin.
    """
    begin, first, end = map(storage.part_column, (first_column, *columns))
    return {
        name: tensor[rows] if tensor.dim() == 1 else tensor[rows, first - begin : end - begin]
        for name, tensor in tensors.items()
    }


def check_loadable(value: Tensor, name: str, storage: RowStorage) -> None:
    """Raise ValueError for a state dict's ``weight`` that read-only rows would have to encode.

    Such rows load values of their own type only.
    """
    if not storage.is_trainable and value.dtype != storage.dtype:
        raise ValueError(
            f"{name}: the table is quantised to {storage.bits} bits, and the state dict has {value.dtype}. "
            "Load numbers into the model as it was, and quantise it with meshrec.quant.quantize."
        )


LookUp = Callable[[Sequence[Tensor], tbe.Lookups, tbe.LookupOptions], Tensor]
"""A function that looks up rows of some storages, with the arguments of ``ops.tbe.forward``."""


def lookup_of(storages: Sequence[RowStorage]) -> LookUp:
    """Return the function that looks up rows of several tables in one kernel, given each table's storage."""
    bits = [storage.bits for storage in storages]
    return functools.partial(nbit.forward, bits) if any(bits) else _look_up_dense


def _look_up_dense(weights: Sequence[Tensor], lookups: tbe.Lookups, options: tbe.LookupOptions) -> Tensor:
    return _look_up(list(weights), *lookups[:-1], *options)
