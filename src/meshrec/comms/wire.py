"""Wire formats: how embedding rows and row gradients are encoded when ranks exchange them.

A format says how many bytes a row with D values takes, encodes and decodes rows, and bounds the rounding
error. Sharded modules send encoded rows, and the planner estimates the time from the encoded size. To add a
format, write a class here and add it to ``FORMATS``. ``encoding.py`` combines rows in several formats into a
message. This file does not import torch.distributed, because the planner also runs on machines which do not
train.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.ops import operators
from meshrec.ops.dist import wire_naive as ops

# Shape legend: N rows, D values in a row, U units in an encoded row.

AcrossNodes = Literal["sums", "rows"]
"""What nodes exchange: partial sums of bags, or distinct rows. See [Note: two levels] in node_rows.py."""


class WireFormat(ABC):
    """Base class for the encodings of fp32 rows in messages between ranks. Rows are encoded independently.

    Attributes:
        name: name in recipes, options and saved plans.
        unit: dtype of the message.
        kernel_dtype: dtype in which lookup kernels write rows before ``encode``, and read rows after
            ``decode``.
        is_cast: whether lookup kernels write and read the message directly, because an encoded row is just D
            values in ``kernel_dtype``. ``encode`` and ``decode`` are then not called, and ranks on the same
            host may read rows in place.
        value_bytes: bytes per value.
        row_overhead: additional bytes per row, such as for a scale.
        code: number of the format in the encoding kernels. None: the kernels do not have the format, so
            ``encode`` and ``decode`` are called.
        stochastic: whether rounding is stochastic, which makes it unbiased.
        feedback: whether the sender adds the rounding error to the next gradient for the same bag (error
            feedback).
        is_for_gradients: whether the format may be used for gradients.
    """

    name: str
    unit: torch.dtype
    kernel_dtype: torch.dtype
    is_cast: ClassVar[bool] = False
    code: int | None = None
    stochastic: bool = False
    feedback: bool = False
    is_for_gradients: bool = True
    value_bytes: float
    row_overhead: int

    def row_bytes(self, dim: int) -> int:
        """Return the bytes in an encoded row with ``dim`` values."""
        return math.ceil(dim * self.value_bytes) + self.row_overhead

    def row_units(self, dim: int) -> int:
        """Return the message elements, with dtype ``unit``, in an encoded row with ``dim`` values."""
        return self.row_bytes(dim) // self.unit.itemsize

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows [N, D] into a message [N, U] with dtype ``unit``, where U is ``row_units(D)``."""

    @abstractmethod
    def decode(self, message: Tensor, dim: int) -> Tensor:
        """Decode a message [N, U] to rows [N, dim] in ``kernel_dtype``."""

    @abstractmethod
    def error_bound(self, max_abs: float) -> float:
        """Return the largest possible absolute error of a value after encoding and decoding.

        Args:
            max_abs: largest absolute value in the row.
        """

    # Compare names: plans are broadcast, and an unpickled format must equal the original.
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
    """Wire format which rounds values to a floating-point dtype."""

    is_cast = True
    row_overhead = 0

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.unit, self.kernel_dtype, self.value_bytes = name, dtype, dtype, dtype.itemsize
        # Codes of casts in the kernels are 0, 1 and 2.
        self.code = (torch.float32, torch.float16, torch.bfloat16).index(dtype)

    @override
    def encode(self, rows: Tensor) -> Tensor:
        return rows.to(self.unit)

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        return message

    @override
    def error_bound(self, max_abs: float) -> float:
        if self.unit is torch.float32:
            return 0.0
        limits = torch.finfo(self.unit)
        if max_abs > limits.max:  # overflows to infinity
            return math.inf
        # Half a unit in the last place; below the normal range, the spacing of subnormal values is constant.
        return max(max_abs * limits.eps, limits.smallest_normal * limits.eps) / 2


