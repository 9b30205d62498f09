"""Messages of rows in several wire formats.

A message is a sequence of blocks; all rows of a block have the same columns. Each column of a row is
encoded by its own format, so that tables of one module may travel in different ones. Where all formats of a
direction are one cast, kernels write the message themselves, and nothing here is called.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.comms.wire import WireFormat


class Columns(NamedTuple):
    """The columns of a row, in the order in which they travel."""

    widths: tuple[int, ...]
    formats: tuple[WireFormat, ...]
    seeds: tuple[int, ...]
    """The seeds of stochastic rounding."""
    origins: tuple[int, ...]
    """The places of the columns in their whole tables."""
    names: tuple[str, ...]
    """The names of the columns in warnings, such as "table 't0', feature 'a'"."""
    uses: tuple[int, ...]
    """The use (a feature read in a table) of each column."""

    @property
    def width(self) -> int:
        """The number of values of a row."""
        return sum(self.widths)


class Block(NamedTuple):
    """``num_rows`` rows with the same columns. Row i draws its noise with the key ``first_key + i``."""

    num_rows: int
    columns: Columns
    first_key: int = 0


class RowEncoding(NamedTuple):
    """The common part of the formats of one direction of a module."""

    unit: torch.dtype
    """The dtype of the tensor that travels."""
    kernel_dtype: torch.dtype
    """The dtype in which kernels write the rows, and read them."""
    is_cast: bool
    """Whether the kernels write and read the message themselves."""

    @classmethod
    def of(cls, formats: Iterable[WireFormat]) -> "RowEncoding":
        """Return the encoding for all rows of a direction."""
        distinct = set(formats)
        if len(distinct) == 1:
            only = distinct.pop()
            return cls(only.unit, only.kernel_dtype, only.is_cast)
        return cls(torch.uint8 if distinct else torch.float32, torch.float32, not distinct)

    def units(self, columns: Columns) -> int:
        """Return the elements of an encoded row."""
        pairs = zip(columns.formats, columns.widths, strict=True)
        return sum(format.row_bytes(width) for format, width in pairs) // self.unit.itemsize

    def encode(
        self, values: Tensor, blocks: Sequence[Block], *, step: int = 0, keys: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Encode the rows of consecutive blocks; the message, flat, keeps their order.

        Args:
            values: the rows, flat, of ``kernel_dtype``.
            blocks: the shapes of the rows.
            step: the training step, from which stochastic rounding draws.
            keys: a key for each row, int64, in place of those of the blocks.

        Returns:
            The message, and the report of the kernels on values that are not finite (see ``wire_encode``),
            or None if no kernel has run.
        """
        blocks = [block for block in blocks if block.num_rows and block.columns.width]
        if not blocks:
            return values.new_empty(0, dtype=self.unit), None
        if self.is_cast or not _in_kernels(blocks):
            return self._encoded(values, blocks), None
        message, report = torch.ops.meshrec.wire_encode.default(
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
        """Decode the rows of consecutive blocks; the values, flat, keep their order."""
        blocks = [block for block in blocks if block.num_rows and block.columns.width]
        if not blocks:
            return message.new_empty(0, dtype=self.kernel_dtype)
        if not self.is_cast and _in_kernels(blocks):
            values: Tensor = torch.ops.meshrec.wire_decode.default(
                message.view(torch.uint8), *_layout(blocks)
            )
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

    def _encoded(self, values: Tensor, blocks: Sequence[Block]) -> Tensor:
        """Encode by the formats' own methods."""
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
    """Return the columns of each source as ``gather_coded`` reads them; None if kernels lack a format."""
    blocks = [Block(0, each) for each in columns]
    return _layout(blocks)[1:] if _in_kernels(blocks) else None


def _in_kernels(blocks: Sequence[Block]) -> bool:
    return all(format.code is not None for block in blocks for format in block.columns.formats)


def _layout(blocks: Sequence[Block]) -> tuple[list[int], list[int], list[int], list[int]]:
    """Return the first arguments of the kernels."""
    begins = [0]
    for block in blocks:
        begins.append(begins[-1] + len(block.columns.widths))
    formats = [format.code for block in blocks for format in block.columns.formats]
    return (
        [block.num_rows for block in blocks],
        begins,
        [width for block in blocks for width in block.columns.widths],
        [code for code in formats if code is not None],
    )
