"""Row messages with several wire formats.

A message is a sequence of blocks, and all rows of a block have the same columns. Every column has its own
format, so tables of a module may use different formats. If all formats in a direction are the same cast,
kernels write the message directly, without this module.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.wire import WireFormat
from meshrec.ops import operators


class Columns(NamedTuple):
    """Columns of a row, in message order."""

    widths: tuple[int, ...]
    formats: tuple[WireFormat, ...]
    seeds: tuple[int, ...]
    """Seeds for stochastic rounding."""
    origins: tuple[int, ...]
    """First column within the whole table."""
    names: tuple[str, ...]
    """Column names in warnings, such as "table 't0', feature 'a'"."""
    uses: tuple[int, ...]
    """Use (a feature read from a table) per column."""

    @property
    def width(self) -> int:
        """Values per row."""
        return sum(self.widths)


class Block(NamedTuple):
    """``num_rows`` rows with the same columns. Row i seeds the rounding noise with key ``first_key + i``."""

    num_rows: int
    columns: Columns
    first_key: int = 0


class RowEncoding(NamedTuple):
    """Message dtype and encoding of a module's rows in one direction."""

    unit: torch.dtype
    """Message dtype."""
    kernel_dtype: torch.dtype
    """Dtype in which kernels write and read rows."""
    is_cast: bool
    """Whether kernels write and read the message directly."""

    @classmethod
    def of(cls, formats: Iterable[WireFormat]) -> "RowEncoding":
        """Choose the encoding for a module's rows in one direction.

        If all formats are equal, the encoding has the dtypes of that format. If they differ, messages are
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
        """Return the elements of dtype ``unit`` per encoded row."""
        pairs = zip(columns.formats, columns.widths, strict=True)
        return sum(format.row_bytes(width) for format, width in pairs) // self.unit.itemsize

    def encode(
        self, values: Tensor, blocks: Sequence[Block], *, step: int = 0, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Encode the rows of consecutive blocks into a flat message, in order.

        Args:
            values: rows, flat, of ``kernel_dtype``.
            blocks: row shapes.
            step: training step, part of the seed for stochastic rounding.
            keys: key per row, int64, instead of block keys.

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
        """Decode the rows of consecutive blocks into flat values, in order."""
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
        """Encode with the formats' own methods."""
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
    """Return the columns per source for ``gather_coded``; None if kernels lack a format."""
    blocks = [Block(0, source) for source in columns]
    return _layout(blocks)[1:] if _in_kernels(blocks) else None


def _in_kernels(blocks: Sequence[Block]) -> bool:
    return all(format.code is not None for block in blocks for format in block.columns.formats)


def _layout(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the first arguments to the kernels: rows, first columns, widths, format codes."""
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
