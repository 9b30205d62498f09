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
