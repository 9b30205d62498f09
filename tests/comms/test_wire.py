import math

import pytest
import torch

from meshrec.comms.wire import (
    BF16,
    FORMATS,
    FP16,
    FP32,
    Block,
    CommsPrecision,
    WireFormats,
    decode_blocks,
    encode_blocks,
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


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_blocks_of_any_shape_come_back(wire):
    torch.manual_seed(1)
    blocks = [
        Block(3, [4, 4]),
        Block(2, [4]),
        Block(0, [5]),
        Block(5, []),
        Block(2, [3, 6]),
        Block(1, [3, 6]),
    ]
    values = torch.randn(sum(rows * sum(widths) for rows, widths in blocks)).to(wire.kernel_dtype)
    message = encode_blocks(wire, values, blocks)
    assert message.nbytes == sum(rows * sum(map(wire.row_bytes, widths)) for rows, widths in blocks)
    decoded = decode_blocks(wire, message, blocks)
    assert (decoded.float() - values.float()).abs().max() <= wire.error_bound(4.0)
    # A row is encoded by itself, in whatever block it stands: a huge neighbour does not change it.
    values[:4] *= 1e3
    assert torch.equal(decode_blocks(wire, encode_blocks(wire, values, blocks), blocks)[4:], decoded[4:])


@pytest.mark.parametrize("wire", ALL, ids=str)
def test_nothing_is_encoded_to_nothing(wire):
    empty = torch.empty(0, dtype=wire.kernel_dtype)
    message = encode_blocks(wire, empty, [Block(0, [4])])
    assert (message.numel(), message.dtype) == (0, wire.unit)
    assert decode_blocks(wire, message, []).dtype is wire.kernel_dtype


def test_formats_are_named_by_text_by_dtype_or_themselves():
    assert wire_format("fp16") is wire_format(torch.float16) is wire_format(FP16) is FP16
    assert CommsPrecision().formats == WireFormats(FP32, FP32)
    assert CommsPrecision(torch.float16, "bf16").formats == WireFormats(FP16, BF16)
    assert WireFormats.parse("fp16") == WireFormats(FP16, FP16)
    for text in ("fp32", "fp16/bf16"):
        assert str(WireFormats.parse(text)) == text


@pytest.mark.parametrize("given", ["fp8", torch.int8, torch.float64, None, 16])
def test_unknown_formats_are_told(given):
    with pytest.raises(ValueError, match=r"wire format .* is unknown. Embeddings .* fp32, fp16, bf16"):
        wire_format(given)


@pytest.mark.parametrize("text", ["", "fp16/", "fp16/bf16/fp32", "half", None])
def test_unreadable_pairs_are_told(text):
    with pytest.raises(ValueError, match="fp32, fp16, bf16"):
        WireFormats.parse(text)
