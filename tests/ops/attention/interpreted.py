"""The checks of test_triton.py, as a program that runs where Triton interprets its kernels."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3]))

import torch

from meshrec.ops.attention import naive, triton
from tests.ops.attention.draws import check_equal, detached, drawn, gradient_of


def check(seed):
    arguments = drawn(seed)
    wanted, wanted_sums = naive.jagged_attention(*detached(arguments))
    found, log_sums = triton.jagged_attention(*detached(arguments))
    check_equal([found, log_sums], [wanted, wanted_sums], f"draw {seed}")
    grad = gradient_of(wanted, seed)
    given = grad, wanted, wanted_sums, *detached(arguments)
    grads = triton.jagged_attention_grad(*given)
    check_equal(grads, naive.jagged_attention_grad(*given), f"gradients of draw {seed}")
    if seed % 5 == 0:
        again = triton.jagged_attention_grad(*given)
        assert all(torch.equal(one, other) for one, other in zip(grads, again, strict=True))


def check_all():
    for seed in range(*map(int, sys.argv[1:])):
        check(seed)
    print("equal")
