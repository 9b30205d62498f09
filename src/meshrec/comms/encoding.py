"""Encode rows into messages between ranks, with a wire format per table.

A message is a sequence of blocks, which are runs of rows with the same columns. A column is the part of a row
that belongs to a lookup in a table; it contains several values and has a wire format. If all tables in a
module use the same cast format in a direction, kernels read and write the message directly, without this
module.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.wire import WireFormat
from meshrec.ops import operators


class Columns(NamedTuple):
    """Layout of a row in a message. All tuples have an entry per column, in message order.

    A column is the part of a row that belongs to one lookup in a table. It is several values wide.
    """

    widths: tuple[int, ...]  # values in the column
    formats: tuple[WireFormat, ...]
    seeds: tuple[int, ...]
    """Seed for stochastic rounding."""
    origins: tuple[int, ...]
    """Number of the table column from which the first value comes. It is part of the rounding seed, so
    different column shards of a table row round differently.
    """
    names: tuple[str, ...]
    """Name for warnings, such as "table 't0', feature 'a'"."""
    uses: tuple[int, ...]
    """Number of the use to which the column belongs. A use is a feature looked up in a table."""

    @property
    def width(self) -> int:
        """Values in a row."""
        return sum(self.widths)


class Block(NamedTuple):
    """Adjacent rows in a message that have the same columns."""

    num_rows: int
    columns: Columns
    first_key: int = 0
    """Row i uses the key ``first_key + i`` to seed stochastic rounding."""


class RowEncoding(NamedTuple):
    """How a module encodes rows in one direction: embeddings or gradients."""

    unit: torch.dtype
    """Dtype of the message. A *unit* is an element of the message."""
    kernel_dtype: torch.dtype
    """Dtype in which lookup kernels write and read rows."""
    is_cast: bool
    """Whether lookup kernels write and read the message directly, without encoding."""

    @classmethod
    def from_formats(cls, formats: Iterable[WireFormat]) -> "RowEncoding":
        """Return the encoding for a module whose tables have these formats.

        If all formats are equal, the encoding has the format's dtypes. If they differ, messages are uint8 and
        kernels use fp32. Without formats, rows are sent as fp32.
        """
        # Formats compare by name.
        distinct = set(formats)
        if len(distinct) == 1:
            only = distinct.pop()
            return cls(only.unit, only.kernel_dtype, only.is_cast)
        # Different formats share only bytes as a common unit.
        return cls(torch.uint8 if distinct else torch.float32, torch.float32, not distinct)

    def units(self, columns: Columns) -> int:
        """Return the number of message elements, with dtype ``unit``, for a row with these columns."""
        pairs = zip(columns.formats, columns.widths, strict=True)
        return sum(format.row_bytes(width) for format, width in pairs) // self.unit.itemsize

    def encode(
        self, values: Tensor, blocks: Sequence[Block], *, step: int = 0, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Encode rows into a flat message.

        Args:
            values: rows, flat, block by block, in ``kernel_dtype``.
            blocks: row count and columns for every block.
            step: training step, which is part of the seed for stochastic rounding.
            keys: key for every row, int64, used for stochastic rounding instead of the blocks' keys.

        Returns:
            The message, and the kernels' report on infinity and NaN (see ``wire_encode``), or None if no
            kernel ran.
        """
        # Empty blocks have no bytes, and view() cannot infer their shape.
        blocks = [block for block in blocks if block.num_rows and block.columns.width]
        if not blocks:
            return values.new_empty(0, dtype=self.unit), None
        if self.is_cast or not _in_kernels(blocks):
            return self._encode_by_format(values, blocks), None
        message, report = operators.wire_encode(
            values.view(-1),
            *_layout(blocks),
            [seed for block in blocks for seed in block.columns.seeds],
            [origin for block in blocks for origin in block.columns.origins],
            [block.first_key for block in blocks],
            keys,
            step,
        )
        # Kernels write bytes.
        return message.view(self.unit), report

    def decode(self, message: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Decode a message to rows, flat, in ``kernel_dtype``."""
        blocks = [block for block in blocks if block.num_rows and block.columns.width]
        if not blocks:
            return message.new_empty(0, dtype=self.kernel_dtype)
        if not self.is_cast and _in_kernels(blocks):
            values: Tensor = operators.wire_decode(message.view(torch.uint8), *_layout(blocks))
            return values.to(self.kernel_dtype)
        parts, start = [], 0
        for block in blocks:
            units = [
                format.row_bytes(width) // self.unit.itemsize
                for format, width in zip(block.columns.formats, block.columns.widths, strict=True)
            ]
            end = start + block.num_rows * sum(units)
            columns = message[start:end].view(block.num_rows, sum(units)).split(units, 1)
            decoded = [
                # A view with another dtype needs adjacent elements.
                format.decode(column.contiguous().view(format.unit), width).to(self.kernel_dtype)
                for column, format, width in zip(
                    columns, block.columns.formats, block.columns.widths, strict=True
                )
            ]
            parts.append(torch.cat(decoded, 1).view(-1))
            start = end
        return torch.cat(parts)

    def _encode_by_format(self, values: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Encode each column with its format's ``encode`` method, for formats unknown to the kernels."""
        parts, start = [], 0
        for block in blocks:
            end = start + block.num_rows * block.columns.width
            columns = values.view(-1)[start:end].view(block.num_rows, -1).split(list(block.columns.widths), 1)
            # Formats without kernels encode a column of all rows at once.
            coded = [
                format.encode(column.to(format.kernel_dtype)).contiguous().view(self.unit)
                for column, format in zip(columns, block.columns.formats, strict=True)
            ]
            parts.append(torch.cat(coded, 1).view(-1))
            start = end
        return torch.cat(parts)


def kernel_columns(columns: Sequence[Columns]) -> tuple[list[int], list[int], list[int]] | None:
    """Return the arguments with which the op ``gather_coded`` decodes received rows.

    Args:
        columns: layout of a row from each source rank.

    Returns:
        The number of the first column from every source rank (followed by the total number), the width of
        every column, and the format code of every column. None if the kernels do not implement a format.
    """
    blocks = [Block(0, source) for source in columns]
    # Without the row counts, which differ by batch.
    return _layout(blocks)[1:] if _in_kernels(blocks) else None


def _in_kernels(blocks: Sequence[Block]) -> bool:
    """Return whether the encoding kernels implement all formats in these blocks."""
    return all(format.code is not None for block in blocks for format in block.columns.formats)


def _layout(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the layout of a message as the kernels read it.

    Returns:
        The row count of every block, the number of every block's first column (followed by the total
        number), the width of every column, and the format code of every column.
    """
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block.columns.widths))
    formats = [format.code for block in blocks for format in block.columns.formats]
    return (
        [block.num_rows for block in blocks],
        starts,
        [width for block in blocks for width in block.columns.widths],
        # `_in_kernels` has checked that every format has a code.
        [code for code in formats if code is not None],
    )