class CodedRows(WireFormat):
    """Wire format which stores integer codes with a scale and a midpoint per row; see
    ``ops/dist/wire_naive.py``.

    Args:
        bits: bits per value: 8, or 4, which is for embeddings only.
        stochastic: round stochastically, without bias, instead of to the nearest code.
        feedback: add the rounding error to the next gradient for the same bag.
    """

    unit = torch.uint8
    kernel_dtype = torch.float32
    row_overhead = ops.PARAM_BYTES

    def __init__(self, bits: int, *, stochastic: bool = False, feedback: bool = False) -> None:
        self.name = "+".join([f"int{bits}", *["stochastic"] * stochastic, *["feedback"] * feedback])
        self._bits, self.value_bytes, self.is_for_gradients = bits, bits / 8, bits == 8
        self.stochastic, self.feedback = stochastic, feedback
        self._number = ops.INT8 if bits == 8 else ops.INT4
        self.code = self._number | (ops.STOCHASTIC if stochastic else 0)

    @override
    def encode(self, rows: Tensor) -> Tensor:
        num_rows, dim = rows.shape
        # A single block with a single column.
        columns = [num_rows], [0, 1], [dim], [self.code]
        message: Tensor = operators.wire_encode(rows.float(), *columns, [0], [0], [0], None, 0)[0]
        return message.view(num_rows, self.row_units(dim))

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        # Decoding is the same with and without stochastic rounding.
        columns = [len(message)], [0, 1], [dim], [self._number]
        values: Tensor = operators.wire_decode(message.reshape(-1), *columns)
        return values.view(len(message), dim)

    @override
    def error_bound(self, max_abs: float) -> float:
        # Half a quantization step. The range is at most 2 * max_abs; 2^-10 covers rounding of scale (16
        # bits), midpoint and value (fp32). Stochastic rounding errs by up to a whole step.
        steps = (1 << self._bits - 1) - 1
        # Rows with a tiny range get the minimum scale.
        step = max(max_abs / steps * (1 + 2**-10), 2 * ops.MIN_SCALE)
        return step if self.stochastic else step / 2


FP32 = _Cast("fp32", torch.float32)
"""4 bytes per value, lossless."""
FP16 = _Cast("fp16", torch.float16)
"""2 bytes and 11 significant bits per value; values above 65,504 overflow to infinity."""
BF16 = _Cast("bf16", torch.bfloat16)
"""2 bytes and 8 significant bits per value, with the fp32 range."""
INT8 = CodedRows(8)
"""1 byte per value, with a scale and a midpoint per row. The error is at most about 1/254 of the row's
largest absolute value.
"""
INT4 = CodedRows(4)
"""Half a byte per value, with a scale and a midpoint per row. The error is at most about 1/14 of the row's
largest absolute value.
"""
_VARIANTS = (
    *(CodedRows(8, stochastic=s, feedback=f) for s, f in itertools.product((False, True), repeat=2)),
    *(CodedRows(4, stochastic=s) for s in (False, True)),
)
FORMATS: dict[str, WireFormat] = {
    format.name: format for format in (FP32, FP16, BF16, INT8, INT4, *_VARIANTS)
}
"""All wire formats, by name.

Names with ``+stochastic`` round stochastically, without bias. The random numbers depend on the step, the
table, and the ID (or the position of the bag in the batch). Names with ``+feedback`` add the rounding error
of a bag's gradient to the next gradient for the same bag.
"""

Wire = WireFormat | torch.dtype | str
"""A wire format as an argument: a format, the name of a format, or the dtype to which values are rounded."""


def wire_format(given: Wire) -> WireFormat:
    """Return the wire format for an argument: a format, the name of a format, or a dtype such as
    torch.float16.

    Raises:
        ValueError: the format is unknown.
    """
    if isinstance(given, WireFormat):
        return given
    if isinstance(given, torch.dtype):
        format = next((f for f in FORMATS.values() if f.is_cast and f.unit is given), None)
    else:
        format = FORMATS.get(given) if isinstance(given, str) else None
    if format is None:
        raise ValueError(
            f"wire format {given!r:.100} is unknown. Embeddings and gradients travel as {', '.join(FORMATS)}."
        )
    return format


