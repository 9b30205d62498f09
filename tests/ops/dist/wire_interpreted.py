"""The checks of test_wire.py for Triton, as a program that runs where Triton interprets its kernels."""

import torch
from wire_cases import messages

from meshrec.ops.dist import wire_naive as naive
from meshrec.ops.dist import wire_triton as triton

for arguments in messages():
    message, report = triton.wire_encode(*arguments)
    expected, told = naive.wire_encode(*arguments)
    layout = arguments[1:5]
    assert torch.equal(message, expected), layout
    assert torch.equal(report, told), layout
    one, other = triton.wire_decode(message, *layout), naive.wire_decode(message, *layout)
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
print("equal")
