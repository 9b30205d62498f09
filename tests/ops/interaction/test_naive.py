"""The formula against a loop, and the kernel against the formula."""

import os
import subprocess
import sys

import pytest
import torch

from meshrec.ops import library, operators
from meshrec.ops.interaction import dot_interaction, naive

OPS, REGISTERED = operators, torch.ops.meshrec
# One pair; fewer and more vectors than a tile has; widths that are no multiple of any vector; no sample.
SHAPES = [
    (1, 1, 1),
    (3, 2, 4),
    (5, 3, 8),
    (2, 26, 64),
    (70, 26, 64),
    (3, 31, 20),
    (3, 32, 7),
    (2, 40, 33),
    (0, 2, 4),
]


def inputs(batch, num_sparse, dim):
    generator = torch.Generator().manual_seed(batch + num_sparse)
    return (
        torch.randn(batch, dim, generator=generator),
        torch.randn(batch, num_sparse, dim, generator=generator),
    )


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_pairs_come_in_order(shape):
    dense, sparse = inputs(*shape)
    vectors = [dense, *sparse.unbind(1)]
    products = [
        (vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i + 1, len(vectors))
    ]
    expected = torch.cat([dense, torch.stack(products, 1)], 1)
    torch.testing.assert_close(naive.dot_interaction(dense, sparse), expected)


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_gradient_is_that_of_the_formula(shape):
    leaves = [tensor.requires_grad_() for tensor in inputs(*shape)]
    out = naive.dot_interaction(*leaves)
    grad = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, grad)
    torch.testing.assert_close(naive.dot_interaction_grad(grad, *leaves), expected)


def kernels_agree():
    for shape in SHAPES:
        dense, sparse = inputs(*shape)
        expected = naive.dot_interaction(dense, sparse)
        torch.testing.assert_close(OPS.dot_interaction(dense, sparse), expected, rtol=1e-5, atol=1e-5)
        grad = torch.randn_like(expected)
        actual = OPS.dot_interaction_grad(grad, dense, sparse)
        torch.testing.assert_close(
            actual, naive.dot_interaction_grad(grad, dense, sparse), rtol=1e-5, atol=1e-5
        )


def test_kernels_agree_with_the_formula():
    kernels_agree()


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_kernels_of_other_instruction_sets_agree(isa):
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['kernels_agree']()"
    environment = {**os.environ, "MESHREC_ISA": isa}
    subprocess.run([sys.executable, "-c", code, __file__], env=environment, check=True)


@pytest.mark.threads
def test_threads_change_nothing():
    dense, sparse = inputs(200, 5, 16)
    one = torch.get_num_threads()
    outs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        outs.append(OPS.dot_interaction(dense, sparse))
    torch.set_num_threads(one)
    assert torch.equal(*outs)


def test_views_are_read_as_they_look():
    dense, sparse = inputs(4, 6, 8)
    expected = naive.dot_interaction(dense, sparse[:, ::2])
    torch.testing.assert_close(OPS.dot_interaction(dense, sparse[:, ::2]), expected)
    torch.testing.assert_close(OPS.dot_interaction(dense.t().contiguous().t(), sparse[:, ::2]), expected)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.15's own opcheck
def test_opcheck():
    dense, sparse = inputs(3, 2, 4)
    grad = torch.randn(3, 7)
    torch.library.opcheck(
        REGISTERED.dot_interaction.default, (dense.requires_grad_(), sparse.requires_grad_())
    )
    torch.library.opcheck(REGISTERED.dot_interaction_grad.default, (grad, dense.detach(), sparse.detach()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types_take_the_formula(dtype):
    dense, sparse = (tensor.to(dtype).requires_grad_() for tensor in inputs(3, 2, 4))
    out = dot_interaction(dense, sparse)
    assert out.dtype == dtype
    out.sum().backward()
    assert dense.grad is not None


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 1, 4), r"\[B, D\].*\[B, F, D\]"),
        (torch.ones(2, 3), torch.ones(2, 1, 3, dtype=torch.float64), "float32"),
    ],
)
def test_bad_input_is_refused(dense, sparse, message):
    with pytest.raises(ValueError, match=message):
        OPS.dot_interaction(dense, sparse)


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="float32"):
        OPS.dot_interaction_grad(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1, 3))