class WireFormats(NamedTuple):
    """The wire formats of a table: for embeddings (forward), and for gradients (backward).

    ``str()`` returns for example ``"fp16/bf16"``, or a single name if both formats are equal.
    """

    forward: WireFormat = FP32
    backward: WireFormat = FP32

    @classmethod
    def parse(cls, text: str) -> "WireFormats":
        """Parse a string such as ``"fp16/bf16"`` or ``"fp16"``.

        Raises:
            ValueError: the string is not of this form, or a format does not exist or is not allowed.
        """
        names = text.split("/") if isinstance(text, str) else []
        if not 1 <= len(names) <= 2:
            raise ValueError(
                f"wire formats {text!r:.100}: give one of {', '.join(FORMATS)}, or two as FORWARD/BACKWARD, "
                "such as fp16/bf16."
            )
        return cls(wire_format(names[0]), wire_format(names[-1])).validated()

    def validated(self) -> "WireFormats":
        """Return this object after checking that both formats are allowed in their direction.

        Raises:
            ValueError: a format is not allowed.
        """
        if not self.backward.is_for_gradients:
            allowed = ", ".join(name for name, format in FORMATS.items() if format.is_for_gradients)
            raise ValueError(
                f"wire format {self.backward} is for embeddings only; gradients travel as {allowed}. "
                f"Give both directions, such as {self.forward}/int8."
            )
        if self.forward.feedback:
            raise ValueError(
                f"wire format {self.forward}: feedback is for gradients, which add up from step to step. "
                f"Give both directions, such as int8/{self.forward}."
            )
        return self

    @override
    def __str__(self) -> str:
        forward, backward = self.forward.name, self.backward.name
        return forward if forward == backward else f"{forward}/{backward}"


FULL_PRECISION = WireFormats()
"""fp32 in both directions."""


class TableWires(NamedTuple):
    """The wire formats of all tables in a module: a default, and exceptions by table name.

    ``str()`` returns for example ``"int8/bf16"``, or with exceptions
    ``"int8/bf16,users:fp32,items:int4/int8"``.
    """

    default: WireFormats = FULL_PRECISION
    tables: Mapping[str, WireFormats] = {}

    @classmethod
    def parse(cls, text: str) -> "TableWires":
        """Parse a string such as ``"int8/bf16,users:fp32"``.

        Raises:
            ValueError: the string is not of this form, or a format does not exist or is not allowed.
        """
        # Raises the error for other types.
        if not isinstance(text, str):
            return cls(WireFormats.parse(text))
        first, *exceptions = text.split(",")
        tables = {}
        for exception in exceptions:
            # The last colon, because table names may contain colons.
            name, colon, formats = exception.strip().rpartition(":")
            if not colon or not name or name in tables:
                raise ValueError(
                    f"wire formats {text!r:.100}: after the formats of all tables, give TABLE:FORMATS for "
                    f"each exception once, such as int8/bf16,users:fp32; got {exception.strip()!r:.100}."
                )
            tables[name] = WireFormats.parse(formats)
        return cls(WireFormats.parse(first.strip()), tables)

    @classmethod
    def from_tables(cls, wires: Mapping[str, WireFormats]) -> "TableWires":
        """Create the object from the formats of every table, by table name.

        The most frequent formats become the default.
        """
        formats = list(wires.values())
        default = max(formats, key=formats.count, default=FULL_PRECISION)
        return cls(default, {name: wire for name, wire in wires.items() if wire != default})

    def for_table(self, table: str) -> WireFormats:
        """Return the formats of the table with this name."""
        return self.tables.get(table, self.default)

    @override
    def __str__(self) -> str:
        return ",".join([str(self.default), *(f"{name}:{formats}" for name, formats in self.tables.items())])


FULL_WIRES = TableWires()
"""fp32 in both directions, for all tables."""


class CommsPrecision(NamedTuple):
    """The user's choice of encodings for messages between ranks, for a sharder.

    Formats are given as names (``"int8"``), dtypes (``torch.float16``), or `WireFormat` objects.

    Args:
        forward: format for embeddings.
        backward: format for gradients.
        tables: exceptions by table name, as CommsPrecision objects.

    Example::

        wires = CommsPrecision("int8", torch.bfloat16, {"users": CommsPrecision()}).wires
        assert str(wires) == "int8/bf16,users:fp32"
    """

    forward: Wire = torch.float32
    backward: Wire = torch.float32
    tables: Mapping[str, "CommsPrecision"] = {}

    @classmethod
    def from_wires(cls, wires: TableWires) -> "CommsPrecision":
        """Return the CommsPrecision object which results in these formats."""
        return cls(*wires.default, {name: cls(*formats) for name, formats in wires.tables.items()})

    @property
    def formats(self) -> WireFormats:
        """Formats for tables without an exception.

        Raises:
            ValueError: a format does not exist or is not allowed.
        """
        return WireFormats(wire_format(self.forward), wire_format(self.backward)).validated()

    @property
    def wires(self) -> TableWires:
        """Formats for all tables, including exceptions.

        Raises:
            ValueError: a format does not exist or is not allowed.
        """
        return TableWires(self.formats, {name: table.formats for name, table in self.tables.items()})
