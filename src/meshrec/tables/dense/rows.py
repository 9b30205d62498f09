"""Row storage of fixed tables: floating-point rows, or quantised rows with a scale and a bias."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshrec.ops import nbit
from meshrec.ops.memory import empty_pages
from meshrec.optim.optimizers import OptimizerSpec
from meshrec.tables.index import Index
from meshrec.tables.table import RowPart


@dataclass(frozen=True)
class DenseRows:
    """Storage for floating-point rows in the parameter's memory. Optimizer state is fp32.

    A row in memory is the row's values without conversion, so most methods return their input. See
    ``RowStorage`` for the methods.

    Args:
        dtype: row dtype: fp32, fp16 or bf16.
    """

    dtype: torch.dtype
    is_trainable = True
    bits = 0
    rows_in_parameter = True
    collects_gradients = True
    is_growable = may_fail = needs_row_sums = False

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (RowPart("weight", self.dtype, False),)

    def columns(self, dim: int) -> int:
        """Return ``dim``: a row takes one element per value."""
        return dim

    def part_column(self, column: int) -> int:
        """Return ``column``: column i of the table is also column i of the row part ``weight``."""
        return column

    def allocate(self, num_rows: int, columns: int, device: torch.device | None) -> Tensor:
        """Allocate uninitialized row memory [num_rows, columns].

        Args:
            num_rows: row count.
            columns: elements per row.
            device: memory device.
        """
        return empty_pages((num_rows, columns), self.dtype, device)

    def index(self, first_row: int, num_rows: int) -> Index | None:
        """Return None: the row with key ``k`` is at position ``k - first_row``, so no index is needed."""
        return None

    def num_bytes(self, num_rows: int, dim: int) -> int:
        return num_rows * self.columns(dim) * self.dtype.itemsize

    def new_state(
        self, spec: OptimizerSpec | None, num_rows: int, dim: int, device: torch.device | None
    ) -> list[Tensor]:
        """Create initial optimizer state: per state slot an fp32 tensor, [num_rows] or [num_rows, dim].

        Args:
            spec, num_rows, dim, device: see `RowStorage.new_state`.
        """
        # Quantised rows are read-only, and have no optimizer state.
        assert spec is None or self.is_trainable
        # Huge pages where the system has them, as for the rows: kernels read state at random positions.
        return [
            empty_pages(slot.shape(num_rows, dim), torch.float32, device).fill_(slot.initial_value)
            for slot in (spec.state_slots() if spec is not None else ())
        ]

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return ``[rows]``: the only row part is ``weight``."""
        return [rows]

    def encode(self, values: Tensor) -> Tensor:
        """Return row values [n, dim] cast to ``dtype``."""
        return values.to(self.dtype)


@dataclass(frozen=True)
class QuantisedRows(DenseRows):
    """Storage for read-only rows of integer codes, with a scale and a bias per row; see ``ops.nbit``.

    The value of a code is ``code * scale + bias``. A column shard keeps the scale and bias of the whole row,
    so the values equal those of the whole table.

    Args:
        bits: bits per code: 8, 4 or 2.
    """

    dtype: torch.dtype = field(default=torch.uint8, init=False)
    bits: int = field()
    is_trainable = False

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return (
            RowPart("weight", torch.uint8, False),
            RowPart("weight_qscale", torch.float16, True),
            RowPart("weight_qbias", torch.float16, True),
        )

    def columns(self, dim: int) -> int:
        """Return the bytes per row of ``dim`` values: scale, bias and codes, padded to a multiple of 4."""
        return nbit.row_bytes(dim, self.bits)

    def part_column(self, column: int) -> int:
        """Return the byte, counted from the first code byte, at which the code of a column starts.

        Tables can be split only between columns that start a byte.
        """
        return nbit.code_bytes(column, self.bits)

    def parts(self, rows: Tensor, dim: int) -> list[Tensor]:
        """Return views of the codes (uint8 [n, bytes]), scales and biases (fp16 [n]) in row memory."""
        # A row is scale and bias (two fp16), then the codes, then padding.
        params = rows.view(torch.float16)
        codes = rows[:, nbit.PARAM_BYTES : nbit.PARAM_BYTES + self.part_column(dim)]
        return [codes, params[:, 0], params[:, 1]]

    def encode(self, values: Tensor) -> Tensor:
        """Quantise row values [n, dim] to row memory, uint8 [n, columns(dim)], with FBGEMM's rounding."""
        return nbit.quantize(values, self.bits)


def row_format(dtype: torch.dtype, bits: int) -> DenseRows:
    """Return the storage for rows in memory with an element type, or with quantised values."""
    return QuantisedRows(bits) if bits else DenseRows(dtype)
