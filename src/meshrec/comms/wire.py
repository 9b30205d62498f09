"""Wire formats: how embedding rows and row gradients are encoded when ranks exchange them.

A format defines the bytes for a row with D values, encodes and decodes rows, and bounds the error. Sharded
modules send encoded rows, and the planner estimates the time from the encoded size. To add a format, write a
class here and add it to ``FORMATS``. ``encoding.py`` combines rows in several formats into a message. This
file depends only on tensors: the planner uses it on machines without training.
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
"""Data between nodes: sums of pooled rows, or rows; see [Note: two levels] in distributed/node_rows.py."""


class WireFormat(ABC):
    """Encoding for fp32 rows. Every row is encoded independently.

    Attributes:
        name: name in recipes, options and saved plans.
        unit: message dtype.
        kernel_dtype: dtype in which kernels write the ``encode`` input and read the ``decode`` output.
        is_cast: whether kernels write and read the message directly, because ``unit`` is ``kernel_dtype`` and
            a row is D values. ``encode`` and ``decode`` are then not called, and ranks on the same host may
            read rows in place.
        value_bytes: bytes per value.
        row_overhead: additional bytes per row, such as a scale.
        code: format number in the encoding kernels; None: use ``encode`` and ``decode``.
        stochastic: whether rounding is stochastic and unbiased.
        feedback: whether the sender adds a row's rounding error to the next gradient for the same bag (error
            feedback).
        is_for_gradients: whether the format is allowed for gradients.
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
        """Return the byte count for an encoded row with ``dim`` values."""
        return math.ceil(dim * self.value_bytes) + self.row_overhead

    def row_units(self, dim: int) -> int:
        """Return the message element count, with dtype ``unit``, for an encoded row with ``dim`` values."""
        return self.row_bytes(dim) // self.unit.itemsize

    @abstractmethod
    def encode(self, rows: Tensor) -> Tensor:
        """Encode rows [N, D] as a message [N, U] with dtype ``unit``, with U = ``row_units(D)``."""

    @abstractmethod
    def decode(self, message: Tensor, dim: int) -> Tensor:
        """Decode a message [N, U] to rows [N, dim] in ``kernel_dtype``."""

    @abstractmethod
    def error_bound(self, max_abs: float) -> float:
        """Return a decoded value's maximum absolute error.

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
    """Wire format that rounds values to a floating-point dtype."""

    is_cast = True
    row_overhead = 0

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self.unit, self.kernel_dtype, self.value_bytes = name, dtype, dtype, dtype.itemsize
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
        return max(max_abs * limits.eps, limits.smallest_normal * limits.eps) / 2


class CodedRows(WireFormat):
    """Codes with a scale and a midpoint per row; see ``ops/dist/wire_naive.py``.

    Args:
        bits: bits per code: 8, or 4 for embeddings only.
        stochastic: round stochastically, without bias.
        feedback: add a bag gradient's rounding error to the next gradient for the bag.
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
        columns = [num_rows], [0, 1], [dim], [self.code]
        message: Tensor = operators.wire_encode(rows.float(), *columns, [0], [0], [0], None, 0)[0]
        return message.view(num_rows, self.row_units(dim))

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        columns = [len(message)], [0, 1], [dim], [self._number]
        values: Tensor = operators.wire_decode(message.reshape(-1), *columns)
        return values.view(len(message), dim)

    @override
    def error_bound(self, max_abs: float) -> float:
        # Half a quantization step. The range is at most 2 * max_abs; 2^-10 covers rounding of scale (16
        # bits), midpoint and value (fp32). Stochastic rounding errs by up to a whole step.
        steps = (1 << self._bits - 1) - 1
        step = max(max_abs / steps * (1 + 2**-10), 2 * ops.MIN_SCALE)
        return step if self.stochastic else step / 2


