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


def run_ranks(store, world_size, first_seed, device):
    plans = 6 if device.startswith("cuda") else 4  # Triton's interpreter is slow
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if device == "simulated:0":
        environment["TRITON_INTERPRET"] = "1"
    ranks = []
    for rank in range(world_size):
        arguments = map(str, (store, rank, world_size, first_seed, plans, device))
        command = [sys.executable, str(HERE / "on_simulated_device.py"), *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        ranks.append(subprocess.Popen(command, **pipes, text=True, env=environment))
    try:
        for rank in ranks:
            out, error = rank.communicate(timeout=600)
            assert out.startswith("equal"), error[-4000:]
    finally:
        for rank in ranks:
            rank.kill()


@pytest.mark.parametrize(("world_size", "first_seed"), [(1, 0), (2, 10)])
def test_random_plans_equal_those_on_the_cpu(tmp_path, world_size, first_seed):
    run_ranks(tmp_path / "store", world_size, first_seed, "simulated:0")


@pytest.mark.gpu
@pytest.mark.parametrize("first_seed", [0, 10, 20])
def test_random_plans_on_a_gpu(tmp_path, first_seed):
    run_ranks(tmp_path / "store", 1, first_seed, "cuda:0")


def test_what_a_device_would_refuse_fails():
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
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    expected = "aten.add.Tensor takes tensors of the device and of the host\n6\n"
    assert done.stdout == expected, done.stderr


def test_attention_runs_there_and_reads_the_device_once():
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
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=HERE)
    assert done.stdout == "equal\n", done.stderr
