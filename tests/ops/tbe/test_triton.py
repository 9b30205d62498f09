"""The Triton ops against naive.py: their kernels run in Triton's interpreter, on tensors of the CPU."""

import importlib.util
import inspect
import os

import pytest
import torch
from torch.testing import assert_close

from meshrec.ops.tbe import naive
from meshrec.ops.tbe.formulas import FORMULAS, Hyper, OptimizerKind
from meshrec.ops.tbe.layout import NONE

PARTIAL_ROW_WISE_LAMB = OptimizerKind.PARTIAL_ROW_WISE_LAMB.code
ROW_WISE_ADAGRAD = OptimizerKind.ROW_WISE_ADAGRAD.code
SGD = OptimizerKind.SGD.code

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


def outcome(ops, name, args):
    """The result (of an update the weights and the state), or what is said to be wrong."""
    try:
        if name == "update_by_runs":
            update, num_rows = args
            squares, counts, runs = ops.tbe_row_squares(*update[:11], num_rows)
            ops.tbe_update(*update, runs, squares / 16)
            return (*update[11:13], squares, counts)
        result = getattr(ops, name)(*args)
    except ValueError as error:
        return str(error)
    return args[11:13] if name == "tbe_update" else result


RUN_CALLS = (
    inspect.getsource(outcome)
    + """
import sys, torch
from meshrec.ops.tbe import triton
calls = torch.load(sys.argv[1])
torch.save({key: outcome(triton, *call) for key, call in calls.items()}, sys.argv[2])
"""
)
SMALL = {"rows": (9, 3, 20), "dims": (4, 7, 12)}
ONE_BLOCK, BLOCKS, VARIABLE = ((3,) * 4,), ((2,) * 4, (0,) * 4, (3,) * 4), ((3, 1, 0, 2), (1, 4, 2, 2))
SHAPES = {
    "one block": {"num_bags": ONE_BLOCK},
    "weighted": {"num_bags": ONE_BLOCK, "weighted": True},
    "blocks": {"num_bags": BLOCKS, "id_dtype": torch.int32},
    "blocks of any size, flat": {"num_bags": VARIABLE, "flat": True, "weighted": True},
    "sequences": {"num_bags": VARIABLE, "flat": True, "pooling": (NONE,) * 4},
    "types": {"num_bags": ONE_BLOCK, "dtype": (torch.float32, torch.bfloat16, torch.float16)},
    "rows in every sample": {"num_bags": ONE_BLOCK, "longest": 100},
    "no samples": {"num_bags": ((0,) * 4,)},
    "no ids": {"num_bags": ONE_BLOCK, "longest": 0},
}
SLOTS = {formula.code: tuple(2 - slot.per_row for slot in formula.slots) for formula in FORMULAS}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def hyper(mode, seed=0, row_dim=0):
    return Hyper(
        lr=0.1,
        eps=1e-6,
        weight_decay=0.02,
        decay_mode=mode,
        beta1=0.9,
        beta2=0.99,
        momentum=0.8,
        trust_coefficient=0.5,
        beta=0.3,
        l1=0.2,
        l2=0.1,
        ar_alpha=1.5,
        min_shrinkage=0.7,
        step=3,
        seed=seed,
        row_dim=row_dim,
    ).as_tensor()


def update_call(case, optimizer, mode, seed=0, row_stats=None, row_dim=0):
    generator = torch.Generator().manual_seed(4)
    weights = case.copied().weights
    state = [
        torch.rand(weight.shape[:dims], generator=generator)
        for dims in SLOTS[optimizer]
        for weight in weights
    ]
    origins = [number for table in range(len(weights)) for number in (100 + table, 8 * table)]
    numbers = (optimizer, hyper(mode, seed, row_dim), row_stats, origins)
    return "tbe_update", (case.gradient(), *case.lookups, case.dims, weights, state, *numbers)


def forward_call(case, out_size=None):
    names = torch.tensor(list(b"table\tfeature\n" * len(case.keys)), dtype=torch.uint8)
    return "tbe_forward", (case.weights, *case.lookups, out_size or case.out_size, torch.float32, True, names)


