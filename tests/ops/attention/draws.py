"""Random arguments of the attention ops, for every test that compares kernels with naive.py."""

import random

import torch

from meshrec.ops import operators
from meshrec.ops.attention import Mask, naive


def offsets_of(lengths):
    return torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])


def drawn(seed):
    """Return the arguments of ``jagged_attention``; queries, keys, values and biases are leaves."""
    chosen, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    heads = chosen.choice([1, 2, 3])
    width, value_width = chosen.choice([1, 4, 8, 17, 32, 70]), chosen.choice([1, 3, 8, 32, 65])
    most = chosen.choice([1, 2, 7, 40, 150])
    num_samples = chosen.choice([0, 1, 2, 5, 9])

    def sizes(largest):
        return torch.tensor([chosen.randint(0, int(each)) for each in largest], dtype=torch.int64)

    lengths = torch.tensor(
        [chosen.choice([0, 1, chosen.randint(0, most), most]) for _ in range(num_samples)], dtype=torch.int64
    )
    num_queries = sizes(lengths) if chosen.random() < 0.3 else lengths
    mask = Mask(chosen.random() < 0.7, chosen.choice([0, 0, 1, 5]), chosen.choice([0, 0, 1, 3]))
    targets = torch.zeros_like(lengths)
    if chosen.random() < 0.5:
        targets = torch.minimum(sizes(lengths), (lengths - mask.num_contextual).clamp(min=0))

    def leaf(*shape):
        return torch.randn(*shape, generator=generator).requires_grad_()

    count, max_length = int(lengths.sum()), most + chosen.choice([0, 3])
    tokens = [leaf(int(num_queries.sum()), heads, width), leaf(count, heads, width)]
    position = leaf(2 * max_length - 1) if chosen.random() < 0.6 else None
    time = leaf(chosen.choice([1, 20, 129])) if chosen.random() < 0.6 else None
    longest = 10 ** chosen.choice([2, 9])
    times = torch.randint(0, longest, (count,), generator=generator).sort().values
    return [
        *[*tokens, leaf(count, heads, value_width), offsets_of(lengths), offsets_of(num_queries), targets],
        *[position, time, None if time is None else times],
        *[max_length, chosen.choice([1.0, 0.3]), chosen.random() < 0.5, *mask],
    ]


def leaves_of(arguments):
    return [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]


def detached(arguments):
    return [each.detach() if isinstance(each, torch.Tensor) else each for each in arguments]


def check_equal(own, other, what):
    """Compare two results, or two lists of gradients, of which the other may lack some."""
    for at, (found, expected) in enumerate(zip(own, other, strict=True)):
        expected = torch.zeros_like(found) if expected is None else expected
        torch.testing.assert_close(
            found, expected, rtol=1e-5, atol=1e-5, msg=lambda text, at=at: f"{what}, tensor {at}: {text}"
        )


def gradient_of(out, seed):
    """A gradient of the size that the mean of a loss over queries has."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, generator=generator) / max(1, len(out)) ** 0.5


def kernels_agree(first, last):
    for seed in range(first, last):
        arguments = drawn(seed)
        expected, _ = naive.jagged_attention(*arguments)
        found, _ = operators.jagged_attention(*arguments)
        check_equal([found], [expected], f"draw {seed}")
        if not expected.numel():
            continue
        leaves, grad = leaves_of(arguments), gradient_of(expected, seed)
        wanted = torch.autograd.grad(expected, leaves, grad, allow_unused=True)
        check_equal(torch.autograd.grad(found, leaves, grad), wanted, f"gradients of draw {seed}")
