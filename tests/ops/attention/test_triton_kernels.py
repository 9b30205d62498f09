"""The Triton kernels compile for GPUs; what they compute is tested in test_triton.py."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

COMPILE = """
import os, sys, warnings
warnings.simplefilter("ignore")
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from meshrec.ops.attention import triton_kernels as kernels
from meshrec.ops.attention.triton_bias_kernels import bias_gradients

# `make thorough` compiles every kernel for both architectures, with both sets of constants.
ALL = "MESHREC_THOROUGH" in os.environ

TOKENS = kernels.AttentionTokens(*["*fp32"] * 3, *["i32"] * 9, "fp32")
SAMPLES = kernels.AttentionSamples(*["*i64"] * 3, "i32")
BIASES = kernels.AttentionBiases("*fp32", "*fp32", "*i64", "*fp32", "i32", "i32")
RESULTS = kernels.BackwardInputs(*["*fp32"] * 3)
ARGUMENTS = {"tokens": TOKENS, "samples": SAMPLES, "biases": BIASES, "results": RESULTS}
ARGUMENTS["first_sample"] = "i32"

def compiled(kernel, capability, without=(), ones=(), **constants):
    signature = {
        name: "constexpr" if name in constants else ARGUMENTS.get(name, "*fp32") for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    # What is None, and a number that is 1, becomes a constant.
    for group, name, value in [*(("biases", each, None) for each in without), *((*each, 1) for each in ones)]:
        signature[group] = signature[group]._replace(**{name: "constexpr"})
        values[kernel.arg_names.index(group), signature[group]._fields.index(name)] = value
    target = GPUTarget("cuda", capability, 32)
    assert triton.compile(ASTSource(kernel, signature, values), target=target).asm["cubin"]

CALLS = [(kernels.attend, {}), (kernels.query_gradients, {}), (kernels.key_gradients, {})]
CALLS += [(bias_gradients, {"BUCKETS": 256}), (bias_gradients, {"BUCKETS": 0})]
ONES = [("tokens", "num_heads"), ("tokens", "query_width"), ("biases", "max_length")]
for number, (kernel, own) in enumerate(CALLS):
    if ALL or number % 2 == 0:
        block = dict(PRECISION="tf32x3", BLOCK=32, QUERY_WIDTH=64, VALUE_WIDTH=64, **own)
        compiled(kernel, 80, SOFTMAX=False, CAUSAL=True, WINDOW=0, CONTEXTUAL=0, **block)
    if not ALL and number % 2 == 0:
        continue
    block = dict(PRECISION="tf32", BLOCK=32, QUERY_WIDTH=128, VALUE_WIDTH=16, **own)
    without = ("time", "timestamps", "starts") if own.get("BUCKETS") == 0 else ("position",)
    compiled(kernel, 90, without, ONES, SOFTMAX=True, CAUSAL=False, WINDOW=5, CONTEXTUAL=3, **block)
print("compiled")
"""


def test_every_kernel_compiles_for_gpus(run_code):
    assert run_code(COMPILE).stdout == "compiled\n"