def make_calls(make_case):
    calls = {}
    for name, shape in SHAPES.items():
        case = make_case(**SMALL, **shape)
        grad = case.gradient()
        calls["forward", name] = forward_call(case)
        calls["dense", name] = "tbe_dense_grad", (grad, case.weights, *case.lookups, case.dims)
        num_rows = [len(weight) for weight in case.weights]
        calls["sparse", name] = "tbe_sparse_grad", (grad, *case.lookups, case.dims, num_rows)
        calls["update", name] = update_call(case, ROW_WISE_ADAGRAD, 0)
        update = update_call(case, ROW_WISE_ADAGRAD, 0)[1]
        calls["runs", name] = "update_by_runs", (update, num_rows)
    for name, dtype in DTYPES.items():
        case = make_case(**SMALL, num_bags=ONE_BLOCK, dtype=dtype)
        for optimizer in SLOTS if dtype == torch.float32 else (SGD, PARTIAL_ROW_WISE_LAMB):
            # `make thorough` takes every mode of weight decay with every optimizer.
            for mode in range(3) if "MESHREC_THOROUGH" in os.environ else (optimizer % 3,):
                for seed in (0,) if dtype == torch.float32 else (0, 2**40 + 7):
                    calls[name, optimizer, mode, seed] = update_call(case, optimizer, mode, seed)
    one_table = {"rows": (9,), "dims": (4,), "keys": (0,), "tables": (0,), "pooling": (NONE,), "flat": True}
    case = make_case(**one_table, num_bags=((2,),), longest=0)
    case = case._replace(values=torch.tensor([5, 0, 8]), offsets=torch.tensor([0, 2, 3]))
    stats = torch.rand(3, 3, generator=torch.Generator().manual_seed(6)) + 1
    for optimizer in SLOTS:
        calls["stats", optimizer] = update_call(case, optimizer, 1, row_stats=stats, row_dim=16)
    outside = make_case(**SMALL, num_bags=ONE_BLOCK, weighted=True)
    calls["wrong", "id"] = forward_call(outside._replace(values=outside.values.clone().fill_(-1)))
    nan = torch.full_like(outside.sample_weights, float("nan"))
    calls["wrong", "weight"] = forward_call(outside._replace(sample_weights=nan))
    calls["wrong", "offsets"] = forward_call(outside._replace(offsets=outside.offsets + 1))
    # Without the check in the kernel, the rows would be written before the start of the output.
    far = case._replace(values=torch.tensor([1, 2, 3]), offsets=torch.tensor([-(1 << 40), 0, 3]))
    calls["wrong", "first offset"] = forward_call(far, out_size=12)
    return calls


@pytest.fixture(scope="module")
def outcomes(run_code, make_case, tmp_path_factory):
    """For each call what Triton gives and what naive.py does."""
    folder, calls = tmp_path_factory.mktemp("triton"), make_calls(make_case)
    torch.save(calls, folder / "calls.pt")
    run_code(RUN_CALLS, folder / "calls.pt", folder / "found.pt", TRITON_INTERPRET="1")
    expected = {key: outcome(naive, *call) for key, call in calls.items()}
    return torch.load(folder / "found.pt"), expected


def check(outcomes, wanted):
    found, expected = outcomes
    keys = [key for key in expected if wanted(key)]
    assert keys
    for key in keys:
        if isinstance(expected[key], str):
            assert found[key] == expected[key]
        else:
            assert_close(found[key], expected[key], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_every_op_equals_naive(outcomes, name):
    check(outcomes, lambda key: key[1] == name)


@pytest.mark.parametrize("name", DTYPES)
def test_every_update_equals_naive(outcomes, name):
    check(outcomes, lambda key: key[0] == name)


def test_row_stats(outcomes):
    check(outcomes, lambda key: key[0] == "stats")


def test_what_is_wrong_is_said_as_by_naive(outcomes):
    check(outcomes, lambda key: key[0] == "wrong")
    assert all(isinstance(said, str) for key, said in outcomes[1].items() if key[0] == "wrong")
