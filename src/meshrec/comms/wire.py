"""Wire formats: how rows of embeddings, and rows of their gradients, are encoded between ranks.

A format says how many bytes a row of D values takes, encodes and decodes such rows, and bounds the error.
The sharded modules send what it makes, the planner prices what it weighs; neither knows more of it, so that
a new format is a class here and an entry in ``FORMATS``. This file knows tensors only: the planner reads it
on machines that train nothing.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

# N rows, D values of a row, U units of an encoded row


class WireFormat(ABC):
    """An encoding of rows of fp32 values, each row on its own.

    Attributes:
        name: what recipes, options and saved plans call it.
        unit: the dtype of the tensor that travels.
        kernel_dtype: the dtype in which kernels write the values that ``encode`` takes, and read what
            ``decode`` gives.
        is_cast: whether the kernels write and read the message themselves, because ``unit`` is
            ``kernel_dtype`` and a row is its D values. Then nothing calls ``encode`` and ``decode`` on the
            way, and ranks of one host may read each other's rows where they lie.
        value_bytes: bytes of one value.
        row_overhead: bytes of a row beside its values, such as a scale.
    """

    name: str
    unit: torch.dtype
    kernel_dtype: torch.dtype
    is_cast: ClassVar[bool] = False
    value_bytes: float
    row_overhead: int

    def row_bytes(self, dim: int) -> int:
        """Return the bytes of an encoded row of ``dim`` values."""
        return math.ceil(dim * self.value_bytes) + self.row_overhead

    def row_units(self, dim: int) -> int:
        """Return the elements of an encoded row of ``dim`` values, counted in ``unit``."""
        return self.row_bytes(dim) // self.unit.itemsize

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows [N, D]; the result is [N, U] of dtype ``unit``, with U = ``row_units(D)``."""

    @abstractmethod
    def decode(self, message: Tensor, dim: int) -> Tensor:
        """Decode a message [N, U] to rows [N, dim] of ``kernel_dtype``."""

    @abstractmethod
    def error_bound(self, largest: float) -> float:
        """Return how far a decoded value may be from the value that was encoded.

        Args:
            largest: the largest absolute value of the row.
        """

    # By name: plans are broadcast, and an unpickled format must equal its original.
    @override
    def __eq__(self, other: object) -> bool:
        return isinstance(other, WireFormat) and type(other) is type(self) and other.name == self.name

    @override
    def __hash__(self) -> int:
        return hash(self.name)

    @override
    def __repr__(self) -> str:
        return self.name


class _Cast(WireFormat):
    """Values rounded to the nearest value of a floating-point dtype."""

    is_cast = True
    row_overhead = 0

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.unit, self.kernel_dtype, self.value_bytes = name, dtype, dtype, dtype.itemsize

    @override
    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.unit)

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        return message

    @override
    def error_bound(self, largest: float) -> float:
        if self.unit is torch.float32:
            return 0.0
        limits = torch.finfo(self.unit)
        if largest > limits.max:  # such values arrive as infinity
            return math.inf
        return max(largest * limits.eps, limits.smallest_normal * limits.eps) / 2


FP32 = _Cast("fp32", torch.float32)
"""Four bytes per value, without rounding."""
FP16 = _Cast("fp16", torch.float16)
"""Half the bytes and 11 significant bits; values above 65,504 overflow to infinity."""
BF16 = _Cast("bf16", torch.bfloat16)
"""Half the bytes and 8 significant bits, with the range of fp32."""
FORMATS: dict[str, WireFormat] = {each.name: each for each in (FP32, FP16, BF16)}
"""Every wire format, by name."""

Wire = WireFormat | torch.dtype | str
"""The names that callers may use for a format: itself, its name, or the dtype that values are cast to."""


