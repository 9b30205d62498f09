"""The attention on GPUs against naive.py: its kernels run in Triton's interpreter, on tensors of the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.attention.test_jagged_attention import DRAWS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_results_and_gradients_equal_naive_and_repeat_their_bits():
    command = [sys.executable, str(Path(__file__).parent / "interpreted.py"), "0", str(DRAWS // 8)]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "equal\n", done.stderr[-4000:]
