"""A thread of the fused update that fails: the others stop, and the caller is told."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from meshrec.ops.library import has_kernels

COMPILER = os.environ.get("CXX") or shutil.which("c++")
pytestmark = [
    pytest.mark.skipif(not has_kernels, reason="torch's own operations have their own threads"),
    pytest.mark.skipif(sys.platform != "linux" or COMPILER is None, reason="preloads what it compiles"),
    pytest.mark.skipif("san" in os.environ.get("LD_PRELOAD", ""), reason="the sanitizer allocates by itself"),
]

# The table in whose only bag lie more ids than any thread has had memory for: where the pairs of its ids are
# made, and where they are sorted, there is none to be had.
PROGRAM = """
import ctypes, torch
from meshrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, fuse
from meshrec.optim import SGD

NUM_TABLES, BATCH = 30, 400
NAMES = [f"t{k}" for k in range(NUM_TABLES)]
refuse = ctypes.CDLL(None).refuse

def make(large=None, num_ids=0):
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=9999, embedding_dim=64, feature_names=[name])
        for name in NAMES
    ]
    lengths = torch.full((NUM_TABLES, BATCH), 20)
    values = torch.randint(0, 9999, (NUM_TABLES, 20 * BATCH))
    bags = [values[k] for k in range(NUM_TABLES)]
    if large is not None:
        lengths[large] = 0
        lengths[large, 0] = num_ids
        bags[large] = torch.zeros(num_ids, dtype=torch.int64)
    features = KeyedJaggedTensor(NAMES, torch.cat(bags), lengths=lengths.flatten())
    return fuse(EmbeddingBagCollection(tables), optimizer=SGD(lr=0.1)), features

def step(module, features):
    module(features).values().sum().backward()
    return [weight.detach().clone() for weight in module.parameters()]

expected = step(*make())
num_ids = 100_000
for threads, large, bytes_per_id in [(2, 0, 4), (2, 13, 4), (2, 13, 8), (3, 13, 4), (3, 13, 8), (3, 29, 8)]:
    torch.set_num_threads(threads)
    num_ids += 1001  # more than before
    module, features = make(large, num_ids)
    refuse(num_ids * bytes_per_id)
    try:
        step(module, features)
        print("nothing failed:", threads, large, bytes_per_id)
    except MemoryError:
        print("told")
    refuse(0)
    assert all(torch.equal(a, b) for a, b in zip(step(*make()), expected))  # and the next one works
"""


def test_where_a_thread_of_the_update_fails_the_others_stop_and_the_caller_is_told(tmp_path):
    shim = tmp_path / "refuse_memory.so"
    source = Path(__file__).with_name("refuse_memory.cpp")
    subprocess.run([*COMPILER.split(), "-shared", "-fPIC", str(source), "-o", str(shim)], check=True)
    environment = {**os.environ, "LD_PRELOAD": str(shim), "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.split("\n")) == (0, ["told"] * 6 + [""]), done.stderr
