"""Wire formats: how rows of embeddings, and rows of their gradients, are encoded between ranks.

A format says how many bytes a row of D values takes, encodes and decodes such rows, and bounds the error.
The sharded modules send what it makes, the planner prices what it weighs; neither knows more of it, so that
a new format is a class here and an entry in ``FORMATS``. ``encoding.py`` puts rows of several formats into
one message. This file knows tensors only: the planner reads it on machines that train nothing.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.ops.dist import wire_naive as ops

# N rows, D values of a row, U units of an encoded row

AcrossNodes = Literal["sums", "rows"]
"""The exchange between nodes, see [Note: two levels] in distributed/node_rows.py."""


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
        code: the number of the format in the kernels that encode messages; None: ``encode`` and
            ``decode`` do.
        stochastic: whether values are rounded at random, with the right mean.
        feedback: whether the sender keeps what rounding took from a row, and adds it to the next row of the
            same bag.
        is_for_gradients: whether gradients may travel in it.
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
        self.code = (torch.float32, torch.float16, torch.bfloat16).index(dtype)

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


class CodedRows(WireFormat):
    """Signed codes of a row with the row's scale and middle, see ``ops/dist/wire_naive.py``.

    ``bits``: 8, or 4 for embeddings only.
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
        message: Tensor = torch.ops.meshrec.wire_encode.default(
            rows.float(), *columns, [0], [0], [0], None, 0
        )[0]
        return message.view(num_rows, self.row_units(dim))

    @override
    def decode(self, message: Tensor, dim: int) -> Tensor:
        columns = [len(message)], [0, 1], [dim], [self._number]
        values: Tensor = torch.ops.meshrec.wire_decode.default(message.reshape(-1), *columns)
        return values.view(len(message), dim)

    @override
    def error_bound(self, largest: float) -> float:
        # Half a step of the range, which is at most twice the largest value; the scale is rounded up to 16
        # bits, and the middle and the value to fp32. Rounding at random may go a whole step.
        steps = (1 << self._bits - 1) - 1
        step = max(largest / steps * (1 + 2**-10), 2 * ops.LEAST_SCALE)
        return step if self.stochastic else step / 2


FP32 = _Cast("fp32", torch.float32)
"""Four bytes per value, without rounding."""
FP16 = _Cast("fp16", torch.float16)
"""Half the bytes and 11 significant bits; values above 65,504 overflow to infinity."""
BF16 = _Cast("bf16", torch.bfloat16)
"""Half the bytes and 8 significant bits, with the range of fp32."""
INT8 = CodedRows(8)
"""A byte per value, with a scale and a middle for each row; an error of 1/254 of the largest value."""
INT4 = CodedRows(4)
"""Half a byte per value; an error of 1/14 of the largest value."""
_VARIANTS = (
    *(CodedRows(8, stochastic=s, feedback=f) for s, f in itertools.product((False, True), repeat=2)),
    *(CodedRows(4, stochastic=s) for s in (False, True)),
)
FORMATS: dict[str, WireFormat] = {each.name: each for each in (FP32, FP16, BF16, INT8, INT4, *_VARIANTS)}
"""Every wire format, by name.

``+stochastic`` rounds at random, so that the mean is exact: the noise is a function of the step, the table,
and the ID (or the bag's place in the batch). ``+feedback`` adds what rounding took from the gradient of a bag
to the next gradient of the same bag.
"""

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
            f"wire format {given!r:.100} is unknown. Embeddings and gradients travel as {', '.join(FORMATS)}."
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
                f"wire formats {text!r:.100}: give one of {', '.join(FORMATS)}, or two as FORWARD/BACKWARD, "
                "such as fp16/bf16."
            )
        return cls(wire_format(names[0]), wire_format(names[-1])).checked()

    def checked(self) -> "WireFormats":
        """Return these formats. Raises ValueError if one of them is not for its direction."""
        if not self.backward.is_for_gradients:
            allowed = ", ".join(name for name, each in FORMATS.items() if each.is_for_gradients)
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
"""fp32 both ways."""


class TableWires(NamedTuple):
    """The wire formats of a module: those of some tables by name, and those of all others.

    As text ``"int8/bf16"``, or ``"int8/bf16,users:fp32,items:int4/int8"``.
    """

    default: WireFormats = FULL_PRECISION
    tables: Mapping[str, WireFormats] = {}

    @classmethod
    def parse(cls, text: str) -> "TableWires":
        """Read what ``str`` wrote. Raises ValueError for other text."""
        if not isinstance(text, str):
            return cls(WireFormats.parse(text))
        first, *others = text.split(",")
        tables = {}
        for each in others:
            name, colon, formats = each.strip().rpartition(":")
            if not colon or not name or name in tables:
                raise ValueError(
                    f"wire formats {text!r:.100}: after the formats of all tables, give TABLE:FORMATS for "
                    f"each exception once, such as int8/bf16,users:fp32; got {each.strip()!r:.100}."
                )
            tables[name] = WireFormats.parse(formats)
        return cls(WireFormats.parse(first.strip()), tables)

    @classmethod
    def of_each(cls, wires: Mapping[str, WireFormats]) -> "TableWires":
        """Return the formats of each table, by name, with the most frequent one as the default."""
        each = list(wires.values())
        default = max(each, key=each.count, default=FULL_PRECISION)
        return cls(default, {name: wire for name, wire in wires.items() if wire != default})

    def of(self, table: str) -> WireFormats:
        """Return the formats of a table."""
        return self.tables.get(table, self.default)

    @override
    def __str__(self) -> str:
        return ",".join([str(self.default), *(f"{name}:{each}" for name, each in self.tables.items())])


FULL_WIRES = TableWires()
"""fp32 both ways, for every table."""


class CommsPrecision(NamedTuple):
    """The wire formats that a sharder is asked for: names (``"int8"``), dtypes (``torch.float16``), formats.

    ``forward`` is for embeddings, ``backward`` for their gradients. ``tables`` has the tables with formats of
    their own, by name.
    """

    forward: Wire = torch.float32
    backward: Wire = torch.float32
    tables: Mapping[str, "CommsPrecision"] = {}

    @classmethod
    def of(cls, wires: TableWires) -> "CommsPrecision":
        """Return the request for formats that are known already."""
        return cls(*wires.default, {name: cls(*each) for name, each in wires.tables.items()})

    @property
    def formats(self) -> WireFormats:
        """The formats of all tables without their own. Raises ValueError for unknown ones."""
        return WireFormats(wire_format(self.forward), wire_format(self.backward)).checked()

    @property
    def wires(self) -> TableWires:
        """The formats of every table. Raises ValueError for unknown ones."""
        return TableWires(self.formats, {name: each.formats for name, each in self.tables.items()})
