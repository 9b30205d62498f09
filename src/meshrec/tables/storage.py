"""How the rows of a table lie in memory: behind one protocol, for whole tables and for rectangles of them.

All else of a table (which rectangles a rank holds, how they share a parameter, its optimizer, its state dict,
routing and output) is the same for every storage.
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
        """Of the memory."""

    @property
    def bits(self) -> int:
        """Of a code, where rows are quantised; 0 where they are numbers."""

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """What the rows consist of; ``weight`` comes first."""

    @property
    def is_trainable(self) -> bool:
        """Whether rows can be updated; otherwise they are read only, and keep no optimizer state."""

    def columns(self, dim: int) -> int:
        """The elements that a row of ``dim`` numbers takes."""

    def part_column(self, column: int) -> int:
        """Where in the part ``weight`` the number at ``column`` begins, or a row of so many ends."""

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Memory ``[num_rows, columns]``, not filled."""

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Make the index of a rectangle's rows; None where the slot of a key is ``key - first_row``."""

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """What ``allocate`` takes for rows of ``dim`` numbers, without optimizer state."""

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """The optimizer state of ``num_rows`` rows before their first update, by slot; None: no state."""

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """``row_parts`` of rows of ``dim`` numbers, in their memory."""

    def encode(self, numbers: Tensor) -> Tensor:
        """Whole rows ``[n, dim]`` of numbers as rows of this kind.

        Raises:
            ValueError: for numbers that it cannot hold.
        """


class SideRows(ABC):
    """A storage whose tables keep their rows themselves, and not in the memory of a parameter.

    A sharded module asks it for its tables. An unsharded one has ordinary memory (``RowStorage.allocate``).
    """

    may_fail = False
    """Whether rows may fail to come on one rank alone, so that ranks ask each other before each lookup."""

    @abstractmethod
    def table(
        self, rectangle: Rectangle, spec: OptimizerSpec | None, device: torch.device | None
    ) -> SideTable:
        """Make a rectangle of a table; see [Note: what a table is] in ``tables/table.py``.

        ``spec``: the optimizer that will change the rows.
        """


@dataclass(frozen=True)
class DenseRows:
    """Rows as they are: fp32, fp16 or bf16, ``dim`` elements each, with fp32 state beside them."""

    dtype: torch.dtype
    is_trainable = True
    bits = 0

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        """``weight`` alone."""
        return (RowPart("weight", self.dtype, False),)

    def columns(self, dim: int) -> int:
        """``dim``."""
        return dim

    def part_column(self, column: int) -> int:
        """``column``."""
        return column

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """On huge pages, where it is large and on the CPU."""
        return empty_pages((num_rows, columns), self.dtype, device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """Rows without gaps."""
        return num_rows * dim * self.dtype.itemsize

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """fp32, one tensor per slot of the spec, ``[num_rows]`` or ``[num_rows, dim]``."""
        return [
            empty_pages(slot.shape(num_rows, dim), torch.float32, device).fill_(slot.initial_value)
            for slot in (spec.state_slots() if spec is not None else ())
        ]

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """The rows."""
        return [rows]

    def encode(self, numbers: Tensor) -> Tensor:
        """In this type."""
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
        """Scale, bias and codes, a multiple of 4 bytes."""
        return nbit.row_bytes(dim, self.bits)

    def part_column(self, column: int) -> int:
        """In bytes of codes. Columns may be cut where a byte begins."""
        return nbit.code_bytes(column, self.bits)

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """On huge pages, where it is large and on the CPU."""
        return empty_pages((num_rows, columns), self.dtype, device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        """With the bytes that fill up rows."""
        return num_rows * self.columns(dim)

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """None."""
        assert spec is None
        return []

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Codes, scales and biases."""
        params = rows.view(torch.float16)
        codes = rows[:, nbit.PARAM_BYTES : nbit.PARAM_BYTES + self.part_column(dim)]
        return [codes, params[:, 0], params[:, 1]]

    def encode(self, numbers: Tensor) -> Tensor:
        """Rounded as FBGEMM does."""
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
    """Raises ValueError where a state dict's ``weight`` would have to be encoded.

    Read-only rows take their own type alone, others any numbers.
    """
    if not storage.is_trainable and value.dtype != storage.dtype:
        raise ValueError(
            f"{name}: the table is quantised to {storage.bits} bits, and the state dict has {value.dtype}. "
            "Load numbers into the model as it was, and quantise it with meshrec.quant.quantize."
        )


LookUp = Callable[[Sequence[Tensor], tbe.Lookups, tbe.LookupOptions], Tensor]
"""A function that looks up rows of some storages, with the arguments of ``ops.tbe.forward``."""


def lookup_of(storages: Sequence[RowStorage]) -> LookUp:
    """What looks up and pools rows of several tables in one kernel; ``storages``: of each of them."""
    bits = [storage.bits for storage in storages]
    return functools.partial(nbit.forward, bits) if any(bits) else _look_up_dense


def _look_up_dense(weights: Sequence[Tensor], lookups: tbe.Lookups, options: tbe.LookupOptions) -> Tensor:
    return _look_up(list(weights), *lookups[:-1], *options)
