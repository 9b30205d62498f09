"""The Triton ops against naive.py: their kernels run in Triton's interpreter, on tensors of the CPU."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def test_every_op_equals_naive():
    command = [sys.executable, str(Path(__file__).parent / "interpreted.py")]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout == "equal\n", done.stderr[-4000:]
