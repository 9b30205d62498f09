"""The Triton kernels compile for GPUs; what they compute is tested in test_triton.py."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

COMPILE = """
import itertools, os, sys, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from meshrec.ops.dist import triton_kernels as kernels

# `make thorough` compiles for both architectures, and every combination of types.
ALL = "MESHREC_THOROUGH" in os.environ

TYPES = {
    **dict.fromkeys(("weights", "local", "out", "grad", "source", "target", "received_rows"), "*fp32"),
    **dict.fromkeys(("lengths", "is_bad", "words", "messages"), "*i32"),
    **dict.fromkeys(("num_ids", "num_bags", "num_slots", "capacity", "num_routes", "num_ranks"), "i32"),
    **dict.fromkeys(("words_per_id", "batch", "num_sources", "local_dim", "out_dim"), "i32"),
    "scale": "fp32",
}

def compiled(kernel, types, **constants):
    signature = {
        name: "constexpr" if name in constants else types.get(name, TYPES.get(name, "*i64"))
        for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for capability in (80, 90) if ALL else (80,):
        target = GPUTarget("cuda", capability, 32)
        assert triton.compile(ASTSource(kernel, signature, values), target=target).asm["cubin"]

compiled(kernels.write_header, {}, BLOCK=128)
for ids, weighted, both in itertools.product(("*i32", "*i64"), (False, True), (False, True)):
    if not ALL and both != (weighted == (ids == "*i64")):
        continue  # every pair of options is there
    nothing = {} if weighted else {"weights": None}
    types = {"ids": ids, "offsets": ids}
    compiled(kernels.count_ids, types, WEIGHTED=weighted, CHECK=both, BLOCK=128, **nothing)
    compiled(kernels.write_messages, types, WEIGHTED=weighted, WIDE=both, BLOCK=128, **nothing)
    values = {"received": "*i32", "values": "*i64" if both else "*i32"}
    compiled(kernels.unpack_messages, values, WEIGHTED=weighted, WIDE=both, BLOCK=1024)
for dtype in ("*fp32", "*fp16", "*bf16"):
    compiled(kernels.gather_columns, {"received": dtype}, MEANS=True, ROWS=8, BLOCK=128)
    compiled(kernels.scatter_columns, {"sent": dtype}, MEANS=True, ROWS=1024, BLOCK=1)
    compiled(kernels.copy_sequences, {"source": dtype}, GATHER=True, BLOCK=64)
    compiled(kernels.copy_sequences, {"target": dtype}, GATHER=False, BLOCK=64)
# Where no bag is a mean nothing of bags is given, and a number that is 1 becomes a constant.
ones = dict.fromkeys(("batch", "num_sources", "local_dim", "out_dim"), 1)
nothing = dict(offsets=None, first_bags=None, MEANS=False, **ones)
compiled(kernels.gather_columns, {"received": "*fp32"}, **nothing, ROWS=8, BLOCK=128)
compiled(kernels.scatter_columns, {"sent": "*fp32"}, **nothing, ROWS=8, BLOCK=128)
ones = dict.fromkeys(("num_ids", "num_slots", "capacity", "words_per_id"), 1)
compiled(kernels.write_messages, {}, **ones, weights=None, WEIGHTED=False, WIDE=False, BLOCK=128)
ones = dict.fromkeys(("num_routes", "num_ranks", "words_per_id"), 1)
compiled(kernels.write_header, {}, **ones, BLOCK=128)
compiled(kernels.count_ids, {}, num_ids=1, weights=None, WEIGHTED=False, CHECK=True, BLOCK=128)
compiled(kernels.sum_weight_grads, {"received": "*fp32"}, BLOCK=128)
print("compiled")
"""


def test_every_kernel_compiles_for_gpus(run_code):
    assert run_code(COMPILE).stdout == "compiled\n"
