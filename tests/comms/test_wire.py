import math

import pytest
import torch

from meshrec.comms.encoding import Block, Columns, RowEncoding
from meshrec.comms.wire import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    INT4,
    INT8,
    CommsPrecision,
    TableWires,
    WireFormats,
    wire_format,
)
from tests.distributed.test_wire import SCALED

ALL = [*FORMATS.values(), SCALED]


@pytest.mark.parametrize("wire", ALL, ids=str)
@pytest.mark.parametrize("size", [1e-7, 1e-3, 1.0, 3e4])
def test_an_encoded_row_has_the_bytes_and_the_error_that_its_format_says(wire, size):
    torch.manual_seed(0)
    rows = torch.randn(50, 13).clamp(-2, 2) * size
    rows[7] = 0.0
    message = wire.encode(rows)
    assert message.dtype is wire.unit
    assert message.shape == (50, wire.row_units(13))
    assert message[0].nbytes == wire.row_bytes(13)
    decoded = wire.decode(message, 13)
    assert decoded.dtype is wire.kernel_dtype
    for row, error in zip(rows, (decoded.float() - rows).abs(), strict=True):
        assert error.max() <= wire.error_bound(row.abs().max().item())


@pytest.mark.parametrize(
    ("wire", "dtype"), [(FP32, torch.float32), (FP16, torch.half), (BF16, torch.bfloat16)]
)
def test_casts_are_bit_for_bit_those_of_torch(wire, dtype):
    rows = torch.randn(9, 5) * 1e3
    assert torch.equal(wire.encode(rows), rows.to(dtype))
    assert wire.is_cast
    assert wire.kernel_dtype is wire.unit is dtype


def test_bounds_are_tight_and_overflow_is_told():
    just_between = 1 + 2**-11  # half-way between two fp16 values
    error = abs(torch.tensor(just_between).half().item() - just_between)
    assert error <= FP16.error_bound(just_between) <= 1.01 * error
    assert FP32.error_bound(1e30) == 0
    assert FP16.error_bound(7e4) == math.inf == abs(torch.tensor(7e4).half().item())
    assert math.isfinite(BF16.error_bound(7e4))


def columns(widths, *formats):
    number = len(widths)
    return Columns(
        tuple(widths),
        tuple(formats * number)[:number],
        (1,) * number,
        (0,) * number,
        ("",) * number,
        (0,) * number,
    )


MIXTURES = [*[(each,) for each in ALL], (INT8, FP16, INT4), (BF16, SCALED, FP32)]


@pytest.mark.parametrize("formats", MIXTURES, ids=str)
def test_blocks_of_any_shape_come_back(formats):
    torch.manual_seed(1)
    encoding = RowEncoding.from_formats(formats)
    blocks = [
        Block(rows, columns(widths, *formats))
        for rows, widths in [(3, [4, 4]), (2, [4]), (0, [5]), (5, []), (2, [3, 6]), (1, [3, 6])]
    ]
    size = sum(block.num_rows * block.columns.width for block in blocks)
    values = torch.randn(size).to(encoding.kernel_dtype)
    message, _ = encoding.encode(values, blocks)
    assert message.dtype is encoding.unit
    assert message.numel() == sum(block.num_rows * encoding.units(block.columns) for block in blocks)
    decoded = encoding.decode(message, blocks)
    assert decoded.dtype is encoding.kernel_dtype
    bound = max(each.error_bound(4.0) for each in formats)
    assert (decoded.float() - values.float()).abs().max() <= bound
    # A row is encoded by itself, in whatever block it stands: a huge neighbour does not change it.
    values[:4] *= 1e3
    again, _ = encoding.encode(values, blocks)
    assert torch.equal(encoding.decode(again, blocks)[4:], decoded[4:])


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_nothing_is_encoded_to_nothing(wire):
    encoding = RowEncoding.from_formats([wire])
    message, _ = encoding.encode(torch.empty(0, dtype=wire.kernel_dtype), [Block(0, columns([4], wire))])
    assert (message.numel(), message.dtype) == (0, wire.unit)
    assert encoding.decode(message, []).dtype is wire.kernel_dtype


def test_formats_are_named_by_text_by_dtype_or_themselves():
    assert wire_format("fp16") is wire_format(torch.float16) is wire_format(FP16) is FP16
    assert CommsPrecision().formats == WireFormats(FP32, FP32)
    assert CommsPrecision(torch.float16, "bf16").formats == WireFormats(FP16, BF16)
    assert WireFormats.parse("fp16") == WireFormats(FP16, FP16)
    for text in ("fp32", "fp16/bf16"):
        assert str(WireFormats.parse(text)) == text
    assert WireFormats.parse("int4/int8+stochastic+feedback") == WireFormats(
        INT4, FORMATS["int8+stochastic+feedback"]
    )


def test_tables_have_formats_of_their_own():
    text = "int8/bf16,a.b:fp32,c:int4/int8"
    wires = TableWires.parse(text)
    assert str(wires) == text
    assert [str(wires.for_table(name)) for name in ("x", "a.b", "c")] == ["int8/bf16", "fp32", "int4/int8"]
    assert CommsPrecision.from_wires(wires).wires == wires
    assert (
        str(TableWires.from_tables({name: wires.for_table(name) for name in ("x", "y", "c")}))
        == "int8/bf16,c:int4/int8"
    )
    for wrong in ("int8,", "int8,a", "int8,a:fp32,a:fp16", "int8,:fp32"):
        with pytest.raises(ValueError, match="TABLE:FORMATS"):
            TableWires.parse(wrong)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("int4", "int4"),
        ("int8+feedback", "gradients"),
    ],
)
def test_formats_for_the_other_direction_are_told(text, match):
    with pytest.raises(ValueError, match=match):
        WireFormats.parse(text)
    with pytest.raises(ValueError, match=match):
        _ = CommsPrecision(text, text).wires


@pytest.mark.parametrize("given", ["fp8", torch.int8, torch.float64, None, 16])
def test_unknown_formats_are_told(given):
    with pytest.raises(ValueError, match=r"fp32.*fp16.*bf16"):
        wire_format(given)


@pytest.mark.parametrize("text", ["", "fp16/", "fp16/bf16/fp32", "half", None])
def test_unreadable_pairs_are_told(text):
    with pytest.raises(ValueError, match=r"fp32.*fp16.*bf16"):
        WireFormats.parse(text)
