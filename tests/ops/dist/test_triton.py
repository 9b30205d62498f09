"""The Triton ops against naive.py: their kernels run in Triton's interpreter, on tensors of the CPU."""

import importlib.util
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_every_op_equals_naive(run_code):
    code = "import interpreted; interpreted.check_every_op(); print('equal')"
    done = run_code(code, cwd=Path(__file__).parent, TRITON_INTERPRET="1")
    assert done.stdout == "equal\n"
