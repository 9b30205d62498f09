"""The mean over ranks, against plain torch."""

import pytest
import torch

from meshrec.ops.dist import average_naive as naive

OPS = torch.ops.meshrec
KERNELS = pytest.mark.parametrize("ops", [OPS, naive])
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_means_have_the_bits_of_naive(dtype):
    generator = torch.Generator().manual_seed(0)
    for num_ranks in (1, 2, 3, 5, 8, 41):
        for size in (0, 1, 7, (1 << 14) - 1, (1 << 14) + 1, 50_000):
            spread = torch.randn(num_ranks, size, generator=generator).exp()
            terms = list((torch.randn(num_ranks, size, generator=generator) * spread).to(dtype))
            mean, expected = torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype)
            OPS.average_ranks(mean, terms, num_ranks)
            naive.average_ranks(expected, terms, num_ranks)
            assert torch.equal(mean, expected)
            exact, magnitude = torch.stack(terms).double(), torch.stack(terms).double().abs().mean(0)
            error = (mean.double() - exact.mean(0)).abs()
            assert (error <= (num_ranks * 2**-23 + torch.finfo(dtype).eps) * magnitude).all()


@KERNELS
@pytest.mark.parametrize("place", [0, 1, 2])
def test_the_mean_may_take_the_place_of_a_term(ops, place):
    terms = list(torch.arange(60_000.0).view(3, -1))
    ops.average_ranks(terms[place], terms, 3)
    assert torch.equal(terms[place], torch.arange(20_000.0, 40_000.0))


@KERNELS
def test_terms_that_do_not_fit_are_told(ops):
    mean = torch.empty(4)
    with pytest.raises(ValueError, match=r"1 terms.*2 ranks"):
        ops.average_ranks(mean, [torch.ones(4)], 2)
    for wrong in (torch.ones(5), torch.ones(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match="4 elements"):
            ops.average_ranks(mean, [torch.ones(4), wrong], 2)


def test_threads_change_no_bits():
    terms, means = list(torch.randn(3, 100_001)), []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            means.append(torch.empty(100_001))
            OPS.average_ranks(means[-1], terms, 3)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(*means)


def test_opcheck():
    mean, terms = torch.empty(5), list(torch.randn(2, 5))
    torch.library.opcheck(
        torch.ops.meshrec.average_ranks.default,
        (mean, terms, 2),
        test_utils=("test_schema", "test_faketensor"),
    )
