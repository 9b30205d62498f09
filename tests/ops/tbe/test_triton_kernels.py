"""The Triton kernels compile for GPUs; what they compute is tested in test_triton.py."""

import importlib.util

import pytest

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

COMPILE = """
import itertools, os, sys, warnings
warnings.simplefilter("ignore")
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from meshrec.ops.tbe import triton_kernels as kernels, triton_update_kernels
from meshrec.ops.tbe.formulas import FORMULAS

# `make thorough` compiles for both architectures, and every optimizer for every type of weight.
ALL = "MESHREC_THOROUGH" in os.environ
DTYPES = (tl.float32, tl.float16, tl.bfloat16)

FLOATS_AT = {"sample_weights", "factors", "grad", "row_stats", "parts", "out"}
NUMBERS = {"tables_of": "*i32", "is_bad": "*i32", "num_entries": "i32", "end_of_rows": "i64"}
NUMBERS |= {"hyper": "*fp64", "num_ids": "i32", "num_bags": "i32"}

def type_of(name):
    if name in FLOATS_AT:
        return "*fp32"
    return NUMBERS.get(name, "*i64")

def compiled(kernel, **constants):
    signature = {name: "constexpr" if name in constants else type_of(name) for name in kernel.arg_names}
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    for capability in (80, 90) if ALL else (90,):
        target = GPUTarget("cuda", capability, 32)
        assert triton.compile(ASTSource(kernel, signature, values), target=target).asm["cubin"]

compiled(kernels.check_offsets, BLOCK=1024)
compiled(kernels.list_entries, WEIGHTED=False, sample_weights=None, BAGS=8, IDS=16)
checked = dict(WEIGHTED=True, CHECK=True, ALIGN=4, BAGS=8, BLOCK=64)
for dtype in DTYPES:
    compiled(kernels.look_up, WEIGHT=dtype, BITS=0, **checked)
for bits in (8, 4, 2):
    compiled(kernels.look_up, WEIGHT=tl.uint8, BITS=bits, **checked)
compiled(kernels.sum_parts, ALIGN=1, PARTS=8, BLOCK=128)
# A number that is 1 becomes a constant.
compiled(kernels.check_offsets, BLOCK=1024, num_bags=1, num_ids=1)
compiled(kernels.list_entries, WEIGHTED=True, BAGS=8, IDS=16, num_ids=1)
compiled(kernels.write_run_sums, DENSE=True, ALIGN=1, RUNS=8, BLOCK=128, num_entries=1, end_of_rows=1)
one = dict(STATS=False, ALIGN=1, RUNS=16, BLOCK=64, num_entries=1, end_of_rows=1, row_stats=None)
adam = dict(OPTIMIZER=3, DECAY=0, STOCHASTIC=False, WEIGHT=tl.float32)
compiled(triton_update_kernels.update_runs, **adam, **one)
for dense in (False, True):
    compiled(kernels.write_run_sums, DENSE=dense, ALIGN=4, RUNS=8, BLOCK=128)
for optimizer, dtype in itertools.product(range(len(FORMULAS)), DTYPES):
    if not ALL and dtype != DTYPES[optimizer % 3]:
        continue
    options = dict(OPTIMIZER=optimizer, DECAY=optimizer % 3, STOCHASTIC=True, WEIGHT=dtype, BLOCK=64)
    compiled(triton_update_kernels.update_runs, STATS=True, ALIGN=4, RUNS=16, **options)
print("compiled")
"""


def test_every_kernel_compiles_for_gpus(run_code):
    assert run_code(COMPILE).stdout == "compiled\n"