def wire_format(given: Wire) -> WireFormat:
    """Return the format that ``given`` names.

    Raises:
        ValueError: for anything that names no format.
    """
    if isinstance(given, WireFormat):
        return given
    if isinstance(given, torch.dtype):
        found = next((each for each in FORMATS.values() if each.is_cast and each.unit is given), None)
    else:
        found = FORMATS.get(given) if isinstance(given, str) else None
    if found is None:
        raise ValueError(
            f"wire format {given!r} is unknown. Embeddings and gradients travel as {', '.join(FORMATS)}."
        )
    return found


class WireFormats(NamedTuple):
    """The format of embeddings on their way to the ranks that asked, and of their gradients on the way back.

    As text ``"fp16/bf16"``, or one name where both are the same.
    """

    forward: WireFormat = FP32
    backward: WireFormat = FP32

    @classmethod
    def parse(cls, text: str) -> "WireFormats":
        """Read what ``str`` wrote. Raises ValueError for other text."""
        names = text.split("/") if isinstance(text, str) else []
        if not 1 <= len(names) <= 2:
            raise ValueError(
                f"wire formats {text!r}: give one of {', '.join(FORMATS)}, or two as FORWARD/BACKWARD, such "
                "as fp16/bf16."
            )
        return cls(wire_format(names[0]), wire_format(names[-1]))

    @override
    def __str__(self) -> str:
        forward, backward = self.forward.name, self.backward.name
        return forward if forward == backward else f"{forward}/{backward}"


FULL_PRECISION = WireFormats()
"""fp32 both ways."""


class CommsPrecision(NamedTuple):
    """The wire formats that a sharder is asked for: names (``"fp16"``), dtypes (``torch.float16``), formats.

    ``forward`` is for embeddings, ``backward`` for their gradients.
    """

    forward: Wire = torch.float32
    backward: Wire = torch.float32

    @property
    def formats(self) -> WireFormats:
        """The formats themselves. Raises ValueError for unknown ones."""
        return WireFormats(wire_format(self.forward), wire_format(self.backward))


class Block(NamedTuple):
    """``num_rows`` rows of a flat tensor, each of which holds one row to encode for each of ``widths``."""

    num_rows: int
    widths: Sequence[int]


def encode_blocks(wire: WireFormat, values: Tensor, blocks: Iterable[Block]) -> Tensor:
    """Encode the rows of consecutive blocks; the message, flat, keeps their order."""
    parts, start = [], 0
    for rows, widths in _joined(blocks):
        end = start + rows * sum(widths)
        columns = values.view(-1)[start:end].view(rows, sum(widths)).split(list(widths), 1)
        parts.append(torch.cat([wire.encode(column) for column in columns], 1).view(-1))
        start = end
    return torch.cat(parts) if parts else values.new_empty(0, dtype=wire.unit)


def decode_blocks(wire: WireFormat, message: Tensor, blocks: Iterable[Block]) -> Tensor:
    """Decode the rows of consecutive blocks; the values, flat, keep their order."""
    parts, start = [], 0
    for rows, widths in _joined(blocks):
        units = [wire.row_units(width) for width in widths]
        end = start + rows * sum(units)
        columns = message[start:end].view(rows, sum(units)).split(units, 1)
        decoded = [wire.decode(column, width) for column, width in zip(columns, widths, strict=True)]
        parts.append(torch.cat(decoded, 1).view(-1))
        start = end
    return torch.cat(parts) if parts else message.new_empty(0, dtype=wire.kernel_dtype)


def _joined(blocks: Iterable[Block]) -> Iterator[Block]:
    """Blocks in as few pieces as possible: rows of one width that follow each other are one block."""
    last = Block(0, (0,))
    for rows, widths in blocks:
        block = Block(rows, widths)
        if len(widths) and len(set(widths)) == 1:
            block = Block(rows * len(widths), (widths[0],))
        if not block.num_rows or not block.widths:
            continue
        if tuple(block.widths) == tuple(last.widths):
            last = Block(last.num_rows + block.num_rows, last.widths)
            continue
        if last.num_rows:
            yield last
        last = block
    if last.num_rows:
        yield last
