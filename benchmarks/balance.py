"""A training step of HSTU on 2 ranks, on histories of Zipf lengths: samples divided among the ranks by cost,
against the order in which they come.

The steps of both ways have the same samples. The gradients of the first step are compared before timing
starts. The ceiling of a figure assumes the best possible split: a step then takes as long as the mean of the
ranks, or as its longest sample if that takes longer.
"""

import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.attention import zipf_lengths
from benchmarks.harness import Bar, Effort, Result, table
from meshrec.data import InMemoryReader, Ranges
from meshrec.data.balance import EVEN_LENGTH, balanced_shares
from meshrec.modules import HSTUBlock
from meshrec.testing import RankPool

WAYS = ("plain", "balanced")
NUM_ITEMS = 5000


class Shape(NamedTuple):
    """Sizes of the model, and samples of a step on each rank."""

    batch: int
    longest: int
    num_steps: int
    exponent: float | None = None
    """Zipf's exponent of the lengths; None: the one that makes their mean a quarter of the longest."""
    width: int = 64


SHAPES = {
    "mean 1/4, up to 1,024": Shape(8, 1024, 12),
    "exponent 1, up to 4,096": Shape(16, 4096, 8, exponent=1.0),
    # 128 samples a rank are those of the published settings for HSTU.
    "exponent 1.5, up to 4,096": Shape(128, 4096, 12, exponent=1.5),
}
TINY = {"tiny": Shape(4, 32, 2, width=8)}


def lengths_of(shape: Shape) -> "np.typing.NDArray[np.int64]":
    num = 2 * shape.batch * shape.num_steps
    generator = torch.Generator().manual_seed(0)
    if shape.exponent is None:
        return zipf_lengths(num, shape.longest, generator).numpy()
    chances = torch.arange(1, shape.longest + 1, dtype=torch.float64) ** -shape.exponent
    return 1 + torch.multinomial(chances, num, replacement=True, generator=generator).numpy()


def ceiling(shape: Shape) -> float:
    """Return the gain of the best split of the steps."""
    plain = best = 0.0
    ranks = (histories(shape).batches(shape.batch, rank=rank, world_size=2) for rank in (0, 1))
    for step in zip(*ranks, strict=True):
        lengths = [batch.sparse["history"].lengths().double() for batch in step]
        costs = [each + each**2 / (EVEN_LENGTH * shape.width) for each in lengths]
        plain += max(float(each.sum()) for each in costs)
        best += max(float(sum(each.sum() for each in costs)) / 2, *(float(each.max()) for each in costs))
    return plain / best


def histories(shape: Shape) -> InMemoryReader:
    lengths, generator = lengths_of(shape), torch.Generator().manual_seed(1)
    num = len(lengths)
    items = torch.randint(0, NUM_ITEMS, (int(lengths.sum()),), generator=generator).numpy()
    ids = {"history": Ranges(items, np.cumsum(lengths) - lengths, lengths)}
    return InMemoryReader(np.zeros((num, 0), np.float32), np.ones(num, np.float32), ids, seed=0)


def batches(shape: Shape, way: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield items and offsets of this rank's samples, step by step."""
    reader = histories(shape)
    if way == "balanced":
        reader = reader.balanced(["history"], partial(balanced_shares, attention_width=shape.width))
    for batch in reader.batches(shape.batch, rank=dist.get_rank(), world_size=dist.get_world_size()):
        history = batch.sparse["history"]
        yield history.values(), history.offsets()


class Encoder(nn.Module):
    """Two layers of HSTU; the loss of a sample is the mean square of its tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.items = nn.Embedding(NUM_ITEMS, shape.width)
        self.blocks = nn.ModuleList(
            HSTUBlock(
                shape.width,
                max_length=shape.longest,
                attention_dim=shape.width,
                hidden_dim=shape.width,
                dropout=0.0,
            )
            for _ in range(2)
        )

    def forward(self, items: Tensor, offsets: Tensor) -> Tensor:
        tokens, times = self.items(items), torch.arange(len(items))
        for block in self.blocks:
            tokens = block(tokens, offsets, times)
        squares = torch.segment_reduce(tokens.square().mean(1), "mean", offsets=offsets)
        return squares.mean()


def train(shape: Shape, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[Tensor]]]:
    """Return the seconds of every step and the gradients of the first step, by way."""
    torch.set_num_threads(1)
    model = nn.parallel.DistributedDataParallel(Encoder(shape))
    read = {way: list(batches(shape, way)) for way in WAYS}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    gradients: dict[str, list[Tensor]] = {}
    for _ in range(rounds):
        for way, steps in read.items():
            for items, offsets in steps:
                model.zero_grad()
                dist.barrier()
                began = time.perf_counter()
                model(items, offsets).backward()  # ends when the gradients of both ranks are averaged
                seconds[way].append(time.perf_counter() - began)
                if way not in gradients:
                    gradients[way] = [
                        each.grad.clone() for each in model.parameters() if each.grad is not None
                    ]
    return seconds, gradients


def milliseconds(shape: Shape, rounds: int) -> dict[str, float]:
    """Compare the gradients; return, by way, the mean over steps of the median milliseconds of each step."""
    with RankPool(2) as pool:
        ranks: list[Any] = pool.run(train, shape, rounds)
    for _, gradients in ranks:
        for own, other in zip(*(gradients[way] for way in WAYS), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
    # A step takes as long as its slower rank; the first round is a warm-up.
    steps = {
        way: np.max([seconds[way][shape.num_steps :] for seconds, _ in ranks], axis=0).tolist()
        for way in WAYS
    }
    return {
        way: 1e3
        * statistics.mean(statistics.median(each[n :: shape.num_steps]) for n in range(shape.num_steps))
        for way, each in steps.items()
    }


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Compare the gradients, then measure. ``tiny`` shrinks the samples: it only tries the benchmark."""
    figures, rows, bars = {}, [], []
    for name, shape in (TINY if tiny else SHAPES).items():
        figures[name] = times = milliseconds(shape, effort.rounds)
        rows.append([name, *(f"{times[way]:.1f} ms" for way in WAYS)])
        bars.append(
            Bar(
                name=f"{name}: step in plain order over balanced",
                figure=times["plain"] / times["balanced"],
                asked=1.3,
                ceiling=ceiling(shape),
            )
        )
    print(table(["2 ranks, step", *WAYS], rows), end="\n\n")
    return Result(figures, bars)
