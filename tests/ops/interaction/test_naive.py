"""The formula against a loop, and the kernel against the formula."""

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


def bf16_kernels_agree():
    """Compare with fp64 autograd on the rounded vectors, and with the formula in bf16."""
    shapes = [*SHAPES, *torch.randint(1, 50, (12, 3), generator=torch.Generator().manual_seed(0)).tolist()]
    for shape in shapes:
        for sparse_type in (torch.float32, torch.bfloat16):
            dense, sparse = (tensor.bfloat16() for tensor in inputs(*shape))
            unrounded = inputs(*shape)[1].to(sparse_type)
            exact = [tensor.double().requires_grad_() for tensor in (dense, sparse)]
            expected = naive.dot_interaction(*exact)
            grad = torch.randn_like(expected).bfloat16()
            expected_grads = torch.autograd.grad(expected, exact, grad.double())
            out = OPS.dot_interaction(dense, unrounded)
            grads = OPS.dot_interaction_grad(grad, dense, unrounded)
            assert [tensor.dtype for tensor in (out, *grads)] == [torch.bfloat16, torch.bfloat16, sparse_type]
            plain = naive.dot_interaction(dense, unrounded)
            plain_grads = naive.dot_interaction_grad(grad, dense, unrounded)
            for actual, value, rounded in zip(
                (out, *grads), (expected, *expected_grads), (plain, *plain_grads), strict=True
            ):
                # Sums of up to 50 terms in fp32; the result is rounded once, by at most half of 2**-7.
                tolerance = 2.0**-8 if actual.dtype == torch.bfloat16 else 1e-5
                torch.testing.assert_close(actual.double(), value, rtol=tolerance, atol=1e-4)
                torch.testing.assert_close(actual, rounded, rtol=2.0**-6, atol=2.0**-6)


def test_kernels_agree_with_the_formula():
    kernels_agree()


def test_bf16_kernels_agree_with_fp64_and_with_the_formula_in_bf16():
    bf16_kernels_agree()


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_kernels_of_other_instruction_sets_agree(run_code, isa):
    checks = "of['kernels_agree'](); of['bf16_kernels_agree']()"
    code = f"import runpy, sys; of = runpy.run_path(sys.argv[1]); {checks}"
    run_code(code, __file__, MESHREC_ISA=isa)


@pytest.mark.threads
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_threads_change_nothing(dtype):
    dense, sparse = inputs(200, 5, 16)
    dense = dense.to(dtype)
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


@pytest.mark.parametrize(
    ("dense_type", "sparse_type"),
    [
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_results_and_gradients_have_the_types_of_the_inputs(dense_type, sparse_type):
    dense, sparse = inputs(3, 2, 4)
    dense, sparse = dense.to(dense_type).requires_grad_(), sparse.to(sparse_type).requires_grad_()
    out = dot_interaction(dense, sparse)
    assert out.dtype == dense_type
    out.sum().backward()
    assert dense.grad.dtype == dense_type
    assert sparse.grad.dtype == sparse_type


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize("sparse_type", [torch.float32, torch.bfloat16])
def test_bf16_vectors_that_are_not_finite(sparse_type):
    dense, sparse = torch.ones(2, 3, dtype=torch.bfloat16), torch.ones(2, 4, 3, dtype=sparse_type)
    sparse[0, 1, 2], sparse[1, 3, 0] = float("nan"), float("inf")
    out = OPS.dot_interaction(dense, sparse)
    torch.testing.assert_close(out, naive.dot_interaction(dense, sparse), equal_nan=True)
    grad = torch.ones_like(out)
    actual = OPS.dot_interaction_grad(grad, dense, sparse)
    expected = naive.dot_interaction_grad(grad, dense, sparse)
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize(
    ("dense", "sparse", "message"),
    [
        (torch.ones(2, 3), torch.ones(2, 1, 4), r"\[B, D\].*\[B, F, D\]"),
        (torch.ones(2, 3), torch.ones(2, 1, 3, dtype=torch.float64), "float32"),
        (torch.ones(2, 3), torch.ones(2, 1, 3, dtype=torch.bfloat16), "bfloat16"),
    ],
)
def test_bad_input_is_refused(dense, sparse, message):
    with pytest.raises(ValueError, match=message):
        OPS.dot_interaction(dense, sparse)


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
def test_a_gradient_of_another_shape_is_refused():
    with pytest.raises(ValueError, match="float32"):
        OPS.dot_interaction_grad(torch.ones(2, 3), torch.ones(2, 3), torch.ones(2, 1, 3))


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
def test_a_gradient_of_another_type_is_refused():
    dense = torch.ones(2, 3, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bfloat16"):
        OPS.dot_interaction_grad(torch.ones(2, 4), dense, torch.ones(2, 1, 3))
