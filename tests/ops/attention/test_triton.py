"""The attention on GPUs against naive.py: its kernels run in Triton's interpreter, on tensors of the CPU."""

import importlib.util
from pathlib import Path

import pytest

from tests.ops.attention.test_jagged_attention import DRAWS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_results_and_gradients_equal_naive_and_repeat_their_bits(run_code):
    code = "import interpreted; interpreted.check_all()"
    done = run_code(code, 0, DRAWS // 12, cwd=Path(__file__).parent, TRITON_INTERPRET="1")
    assert done.stdout == "equal\n"
