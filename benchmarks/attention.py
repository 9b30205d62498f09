"""Attention over jagged histories of Zipf lengths, against torch: time and memory of a step.

Torch has two ways: all samples padded to the longest, and, for a softmax without biases, buckets of samples
of similar lengths. All of them are float32 with the same masks, and their results and gradients are compared
first. Torch's tensors reuse the memory of the step before (`keep_memory`), so page faults take no time. The
table also shows the floating-point operations per second of each way, counting only those that the causal
mask needs, beside the rate of a plain matrix multiplication.
"""

import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, silu

from benchmarks.harness import Bar, Effort, Result, measure, table
from meshrec.ops.attention import Bias, jagged_attention, time_buckets

OURS, PADDED, BUCKETS = "meshrec", "padded torch", "torch in buckets"
NUM_BUCKETS = 129
THREADS = 2


class Shape(NamedTuple):
    """Sizes of a batch."""

    batch: int
    longest: int
    heads: int
    width: int


SHAPES = {"short": Shape(128, 200, 2, 32), "long": Shape(32, 1024, 4, 64)}
TINY = {"tiny": Shape(6, 20, 2, 8)}
KINDS = ("silu", "silu with biases", "softmax")


def zipf_lengths(batch: int, longest: int, generator: torch.Generator) -> Tensor:
    """Draw lengths in [1, longest] by Zipf's law, with the exponent that makes their mean a quarter."""
    sizes = torch.arange(1, longest + 1, dtype=torch.float64)
    low, high = 0.0, 3.0
    for _ in range(60):
        exponent = (low + high) / 2
        chances = sizes**-exponent
        mean = float((sizes * chances).sum() / chances.sum())
        low, high = (exponent, high) if mean > longest / 4 else (low, exponent)
    return 1 + torch.multinomial(sizes**-low, batch, replacement=True, generator=generator)


class Inputs:
    """One batch, as leaves, with the biases and the gradient of its result."""

    def __init__(self, shape: Shape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.shape = shape
        self.lengths = zipf_lengths(shape.batch, shape.longest, generator)
        self.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), self.lengths.cumsum(0)])
        count = int(self.offsets[-1])

        def drawn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator)

        self.tokens = [drawn(count, shape.heads, shape.width).requires_grad_() for _ in range(3)]
        self.position = drawn(2 * shape.longest - 1).requires_grad_()
        self.time = drawn(NUM_BUCKETS).requires_grad_()
        self.times = torch.randint(0, 10**8, (count,), generator=generator).sort().values
        self.grad = drawn(count, shape.heads, shape.width)
        place = torch.arange(shape.longest)
        self.valid = place < self.lengths[:, None]

    def leaves(self, kind: str) -> list[Tensor]:
        return [*self.tokens, *([self.position, self.time] if kind == "silu with biases" else [])]

    def padded(self, tokens: Tensor) -> Tensor:
        """Return [B, H, L, D] of the tokens of all samples."""
        out = tokens.new_zeros(*self.valid.shape, *tokens.shape[1:]).masked_scatter(
            self.valid.view(*self.valid.shape, *[1] * (tokens.dim() - 1)), tokens
        )
        return out.transpose(1, 2) if tokens.dim() == 3 else out


def ours(inputs: Inputs, kind: str) -> Tensor:
    shape = inputs.shape
    bias = Bias(inputs.position, inputs.time, inputs.times) if kind == "silu with biases" else Bias()
    return jagged_attention(
        *inputs.tokens,
        inputs.offsets,
        max_length=shape.longest,
        kind="softmax" if kind == "softmax" else "silu",
        scale=shape.width**-0.5,
        bias=bias,
    )


def padded(inputs: Inputs, kind: str) -> Tensor:
    """Compute the same with padded tensors: SDPA, or HSTU's formula as its public code has it."""
    shape = inputs.shape
    query, key, value = (inputs.padded(each) for each in inputs.tokens)
    if kind == "softmax":
        out = scaled_dot_product_attention(query, key, value, is_causal=True)
    else:
        scores = query @ key.transpose(2, 3) * shape.width**-0.5
        if kind == "silu with biases":
            place = torch.arange(shape.longest)
            times = inputs.padded(inputs.times)
            following = times.roll(-1, dims=1)
            last = inputs.lengths[:, None] - 1
            following.scatter_(1, last, times.gather(1, last))
            buckets = time_buckets(following[:, :, None] - times[:, None], NUM_BUCKETS)
            bias = inputs.position[shape.longest - 1 + place - place[:, None]] + inputs.time[buckets]
            scores = scores + bias[:, None]
        weights = silu(scores) / shape.longest
        causal = torch.ones(shape.longest, shape.longest).tril()
        out = (weights * causal) @ value
    return out.transpose(1, 2)[inputs.valid]


def in_buckets(inputs: Inputs, _: str) -> Tensor:
    """Compute softmax attention with SDPA in buckets of similar lengths.

    Each sample of a bucket has at least 3/4 of the length of its longest one.
    """
    order = inputs.lengths.argsort(descending=True)
    lengths = inputs.lengths[order]
    parts, places, first = [], [], 0
    while first < len(order):
        longest = int(lengths[first])
        last = first + int((lengths[first:] >= 0.75 * longest).sum())
        place = torch.arange(longest)
        at = inputs.offsets[order[first:last], None] + place
        valid = place < lengths[first:last, None]
        rows = at.clamp(max=len(inputs.grad) - 1)
        out = scaled_dot_product_attention(
            *(each[rows].transpose(1, 2) for each in inputs.tokens), is_causal=True
        )
        parts.append(out.transpose(1, 2)[valid])
        places.append(at[valid])
        first = last
    return torch.cat(parts)[torch.cat(places).argsort()]


