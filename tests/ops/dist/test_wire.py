"""The kernels that encode rows for their way between ranks, against plain torch."""

import importlib.util
import random
from pathlib import Path

import pytest
import torch

from meshrec.comms import wire
from meshrec.distributed.pieces import Span, as_tensor, pieces_of
from meshrec.ops import operators
from meshrec.ops.dist import wire_naive as naive
from tests.ops.dist.wire_cases import FORMATS, drawn_rows, high_halves, long_messages, messages

OPS = operators


def same_bits(one, other):
    return torch.equal(one.view(torch.uint8), other.view(torch.uint8))


def test_messages_and_values_equal_naive_bit_for_bit():
    for arguments in messages():
        message, report = OPS.wire_encode(*arguments)
        expected, told = naive.wire_encode(*arguments)
        assert torch.equal(message, expected), arguments[1:5]
        assert torch.equal(report, told)
        layout = arguments[1:5]
        assert same_bits(OPS.wire_decode(message, *layout), naive.wire_decode(message, *layout))


def received(ops, call):
    """The message of a call, its report, and the bits that arrive."""
    message, report = ops.wire_encode(*call)
    return message, report, ops.wire_decode(message, *call[1:5]).view(torch.int32)


def test_every_high_half_has_one_message_and_one_value():
    for call in high_halves():
        for one, other in zip(received(OPS, call), received(naive, call), strict=True):
            assert torch.equal(one, other), call[4]


@pytest.mark.parametrize("format", [naive.HALF, naive.BFLOAT16])
def test_every_half_is_decoded_to_one_value(format):
    message = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.uint8)
    layout = [1 << 10], [0, 1], [1 << 6], [format]
    found = OPS.wire_decode(message, *layout).view(torch.int32)
    assert torch.equal(found, naive.wire_decode(message, *layout).view(torch.int32))
    assert found[0x8000] == -(1 << 31)  # negative zero


def test_nan_keeps_sign_and_payload_in_16_bits():
    signalling = torch.tensor([0x7F812345, 0xFF812345 - (1 << 32)], dtype=torch.int32).view(torch.float32)
    for format, expected in ((naive.HALF, [0x7E09, 0xFE09]), (naive.BFLOAT16, [0x7FC1, 0xFFC1])):
        message, _ = OPS.wire_encode(signalling, [1], [0, 1], [2], [format], [0], [0], [0], None, 0)
        assert [word & 0xFFFF for word in message.view(torch.int16).tolist()] == expected


RUN = """
import sys
import torch
from meshrec.ops import dist
ops = torch.ops.meshrec
found = []
for call in torch.load(sys.argv[1]):
    message, report = ops.wire_encode(*call)
    found.append((message, report, ops.wire_decode(message, *call[1:5]).view(torch.int32)))
torch.save(found, sys.argv[2])
"""


def test_instruction_sets_make_equal_messages(run_code, tmp_path):
    calls = [*long_messages(), *high_halves()]
    expected = [received(naive, call) for call in calls]
    torch.save(calls, tmp_path / "calls.pt")
    for isa in ("baseline", "avx2", "avx512"):
        run_code(RUN, tmp_path / "calls.pt", tmp_path / f"{isa}.pt", MESHREC_ISA=isa)
        for call, found, wanted in zip(calls, torch.load(tmp_path / f"{isa}.pt"), expected, strict=True):
            assert all(map(torch.equal, found, wanted)), (isa, call[3:5])


def test_messages_do_not_depend_on_threads():
    rows = drawn_rows(4000, 64)
    arguments = rows.flatten(), [3000, 1000], [0, 2, 3], [60, 4, 64], [11, 12, 3], [1, 2, 3], [0] * 3, [0, 9]
    threads = torch.get_num_threads()
    try:
        found = []
        for number in (1, 2):
            torch.set_num_threads(number)
            found.append(OPS.wire_encode(*arguments, None, 4))
    finally:
        torch.set_num_threads(threads)
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("format", ["int8", "int4", "int8+stochastic", "int4+stochastic"])
def test_ten_thousand_rows_keep_the_stated_bound(format):
    rows, format = drawn_rows(10_000, 32, seed=3), wire.FORMATS[format]
    decoded = format.decode(format.encode(rows), 32)
    finite = rows.isfinite()
    largest = torch.where(finite, rows.abs(), 0.0).amax(1)
    bounds = torch.tensor([format.error_bound(x) for x in largest.tolist()], dtype=torch.float64)
    errors = torch.where(finite, (decoded.double() - rows.double()).abs(), 0.0)
    assert (errors.amax(1) <= bounds).all()
    # What is not finite stays so: its kind if the row has one kind only, else NaN.
    for row, arrived in zip(rows[~finite.all(1)], decoded[~finite.all(1)], strict=True):
        others = row[~row.isfinite()]
        same = others[0] == others
        expected = others if same.all() else torch.full_like(others, torch.nan)
        torch.testing.assert_close(arrived[~row.isfinite()], expected, equal_nan=True)
        assert arrived[row.isfinite()].isfinite().all()
    assert torch.equal(decoded[2::17][:3], torch.zeros(3, 32))  # zeros and constants arrive exactly
    constant = (rows[:, :1] == rows).all(1) & (rows[:, 0].abs() > 2.0**-110)
    assert torch.equal(decoded[constant], rows[constant])


