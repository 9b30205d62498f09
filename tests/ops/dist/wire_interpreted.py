"""The checks of test_wire.py for Triton, as a program that runs where Triton interprets its kernels."""

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


for arguments in messages():
    check(arguments)
for values, _, begins, widths, *others in high_halves():  # every 251st row: the interpreter takes ms for one
    rows = values.view(-1, widths[0])[::251]
    check((rows.flatten(), [len(rows)], begins, widths, *others))
print("equal")
