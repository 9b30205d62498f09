"""The ops as torch sees them: opcheck, gradients, parallel sizes, threads, a machine without kernels."""

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshrec.ops import jagged, operators
from meshrec.ops.jagged import naive

OPS, REGISTERED = operators, torch.ops.meshrec


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_opcheck_of_offsets(dtype):
    torch.library.opcheck(REGISTERED.lengths_to_offsets.default, (torch.tensor([1, 0, 2], dtype=dtype),))
    torch.library.opcheck(REGISTERED.lengths_to_offsets.default, (torch.tensor([], dtype=dtype),))


def opcheck(op, args):
    """opcheck; its last test cannot add up integer and float results, so compiled gradients stand in."""
    tests = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    differentiable = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
    torch.library.opcheck(op, args, test_utils=tests[:3] if differentiable else tests)
    if differentiable:
        expected, actual = (
            torch.autograd.grad(sum(out.sin().sum() for out in f(*args) if out.requires_grad), differentiable)
            for f in (op, torch.compile(op, backend="aot_eager", fullgraph=True, dynamic=True))
        )
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("segments", [None, torch.tensor([0, 3, 4])], ids=["equal", "variable"])
@pytest.mark.parametrize("weighted", [False, True])
def test_opcheck_of_permute(segments, weighted):
    weights = torch.rand(5, requires_grad=True) if weighted else None
    lengths, values = torch.tensor([1, 0, 2, 2]), torch.arange(5, dtype=torch.int32)
    opcheck(REGISTERED.permute_jagged.default, ([1, 0], 2, lengths, values, weights, segments, 4, 5))
    rows = torch.rand(5, 2, requires_grad=True)
    num_bags, num_rows = (4, 8) if segments is None else (2, 4)
    opcheck(
        REGISTERED.permute_jagged.default,
        ([1, 1], 2, lengths, rows, weights, segments, num_bags, num_rows),
    )


def test_gradients_of_permute_add_up_over_repeated_keys():
    weights = torch.rand(4, dtype=torch.float64, requires_grad=True)
    rows = torch.rand(4, 2, dtype=torch.float64, requires_grad=True)

    def permuted(rows, weights):
        result = jagged.permute_jagged(
            [2, 0, 2], 3, torch.tensor([1, 1, 2]), rows, weights=weights, num_bags=3, num_values=5
        )
        return result.values, result.weights

    assert torch.autograd.gradcheck(permuted, (rows, weights))
    permuted(rows, weights)[1].sum().backward()
    assert weights.grad.tolist() == [1.0, 0.0, 2.0, 2.0]
    assert rows.grad is None or not rows.grad.any()


def test_without_weights_there_are_none():
    permuted = jagged.permute_jagged([0], 1, torch.tensor([1]), torch.tensor([3]), num_bags=1, num_values=1)
    assert permuted.weights is None


def large_input(num_keys=3, num_bags=70_000):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 4, (num_keys * num_bags,), generator=generator)
    lengths[num_bags] = 100_000
    values = torch.randint(0, 1000, (int(lengths.sum()),), generator=generator)
    weights = torch.rand(values.numel(), generator=generator)
    return lengths, values, weights, torch.tensor([0, 10, 2 * num_bags, 3 * num_bags])


@pytest.mark.threads
def test_large_inputs_match_naive_and_do_not_depend_on_threads():
    lengths, values, weights, segments = large_input()
    calls = [
        ("lengths_to_offsets", (lengths,)),
        (
            "permute_jagged",
            ([2, 0, 1], 3, lengths, values, weights, segments, lengths.numel(), values.numel()),
        ),
    ]
    before = torch.get_num_threads()
    for name, args in calls:
        expected = getattr(naive, name)(*args)
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            try:
                actual = getattr(OPS, name)(*args)
            finally:
                torch.set_num_threads(before)
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


jagged_inputs = st.lists(
    st.lists(st.lists(st.integers(0, 49), max_size=4), max_size=4), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=50)
@given(bags=jagged_inputs, data=st.data())
def test_permute_and_back(bags, data):
    lengths = torch.tensor([len(bag) for key in bags for bag in key], dtype=torch.int32)
    ids = torch.tensor([i for key in bags for bag in key for i in bag], dtype=torch.int64)
    order = data.draw(st.permutations(range(len(bags))))
    back = sorted(range(len(bags)), key=order.__getitem__)

    def permute(order, sizes, lengths, ids):
        segments = torch.tensor([sum(sizes[:k]) for k in range(len(sizes) + 1)])
        return jagged.permute_jagged(
            order,
            len(order),
            lengths,
            ids,
            segments=segments,
            num_bags=lengths.numel(),
            num_values=ids.numel(),
        )

    sizes = [len(key) for key in bags]
    there = permute(order, sizes, lengths, ids)
    again = permute(back, [sizes[k] for k in order], there.lengths, there.values)
    assert again.lengths.tolist() == lengths.tolist()
    assert again.values.tolist() == ids.tolist()


WITHOUT_KERNELS = """
import torch
from meshrec.ops import jagged, library
assert not library.has_kernels
weights = torch.ones(3, requires_grad=True)
moved = jagged.permute_jagged(
    [1, 0], 2, torch.tensor([1, 2]), torch.arange(3), weights=weights, num_bags=2, num_values=3)
assert moved.values.tolist() == [1, 2, 0] and jagged.lengths_to_offsets(moved.lengths).tolist() == [0, 2, 3]
(moved.weights * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
assert weights.grad.tolist() == [3.0, 1.0, 2.0]
"""


def test_naive_ops_serve_where_nothing_is_compiled(tmp_path):
    environment = {**os.environ, "MESHREC_LIBRARY": str(tmp_path / "none.so")}
    subprocess.run([sys.executable, "-c", WITHOUT_KERNELS], env=environment, check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_ops_run_on_cuda():
    lengths, values, weights, segments = large_input(num_bags=100)
    order = ([2, 0, 1], 3, lengths, values, weights, segments, lengths.numel(), values.numel())
    for name, args in [
        ("lengths_to_offsets", (lengths,)),
        ("permute_jagged", order),
    ]:
        on_gpu = [a.cuda() if isinstance(a, torch.Tensor) and a is not segments else a for a in args]
        actual = getattr(OPS, name)(*on_gpu)
        assert all(a.is_cuda for a in (actual if isinstance(actual, tuple) else (actual,)))
        expected = getattr(OPS, name)(*args)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, check_device=False)
