"""The attention kernels against the formula, sample by sample, on drawn shapes, masks and biases."""

import os

import pytest
import torch

from meshrec.ops import library, operators
from meshrec.ops.attention import Bias, Mask, jagged_attention, naive, num_time_buckets, time_buckets
from tests.ops.attention import draws
from tests.ops.attention.draws import check_equal, detached, drawn, gradient_of, kernels_agree, leaves_of

OP, GRAD = operators.jagged_attention, operators.jagged_attention_grad
DRAWS = int(os.environ.get("MESHREC_DRAWS", "120"))


@pytest.mark.parametrize("part", range(4))
def test_kernels_equal_the_formula(part):
    kernels_agree(part * DRAWS // 4, (part + 1) * DRAWS // 4)


@pytest.mark.skipif(not library.has_kernels, reason="no kernels are built")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_kernels_of_other_instruction_sets_equal_the_formula(run_code, isa):
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['kernels_agree'](1000, 1030)"
    run_code(code, draws.__file__, MESHREC_ISA=isa)


def test_the_written_gradient_is_that_of_autograd():
    for seed in range(30):
        arguments = drawn(seed)
        out, log_sums = naive.jagged_attention(*arguments)
        if not out.numel():
            continue
        grad = gradient_of(out, seed)
        wanted = torch.autograd.grad(out, leaves_of(arguments), grad, allow_unused=True)
        found = naive.jagged_attention_grad(grad, out.detach(), log_sums.detach(), *detached(arguments))
        biases = [of for of, bias in zip(found[3:], arguments[6:8], strict=True) if bias is not None]
        check_equal([*found[:3], *biases], wanted, f"draw {seed}")


@pytest.mark.threads
def test_threads_change_nothing():
    one, found = torch.get_num_threads(), []
    arguments = next(
        each for each in map(drawn, range(100)) if len(each[0]) > 300 and len(leaves_of(each)) == 5
    )
    for threads in (1, 3):
        torch.set_num_threads(threads)
        out, _ = OP(*arguments)
        grads = torch.autograd.grad(out, leaves_of(arguments), gradient_of(out, 0))
        found.append([out.detach(), *grads])
    torch.set_num_threads(one)
    assert all(torch.equal(own, other) for own, other in zip(*found, strict=True))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.15's own opcheck
@pytest.mark.parametrize("seed", [3, 4, 7, 8])
def test_opcheck(seed):
    arguments = drawn(seed)
    torch.library.opcheck(torch.ops.meshrec.jagged_attention.default, tuple(arguments))
    out, log_sums = OP(*detached(arguments))
    torch.library.opcheck(
        torch.ops.meshrec.jagged_attention_grad.default,
        (gradient_of(out, 0), out, log_sums, *detached(arguments)),
    )


def test_parts_of_one_projection_are_read_in_place():
    tokens, offsets = torch.randn(9, 2, 12), torch.tensor([0, 4, 9])
    parts = tokens.flatten(1).split(8, dim=1)
    views = [each.unflatten(1, (2, 4)) for each in parts]
    expected = jagged_attention(*(each.contiguous() for each in views), offsets, max_length=5)
    assert torch.equal(jagged_attention(*views, offsets, max_length=5), expected)


def test_a_softmax_equals_that_of_torch():
    query, key, value = torch.randn(3, 20, 2, 8)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.transpose(0, 1)[None] for each in (query, key, value)), is_causal=True
    )
    found = jagged_attention(
        query, key, value, torch.tensor([0, 20]), max_length=30, kind="softmax", scale=8**-0.5
    )
    torch.testing.assert_close(found, expected[0].transpose(0, 1))


@pytest.mark.parametrize("kind", ["silu", "softmax"])
def test_a_target_does_not_depend_on_other_targets_nor_the_history_on_targets(kind):
    generator = torch.Generator().manual_seed(0)
    tokens, times = torch.randn(9, 2, 4, generator=generator), torch.arange(0, 900, 100)
    bias = Bias(torch.randn(17, generator=generator), torch.randn(20, generator=generator), times)

    def attended(chosen, num_targets):
        own, end = tokens[chosen], torch.tensor([0, len(chosen)])
        return jagged_attention(
            *(own, own, own, end),
            max_length=9,
            kind=kind,
            mask=Mask(num_contextual=2),
            bias=bias._replace(timestamps_N=times[chosen], position_P=None),
            num_targets_B=torch.tensor([num_targets]),
        )

    both = attended([*range(9)], 2)
    torch.testing.assert_close(both[[*range(7), 8]], attended([*range(7), 8], 1))
    torch.testing.assert_close(both[:7], attended([*range(7)], 0))


def test_queries_of_the_last_tokens_give_the_last_rows():
    generator = torch.Generator().manual_seed(0)
    tokens, offsets = torch.randn(90, 2, 4, generator=generator), torch.tensor([0, 50, 90])
    bias = Bias(torch.randn(99, generator=generator), torch.randn(20, generator=generator), torch.arange(90))
    options = {"max_length": 50, "bias": bias, "num_targets_B": torch.tensor([3, 0])}
    whole = jagged_attention(tokens, tokens, tokens, offsets, **options)
    last = torch.cat([torch.arange(40, 50), torch.arange(85, 90)])
    found = jagged_attention(
        tokens[last], tokens, tokens, offsets, query_offsets_B1=torch.tensor([0, 10, 15]), **options
    )
    torch.testing.assert_close(found, whole[last])


def test_times_fall_into_buckets_of_a_third_more():
    seconds = torch.tensor([0, 1, 2, -2, 60, 86_400, 10**9])
    assert time_buckets(seconds, 129).tolist() == [0, 0, 2, 2, 13, 37, 68]
    assert time_buckets(seconds, 20).tolist() == [0, 0, 2, 2, 13, 19, 19]
    assert num_time_buckets(86_400) == 38


def test_a_device_without_a_kernel_is_told(caplog):
    tokens = torch.empty(5, 2, 4, device="meta")
    with caplog.at_level("WARNING", "meshrec"):
        for _ in range(2):
            jagged_attention(tokens, tokens, tokens, torch.tensor([0, 5]), max_length=5)
    (record,) = caplog.records
    assert "no kernel for these tensors on meta: plain torch computes it" in record.getMessage()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.ones(4, 2, 3)}, r"queries.*\[5, 2, 4\].*\[4, 2, 3\]"),
        ({"offsets": torch.tensor([0, 6])}, "6 tokens.*6 queries.*longest 6.*5 keys.*5 queries"),
        ({"max_length": 4}, "longest 5.*max_length.*4.*max_length"),
        (
            {"query_offsets_B1": torch.tensor([0, 0, 5])},
            "1 samples.*2",
        ),
        ({"bias": Bias(position_P=torch.ones(8))}, "8 entries.*max_length.*5 needs 9"),
        ({"bias": Bias(time_T=torch.ones(8))}, "5 tokens"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, message):
    tokens = torch.ones(5, 2, 4)
    given = {"value": tokens, "offsets": torch.tensor([0, 5]), "max_length": 5} | change
    value, offsets = given.pop("value"), given.pop("offsets")
    with pytest.raises(ValueError, match=message):
        jagged_attention(tokens, tokens, value, offsets, **given)
