"""Row messages in several wire formats.

A message is a sequence of blocks. All rows in a block have the same columns, and every column has a separate
format, so tables in a module may use different formats. If all formats in a direction are the same cast,
kernels write the message directly, without this module.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.wire import WireFormat
from meshrec.ops import operators


class Columns(NamedTuple):
    """A row's columns, in message order. All tuples have an element per column."""

    widths: tuple[int, ...]  # values per column
    formats: tuple[WireFormat, ...]
    seeds: tuple[int, ...]
    """Stochastic rounding seeds."""
    origins: tuple[int, ...]
    """Start column in the whole table."""
    names: tuple[str, ...]
    """Column names in warnings, such as "table 't0', feature 'a'"."""
    uses: tuple[int, ...]
    """Use number for the column. A use is a feature read from a table."""

    @property
    def width(self) -> int:
        """Values per row."""
        return sum(self.widths)


class Block(NamedTuple):
    """Rows in a message with the same columns. Row i seeds stochastic rounding with key ``first_key + i``."""

    num_rows: int
    columns: Columns
    first_key: int = 0


class RowEncoding(NamedTuple):
    """How a module's rows are encoded in one direction (embeddings or gradients)."""

    unit: torch.dtype
    """Message dtype."""
    kernel_dtype: torch.dtype
    """Dtype in which kernels write and read rows."""
    is_cast: bool
    """Whether kernels write and read the message directly, without encoding."""

    @classmethod
    def from_formats(cls, formats: Iterable[WireFormat]) -> "RowEncoding":
        """Return the encoding for rows from tables with these formats.

        If all formats are equal, the encoding has the format's dtypes. If they differ, messages are
        uint8 and kernels use fp32. Without formats, the encoding is an fp32 cast.

        Args:
            formats: format per table; repeats do not matter.
        """
        distinct = set(formats)
        if len(distinct) == 1:
            only = distinct.pop()
            return cls(only.unit, only.kernel_dtype, only.is_cast)
        return cls(torch.uint8 if distinct else torch.float32, torch.float32, not distinct)

    def units(self, columns: Columns) -> int:
        """Return the message element count per row, with dtype ``unit``."""
        pairs = zip(columns.formats, columns.widths, strict=True)
        return sum(format.row_bytes(width) for format, width in pairs) // self.unit.itemsize

    def encode(
        self, values: Tensor, blocks: Sequence[Block], *, step: int = 0, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Encode the rows in consecutive blocks into a flat message, in order.

        Args:
            values: rows, flat, in ``kernel_dtype``.
            blocks: row count and columns per block.
            step: training step, part of the seed for stochastic rounding.
            keys: key per row, int64, instead of the blocks' keys.

        Returns:
            The message, and the kernels' report on non-finite values (see ``wire_encode``), or None if no
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
        return message.view(self.unit), report

    def decode(self, message: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Decode a message with these blocks into flat rows in ``kernel_dtype``."""
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
                format.decode(column.contiguous().view(format.unit), width).to(self.kernel_dtype)
                for column, format, width in zip(
                    columns, block.columns.formats, block.columns.widths, strict=True
                )
            ]
            parts.append(torch.cat(decoded, 1).view(-1))
            start = end
        return torch.cat(parts)

    def _encode_by_format(self, values: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Encode with every format's ``encode`` method, instead of kernels."""
        parts, start = [], 0
        for block in blocks:
            end = start + block.num_rows * block.columns.width
            columns = values.view(-1)[start:end].view(block.num_rows, -1).split(list(block.columns.widths), 1)
            coded = [
                format.encode(column.to(format.kernel_dtype)).contiguous().view(self.unit)
                for column, format in zip(columns, block.columns.formats, strict=True)
            ]
            parts.append(torch.cat(coded, 1).view(-1))
            start = end
        return torch.cat(parts)


def kernel_columns(columns: Sequence[Columns]) -> tuple[list[int], list[int], list[int]] | None:
    """Return the columns per source for ``gather_coded``; None if the kernels lack a format."""
    blocks = [Block(0, source) for source in columns]
    return _layout(blocks)[1:] if _in_kernels(blocks) else None


def _in_kernels(blocks: Sequence[Block]) -> bool:
    """Return whether the encoding kernels have all formats in these blocks."""
    return all(format.code is not None for block in blocks for format in block.columns.formats)


def _layout(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the kernels' first arguments: rows, first columns, widths, and format codes."""
    starts = [0]
    for block in blocks:
        starts.append(starts[-1] + len(block.columns.widths))
    formats = [format.code for block in blocks for format in block.columns.formats]
    return (
        [block.num_rows for block in blocks],
        starts,
        [width for block in blocks for width in block.columns.widths],
        [code for code in formats if code is not None],
    )
