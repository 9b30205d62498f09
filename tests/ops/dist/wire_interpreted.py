"""The checks of test_wire.py for Triton, as a program that runs where Triton interprets its kernels."""

import os

import torch
from wire_cases import high_halves, messages

from meshrec.ops.dist import wire_naive as naive
from meshrec.ops.dist import wire_triton as triton


def check(arguments):
    message, report = triton.wire_encode(*arguments)
    expected, told = naive.wire_encode(*arguments)
    layout = arguments[1:5]
    assert torch.equal(message, expected), layout
    assert torch.equal(report, told), layout
    one, other = triton.wire_decode(message, *layout), naive.wire_decode(message, *layout)
    assert torch.equal(one.view(torch.int32), other.view(torch.int32)), layout


# The interpreter takes ms for a row; 11 rows have every oddity but those of every 37th row.
THOROUGH = "MESHREC_THOROUGH" in os.environ
for arguments in messages(40 if THOROUGH else 11):
    check(arguments)
for values, _, begins, widths, *others in high_halves():  # every 251st row, or fewer
    rows = values.view(-1, widths[0])[:: 251 if THOROUGH else 503]
    check((rows.flatten(), [len(rows)], begins, widths, *others))
print("equal")