FP32 = _Cast("fp32", torch.float32)
"""4 bytes per value, lossless."""
FP16 = _Cast("fp16", torch.float16)
"""2 bytes and 11 significant bits per value; values above 65,504 overflow to infinity."""
BF16 = _Cast("bf16", torch.bfloat16)
"""2 bytes and 8 significant bits per value, with the fp32 range."""
INT8 = CodedRows(8)
"""1 byte per value, with scale and midpoint per row; error up to 1/254 of the largest absolute value."""
INT4 = CodedRows(4)
"""Half a byte per value; error up to 1/14 of the largest absolute value."""
_VARIANTS = (
    *(CodedRows(8, stochastic=s, feedback=f) for s, f in itertools.product((False, True), repeat=2)),
    *(CodedRows(4, stochastic=s) for s in (False, True)),
)
FORMATS: dict[str, WireFormat] = {
    format.name: format for format in (FP32, FP16, BF16, INT8, INT4, *_VARIANTS)
}
"""All wire formats, by name.

``+stochastic`` rounds stochastically and unbiased: the noise depends on step, table, and ID (or bag
position in the batch). ``+feedback`` adds a bag's gradient rounding error to the next gradient for the same
bag.
"""

Wire = WireFormat | torch.dtype | str
"""Ways to name a format in an argument: a format, a format name, or a cast dtype."""


def wire_format(given: Wire) -> WireFormat:
    """Return the wire format named by an argument.

    Raises:
        ValueError: the format does not exist.
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
    """A table's wire formats in both directions: embeddings (forward), and gradients (backward).

    ``str()`` gives ``"fp16/bf16"``, or a single name if both are equal.
    """

    forward: WireFormat = FP32
    backward: WireFormat = FP32

    @classmethod
    def parse(cls, text: str) -> "WireFormats":
        """Parse a string in the ``str()`` form. Raises ValueError for other strings."""
        names = text.split("/") if isinstance(text, str) else []
        if not 1 <= len(names) <= 2:
            raise ValueError(
                f"wire formats {text!r:.100}: give one of {', '.join(FORMATS)}, or two as FORWARD/BACKWARD, "
                "such as fp16/bf16."
            )
        return cls(wire_format(names[0]), wire_format(names[-1])).validated()

    def validated(self) -> "WireFormats":
        """Return these formats. Raises ValueError if a format is not allowed in the direction."""
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
    """A module's wire formats: a default, and exceptions by table name.

    ``str()`` gives ``"int8/bf16"``, or ``"int8/bf16,users:fp32,items:int4/int8"`` with exceptions.
    """

    default: WireFormats = FULL_PRECISION
    tables: Mapping[str, WireFormats] = {}

    @classmethod
    def parse(cls, text: str) -> "TableWires":
        """Parse a string in the ``str()`` form. Raises ValueError for other strings."""
        if not isinstance(text, str):
            return cls(WireFormats.parse(text))
        first, *exceptions = text.split(",")
        tables = {}
        for exception in exceptions:
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
        """Build from the formats per table. The most frequent formats become the default."""
        formats = list(wires.values())
        default = max(formats, key=formats.count, default=FULL_PRECISION)
        return cls(default, {name: wire for name, wire in wires.items() if wire != default})

    def for_table(self, table: str) -> WireFormats:
        """Return a table's formats."""
        return self.tables.get(table, self.default)

    @override
    def __str__(self) -> str:
        return ",".join([str(self.default), *(f"{name}:{formats}" for name, formats in self.tables.items())])


FULL_WIRES = TableWires()
"""fp32 in both directions, for all tables."""


class CommsPrecision(NamedTuple):
    """Wire formats requested by a user: names (``"int8"``), dtypes (``torch.float16``), or formats.

    Args:
        forward: format for embeddings.
        backward: format for gradients.
        tables: exceptions by table name.

    Example::

        wires = CommsPrecision("int8", torch.bfloat16, {"users": CommsPrecision()}).wires
        assert str(wires) == "int8/bf16,users:fp32"
    """

    forward: Wire = torch.float32
    backward: Wire = torch.float32
    tables: Mapping[str, "CommsPrecision"] = {}

    @classmethod
    def from_wires(cls, wires: TableWires) -> "CommsPrecision":
        """Return the request for these formats."""
        return cls(*wires.default, {name: cls(*formats) for name, formats in wires.tables.items()})

    @property
    def formats(self) -> WireFormats:
        """Formats for tables without an exception. Raises ValueError if a format does not exist."""
        return WireFormats(wire_format(self.forward), wire_format(self.backward)).validated()

    @property
    def wires(self) -> TableWires:
        """Formats for all tables. Raises ValueError if a format does not exist."""
        return TableWires(self.formats, {name: table.formats for name, table in self.tables.items()})