CONTENDERS: dict[str, Callable[[Inputs, str], Tensor]] = {
    OURS: ours,
    PADDED: padded,
    BUCKETS: in_buckets,
}


def contenders(kind: str) -> list[str]:
    return [name for name in CONTENDERS if name != BUCKETS or kind == "softmax"]


def step(name: str, inputs: Inputs, kind: str) -> list[Tensor]:
    """Return the result and all gradients."""
    out = CONTENDERS[name](inputs, kind)
    return [out, *torch.autograd.grad(out, inputs.leaves(kind), inputs.grad)]


def verify(inputs: Inputs, kind: str) -> None:
    own = step(OURS, inputs, kind)
    for name in contenders(kind):
        for each, other in zip(own, step(name, inputs, kind), strict=True):
            bound = 1e-5 * max(1.0, float(other.detach().abs().max()))
            torch.testing.assert_close(each, other, rtol=1e-5, atol=bound)


def keep_memory() -> None:
    """Make the C library keep freed memory for the next step, where it has ``mallopt`` as glibc does."""
    told = getattr(ctypes.CDLL(None), "mallopt", None)
    if told is not None:
        told(-4, 0)  # M_MMAP_MAX: large blocks come from the heap
        told(-1, -1)  # M_TRIM_THRESHOLD: the heap never shrinks


def needed(inputs: Inputs) -> float:
    """Return the floating-point operations of the products of a step that the causal mask needs.

    Two products forward and four backward, each with a multiplication and an addition for half the pairs.
    """
    shape = inputs.shape
    return 6 * float(inputs.lengths.double().square().sum()) * shape.heads * shape.width


def plain_product(effort: Effort) -> float:
    """Return the floating-point operations per second of a product of two matrices of 1024 x 1024."""
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    times = measure({"product": lambda: left @ right}, effort)
    return 2e3 * 1024**3 / times["product"].median


def peak(name: str, shape: Shape, kind: str) -> int:
    """Measure the memory of a step in a process of its own: bytes above those of its inputs."""
    arguments = json.dumps([name, list(shape), kind])
    command = [sys.executable, "-m", "benchmarks.attention", arguments]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return int(done.stdout)


def report_peak(name: str, shape: Shape, kind: str) -> int:
    torch.set_num_threads(THREADS)
    step(name, Inputs(Shape(2, 8, shape.heads, shape.width)), kind)  # loads what a first call loads
    inputs = Inputs(shape)
    # The peak that getrusage tells is at least that of the parent process.
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    step(name, inputs, kind)
    return _memory("VmHWM") - before


def _memory(name: str) -> int:
    """Return a value of /proc/self/status, such as ``VmHWM``, in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Compare the results, then measure. ``tiny`` shrinks the batches: it only tries the benchmark."""
    before = torch.get_num_threads()
    torch.set_num_threads(THREADS)
    keep_memory()
    product = plain_product(effort)
    effort = replace(effort, warm_ups=min(1, effort.warm_ups), calls=1)
    figures: dict[str, Any] = {"product": product}
    bars, rows = [], []
    for title, shape in (TINY if tiny else SHAPES).items():
        inputs = Inputs(shape)
        for kind in KINDS:
            verify(inputs, kind)
            names = contenders(kind)
            times = measure({name: partial(step, name, inputs, kind) for name in names}, effort)
            memory = {name: max(1, peak(name, shape, kind)) for name in names}
            speed = times[PADDED].median / times[OURS].median
            share = memory[OURS] / memory[PADDED]
            name = f"{kind}, {title}"
            bars.append(Bar(name=f"{name}: time of padded torch over ours", figure=speed, asked=2.0))
            bars.append(
                Bar(name=f"{name}: memory over padded torch's", figure=share, asked=0.5, at_most=True)
            )
            if BUCKETS in names:
                speed = times[BUCKETS].median / times[OURS].median
                bars.append(Bar(name=f"{name}: time of torch in buckets over ours", figure=speed, asked=1.0))
            cells = {
                n: f"{times[n].median:.1f} ms, {memory[n] / 2**20:.0f} MiB, "
                f"{needed(inputs) / times[n].median / 1e6:.0f} GFLOP/s"
                for n in names
            }
            rows.append([name, *(cells.get(n, "") for n in CONTENDERS)])
            figures[name] = {
                n: {
                    **times[n]._asdict(),
                    "bytes": memory[n],
                    "mean_length": float(inputs.lengths.double().mean()),
                }
                for n in names
            }
    torch.set_num_threads(before)
    print(f"a plain product of matrices: {product / 1e9:.0f} GFLOP/s")
    print(table(["forward and backward, 2 threads", *CONTENDERS], rows), end="\n\n", flush=True)
    return Result(figures, bars)


if __name__ == "__main__":
    chosen, sizes, which = json.loads(sys.argv[1])
    print(report_peak(chosen, Shape(*sizes), which))
