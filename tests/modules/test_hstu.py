"""The HSTU layer against the equations of its paper, written with dense tensors for one sample at a time."""

import math

import pytest
import torch

from meshrec.modules import HSTUBlock
from meshrec.ops.attention import time_buckets

WIDTH, HEADS, INNER, HIDDEN, LONGEST = 6, 2, 3, 4, 9


def made(**options):
    torch.manual_seed(0)
    sizes = {"num_heads": HEADS, "attention_dim": INNER, "hidden_dim": HIDDEN, "dropout": 0.0}
    return HSTUBlock(WIDTH, max_length=LONGEST, **sizes, **options)


def by_the_paper(layer, tokens, times):
    u, v, q, k = torch.nn.functional.silu(layer.projections(layer.norm(tokens))).split(
        [HEADS * HIDDEN, HEADS * HIDDEN, HEADS * INNER, HEADS * INNER], dim=1
    )
    heads = []
    for head in range(HEADS):
        inner = slice(head * INNER, (head + 1) * INNER)
        scores = q[:, inner] @ k[:, inner].T / math.sqrt(INNER)
        place = torch.arange(len(tokens))
        scores = scores + layer.position_bias[LONGEST - 1 + place - place[:, None]]
        if layer.time_bias is not None:
            following = torch.cat([times[1:], times[-1:]])
            scores = scores + layer.time_bias[time_buckets(following[:, None] - times, len(layer.time_bias))]
        weights = torch.nn.functional.silu(scores).tril() / LONGEST
        heads.append(weights @ v[:, head * HIDDEN : (head + 1) * HIDDEN])
    return tokens + layer.output(layer.attended_norm(torch.cat(heads, dim=1)) * u)


@pytest.mark.parametrize("num_time_buckets", [0, 129])
def test_a_layer_computes_the_equations(num_time_buckets):
    layer = made(num_time_buckets=num_time_buckets)
    lengths = torch.tensor([3, 0, LONGEST, 1])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    tokens = torch.randn(int(offsets[-1]), WIDTH, requires_grad=True)
    times = torch.randint(0, 10**6, (len(tokens),)).sort().values
    found = layer(tokens, offsets, times)
    parts = zip(tokens.split(lengths.tolist()), times.split(lengths.tolist()), strict=True)
    expected = torch.cat([by_the_paper(layer, part, own) for part, own in parts if len(part)])
    torch.testing.assert_close(found, expected)
    leaves = [tokens, *layer.parameters()]
    grad = torch.randn_like(found)
    wanted = torch.autograd.grad(expected, leaves, grad)
    torch.testing.assert_close(torch.autograd.grad(found, leaves, grad), wanted)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match=r"num_heads.*6.*9.*0.*3.*4.*1"):
        HSTUBlock(WIDTH, max_length=LONGEST, num_heads=0, attention_dim=INNER, hidden_dim=HIDDEN)
    layer = made()
    with pytest.raises(ValueError, match="2 tokens"):
        layer(torch.ones(2, WIDTH), torch.tensor([0, 2]))
    with pytest.raises(ValueError, match=r"longest 10.*max_length.*9"):
        layer(torch.ones(10, WIDTH), torch.tensor([0, 10]), torch.arange(10))
