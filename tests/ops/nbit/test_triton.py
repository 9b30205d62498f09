"""The lookup on GPUs against naive.py: its kernel runs in Triton's interpreter, on tensors of the CPU."""

import importlib.util
import inspect

import pytest
import torch
from torch.testing import assert_close

from meshrec.ops import nbit
from meshrec.ops.nbit import naive
from meshrec.ops.tbe.layout import NONE

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

NAMES = torch.tensor(list(b"table\tfeature\n" * 4), dtype=torch.uint8)
VARIABLE = ((3, 1, 0, 2), (1, 4, 2, 2))
SHAPES = {
    "weighted": {"num_bags": ((3,) * 4,), "weighted": True},
    "int32 ids": {"num_bags": ((2,) * 4, (0,) * 4, (3,) * 4), "id_dtype": torch.int32},
    "flat": {"num_bags": VARIABLE, "flat": True, "weighted": True},
    "sequences": {"num_bags": VARIABLE, "flat": True, "pooling": (NONE,) * 4},
    "no ids": {"num_bags": ((3,) * 4,), "longest": 0},
}
MIXES = [(8, 4, 2), (2, 0, 8), (4, 2, 0)]


def outcome(ops, args):
    try:
        return ops.nbit_forward(*args)
    except ValueError as error:
        return str(error)


RUN_CALLS = (
    inspect.getsource(outcome)
    + """
import sys, torch
from meshrec.ops.nbit import triton
calls = torch.load(sys.argv[1])
torch.save([outcome(triton, args) for args in calls], sys.argv[2])
"""
)


def call(case, bits, dtype=torch.float32):
    tables = [w if own == 0 else nbit.quantize(w, own) for w, own in zip(case.weights, bits, strict=True)]
    return tables, list(bits), *case.lookups, case.dims, case.out_size, dtype, True, NAMES


def test_lookups_and_errors_equal_naive(run_code, make_case, tmp_path):
    calls = [
        call(make_case(rows=(9, 3, 20), dims=(4, 7, 19), **shape), mix)
        for shape in SHAPES.values()
        for mix in MIXES
    ]
    case = make_case(rows=(9, 3, 20), dims=(4, 7, 12), num_bags=((3,) * 4,))
    calls.append(call(case, (8, 4, 2), torch.float16))
    calls.append(call(case._replace(values=case.values.clone().fill_(-1)), (8, 4, 2)))
    rows, _, *rest = call(case, (8, 4, 2))
    calls.append((rows, [8, 8, 2], *rest))
    torch.save(calls, tmp_path / "calls.pt")
    run_code(RUN_CALLS, tmp_path / "calls.pt", tmp_path / "found.pt", TRITON_INTERPRET="1")
    found = torch.load(tmp_path / "found.pt")
    for each, args in zip(found, calls, strict=True):
        expected = outcome(naive, args)
        if isinstance(expected, str):
            assert each == expected
        else:
            assert_close(each, expected, rtol=1e-3 if expected.dtype == torch.float16 else 1e-5, atol=1e-6)
    assert [isinstance(each, str) for each in found[-3:]] == [False, True, True]