@pytest.mark.parametrize("seed", range(3))
def test_coded_rows_are_added_up_as_they_are_decoded(seed):
    """Columns of drawn formats and widths for each source; the batch is no multiple of a chunk."""
    draw = random.Random(seed)
    sources, batch, width = 3, draw.choice([1, 33, 70]), 90
    spans = [
        [Span(source, column, draw.choice([1, 7, 16, 29])) for column in (0, 30, 60)]
        for source in range(sources)
    ]
    pieces = as_tensor(pieces_of(spans))
    dims = [sum(span.width for span in own) for own in spans]
    layout = (
        [0, 3, 6, 9],
        [span.width for own in spans for span in own],
        [draw.choice(FORMATS) for _ in range(9)],
    )
    rows = [batch] * sources
    values = torch.randn(batch * sum(dims))
    message, _ = OPS.wire_encode(values, rows, *layout, [1] * 9, [0] * 9, [0] * 3, None, 2)
    arguments = None, pieces, dims, batch, width, None, None, 0, []
    found = OPS.gather_coded(message, *arguments, *layout)
    expected = OPS.gather_pooled(OPS.wire_decode(message, rows, *layout), *arguments)
    written = torch.zeros(width, dtype=torch.bool)
    for *_, size, column, _, _ in pieces.tolist():
        written[column : column + size] = True
    assert torch.equal(found[:, written], expected[:, written])
    with pytest.raises(ValueError, match="received 3"):
        OPS.gather_coded(message[:3], *arguments, *layout)


def test_the_first_row_that_is_not_finite_is_reported():
    rows = torch.ones(6, 10)
    rows[4, 9], rows[5, 1] = torch.inf, torch.nan
    arguments = rows.flatten(), [6], [0, 2], [4, 6], [3, 3], [0, 0], [0, 0], [0], None, 0
    _, report = OPS.wire_encode(*arguments)
    assert report.tolist() == [2, 44]


@pytest.mark.parametrize("format", [11, 12])
def test_stochastic_rounding_has_the_right_mean_and_follows_step_seed_and_key(format):
    row = torch.linspace(-1, 1, 16).repeat(1, 1)
    row[0, 3] = 0.1234

    def sent(step, seed=1, key=0):
        layout = [1], [0, 1], [16], [format]
        message, _ = OPS.wire_encode(row.flatten(), *layout, [seed], [0], [key], None, step)
        return OPS.wire_decode(message, *layout)

    mean = torch.stack([sent(step) for step in range(3000)]).mean(0)
    step = 2 / (254 if format == 11 else 14)
    assert (mean - row[0]).abs().max() < 4 * step / 3000**0.5
    assert torch.equal(sent(5), sent(5))
    for other in (sent(6), sent(5, seed=2), sent(5, key=1)):
        assert not torch.equal(sent(5), other)


def test_wrong_arguments_are_told():
    layout = [2], [0, 1], [4], [3]
    with pytest.raises(ValueError, match=r"8.*fp32.*7"):
        OPS.wire_encode(torch.ones(7), *layout, [0], [0], [0], None, 0)
    with pytest.raises(ValueError, match=r"24 bytes.*3"):
        OPS.wire_decode(torch.zeros(3, dtype=torch.uint8), *layout)
    with pytest.raises(ValueError, match=r"numbered 0.*4"):
        OPS.wire_decode(torch.zeros(8, dtype=torch.uint8), [2], [0, 1], [4], [7])
    for first_columns, widths, formats in (([0, 2], [4], [3]), ([0, 1], [4, 4], [3]), ([0, 1], [4], [3, 3])):
        with pytest.raises(ValueError, match="1 blocks"):
            OPS.wire_decode(torch.zeros(32, dtype=torch.uint8), [2], first_columns, widths, formats)
        with pytest.raises(ValueError, match="1 blocks"):
            list(naive.block_ranges([2], first_columns, widths, formats))


@pytest.mark.parametrize("format", FORMATS)
def test_opcheck(format):
    arguments = torch.rand(12), [3], [0, 1], [4], [format], [0], [0], [0], None, 0
    utilities = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.meshrec.wire_encode.default, arguments, test_utils=utilities)
    message, _ = OPS.wire_encode(*arguments)
    torch.library.opcheck(
        torch.ops.meshrec.wire_decode.default, (message, *arguments[1:5]), test_utils=utilities
    )


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_equals_naive(run_code):
    code = "import runpy; runpy.run_path('wire_interpreted.py')"
    done = run_code(code, cwd=Path(__file__).parent, TRITON_INTERPRET="1")
    assert done.stdout == "equal\n"
