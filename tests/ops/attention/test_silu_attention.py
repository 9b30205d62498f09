"""Attention in blocks against the formula, sample by sample, on drawn shapes, masks and biases."""

import random

import pytest
import torch

from meshrec.ops.attention import Bias, Mask, blocks, naive, num_buckets_of, silu_attention, time_buckets


def drawn(seed):
    """Return differentiable leaves (query, key, value, and the biases there are), offsets and options."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads, width, value_width = chosen.choice([1, 2, 3]), chosen.choice([1, 4, 8]), chosen.choice([1, 3, 8])
    most = chosen.choice([1, 2, 7, 40, 150])
    lengths = torch.tensor(
        [chosen.choice([0, 1, chosen.randint(0, most), most]) for _ in range(chosen.choice([0, 1, 2, 5, 9]))],
        dtype=torch.int64,
    )
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    count, max_length = int(offsets[-1]), most + chosen.choice([0, 3])
    mask = Mask(chosen.random() < 0.7, chosen.choice([0, 0, 1, 5]), chosen.choice([0, 0, 1, 3]))
    targets = None
    if chosen.random() < 0.5:
        targets = torch.tensor([chosen.randint(0, int(n)) for n in lengths], dtype=torch.int64)
        targets = torch.minimum(targets, (lengths - mask.num_contextual).clamp(min=0))

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    leaves = [
        leaf(count, heads, width),
        leaf(count, heads, width),
        leaf(count, heads, value_width),
    ]
    position = leaf(2 * max_length - 1) if chosen.random() < 0.6 else None
    time = leaf(chosen.choice([1, 20, 129])) if chosen.random() < 0.6 else None
    times = torch.randint(0, 10**9, (count,), generator=generator).sort().values
    options = {
        "max_length": max_length,
        "scale": chosen.choice([1.0, 0.3]),
        "mask": mask,
        "bias": Bias(position, time, times),
        "num_targets_B": targets,
    }
    return [*leaves, *(each for each in (position, time) if each is not None)], offsets, options


@pytest.mark.parametrize("small_blocks", [False, True])
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_blocks_equal_the_formula(monkeypatch, first, small_blocks):
    if small_blocks:
        monkeypatch.setattr(blocks, "_BLOCK", 200)
        monkeypatch.setattr(blocks, "_ROWS", 5)
    for seed in range(first, first + 30):
        leaves, offsets, options = drawn(seed)
        expected = naive.silu_attention(*leaves[:3], offsets, **options)
        found = silu_attention(*leaves[:3], offsets, **options)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        if not expected.numel():
            continue
        grad = torch.randn_like(expected)
        wanted = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
        for own, other in zip(torch.autograd.grad(found, leaves, grad), wanted, strict=True):
            other = torch.zeros_like(own) if other is None else other
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-5)


def test_a_target_does_not_depend_on_other_targets_nor_the_history_on_targets():
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(9, 2, 4, generator=generator)
    offsets, mask = torch.tensor([0, 9]), Mask(num_contextual=2)
    both = silu_attention(
        tokens, tokens, tokens, offsets, max_length=9, mask=mask, num_targets_B=torch.tensor([2])
    )
    one, end = tokens[[*range(7), 8]], torch.tensor([0, 8])
    alone = silu_attention(one, one, one, end, max_length=9, mask=mask, num_targets_B=torch.tensor([1]))
    torch.testing.assert_close(both[[*range(7), 8]], alone)
    none = silu_attention(tokens[:7], tokens[:7], tokens[:7], torch.tensor([0, 7]), max_length=9, mask=mask)
    torch.testing.assert_close(both[:7], none)


def test_groups_hold_samples_of_similar_length():
    lengths = sorted([100, 99, 98, 50, 49, 3, 3, 2, 1, 1, 0, 0], reverse=True)
    sizes = blocks.group_sizes(lengths, num_heads=2)
    assert sum(sizes) == 10
    first = 0
    for size in sizes:
        group = lengths[first : first + size]
        assert size * group[0] ** 2 <= 1.2 * sum(each**2 for each in group)
        first += size
    assert blocks.group_sizes([], num_heads=1) == []


def test_times_fall_into_buckets_of_a_third_more():
    seconds = torch.tensor([0, 1, 2, -2, 60, 86_400, 10**9])
    assert time_buckets(seconds, 129).tolist() == [0, 0, 2, 2, 13, 37, 68]
    assert time_buckets(seconds, 20).tolist() == [0, 0, 2, 2, 13, 19, 19]
    assert num_buckets_of(86_400) == 38


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"value": torch.ones(4, 2, 3)}, r"queries \[5, 2, 4\], keys .* values \[4, 2, 3\]: allowed are"),
        ({"offsets": torch.tensor([0, 6])}, "the samples have 6 tokens, the longest 6: the queries have 5"),
        ({"max_length": 4}, "longest 5: .* max_length is 4. Cut longer histories, or raise max_length"),
        ({"bias": Bias(position_P=torch.ones(8))}, "position bias has 8 entries: max_length 5 needs 9"),
        ({"bias": Bias(time_T=torch.ones(8))}, "needs a timestamp for each of the 5 tokens, got none"),
    ],
)
def test_sizes_that_do_not_fit_are_named(change, message):
    tokens = torch.ones(5, 2, 4)
    given = {"value": tokens, "offsets": torch.tensor([0, 5]), "max_length": 5} | change
    value, offsets = given.pop("value"), given.pop("offsets")
    with pytest.raises(ValueError, match=message):
        silu_attention(tokens, tokens, value, offsets, **given)
