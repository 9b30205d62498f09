"""Sharded modules on a device that is not there: random plans, forward and backward, equal those on the CPU.

Fails where a tensor lands on the wrong device, and where a forward pass reads the device more than once.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from meshrec.ops import library

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton"),
    pytest.mark.skipif(not library.has_kernels, reason="compares with the compiled kernels"),
]
HERE = Path(__file__).parent


# Its arguments are those of on_simulated_device.py, but the rank.
RANKS = """
import os, runpy, sys, traceback
store, world_size, *rest = sys.argv[1:]
children = []
for rank in range(int(world_size)):
    children.append(os.fork())
    if children[-1] == 0:
        sys.argv[1:] = [store, str(rank), world_size, *rest]
        code = 1
        try:
            runpy.run_path("on_simulated_device.py", run_name="__main__")
            code = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(code)
codes = [os.waitpid(child, 0)[1] for child in children]
assert not any(codes), codes
"""
# Triton's interpreter is slow.
PLANS = 4 if "MESHREC_THOROUGH" in os.environ else 2


@pytest.mark.parametrize(("world_size", "first_seed"), [(1, 0), (2, 10)])
def test_random_plans_equal_those_on_the_cpu(run_code, tmp_path, world_size, first_seed):
    arguments = (tmp_path / "store", world_size, first_seed, PLANS, "simulated:0")
    done = run_code(RANKS, *arguments, cwd=HERE, TRITON_INTERPRET="1")
    assert done.stdout.count("equal") == world_size


@pytest.mark.gpu
@pytest.mark.parametrize("first_seed", [0, 10, 20])
def test_random_plans_on_a_gpu(tmp_path, first_seed):
    arguments = map(str, (tmp_path / "store", 0, 1, first_seed, 6, "cuda:0"))
    command = [sys.executable, str(HERE / "on_simulated_device.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("equal"), done.stderr[-4000:]


def test_what_a_device_would_refuse_fails(run_code):
    code = """
import torch
from simulated_device import DEVICE, simulated_device
with simulated_device() as reads:
    ids = torch.arange(4, device=DEVICE)
    try:
        ids + torch.ones(4)
    except AssertionError as error:
        print(error)
    assert not reads
    ids.tolist(), int(ids[0]), bool(ids.any()), ids.cpu(), ids.nonzero(), ids[ids > 1]
    print(len(reads))
"""
    done = run_code(code, cwd=HERE, TRITON_INTERPRET="1")
    expected = "aten.add.Tensor takes tensors of the device and of the host\n6\n"
    assert done.stdout == expected, done.stderr


def test_attention_runs_there_and_reads_the_device_once(run_code):
    code = """
import torch
from meshrec.ops.attention import Bias, jagged_attention
from simulated_device import DEVICE, Simulated, reads, simulated_device
torch.manual_seed(0)
tokens, position, time = torch.randn(3, 9, 2, 4), torch.randn(11), torch.randn(20)
offsets, times = torch.tensor([0, 3, 3, 9]), torch.arange(9) ** 5
for kind in ("silu", "softmax"):
    found = []
    with simulated_device():
        for to in (lambda each: each, lambda each: each.to(DEVICE)):
            leaves = [to(each).requires_grad_() for each in (*tokens, position, time)]
            bias, bounds = Bias(leaves[3], leaves[4], to(times)), to(offsets)
            reads.clear()
            out = jagged_attention(*leaves[:3], bounds, max_length=6, kind=kind, bias=bias)
            grads = torch.autograd.grad(out, leaves, torch.ones_like(out))
            num_reads = len(reads)
            found.append([each.inner if isinstance(each, Simulated) else each for each in (out, *grads)])
    for own, other in zip(*found, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)
    assert num_reads == 1, reads
print("equal")
"""
    done = run_code(code, cwd=HERE, TRITON_INTERPRET="1")
    assert done.stdout == "equal\n", done.stderr
