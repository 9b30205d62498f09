"""One training step of the same DLRM on 2 ranks: MeshRec, TorchRec and the dense part alone, in fp32 and
bf16.

Every contender starts from the same weights and sees the same data, and the losses of the first steps are
compared before anything is timed. Each contender has its own processes, and they take turns.
"""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.clicks_model import (
    HAS_TORCHREC,
    LR,
    Batch,
    ClicksLoop,
    Shape,
    TorchRecLoop,
    fill,
    make_batches,
    torchrec_batch,
)
from benchmarks.harness import Bar, Effort, Result, selected, table
from meshrec.comms.mesh import default_env
from meshrec.models import DenseArch, InteractionArch, OverArch
from meshrec.testing.rank_pool import RankPool

BF16 = " bf16"
TABLE_WISE, TORCHREC, DENSE, MLPS = "meshrec", "torchrec", "dense alone", "mlps alone bf16"
CONTENDERS = [DENSE, DENSE + BF16, MLPS, TABLE_WISE, TABLE_WISE + BF16, TORCHREC, TORCHREC + BF16]
"""MeshRec's dense part alone, its MLPs in plain torch, and both libraries with whole tables on the ranks."""
TINY = Shape(num_tables=4, num_rows=100, dim=8, batch=16, bottom=(16, 8), top=(16, 1))
_WARM_UP = 3
_SECONDS_PER_ROUND = 1.0

Step = Callable[[Batch], Tensor]
"""Trains on a batch and returns its loss."""
_prepared: list[tuple[Step, list[Batch]]] = []
"""The contender of one rank, with its batches."""


class Measured(NamedTuple):
    """Measurements of one contender on one rank."""

    losses: list[float]
    milliseconds: list[list[float]]
    """Step times by round."""
    sent_bytes: int


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify, time and compare with the bars. ``only``: names, or parts of names, of contenders."""
    known = [name for name in CONTENDERS if HAS_TORCHREC or not name.startswith(TORCHREC)]
    chosen = selected(known, only)
    names = [name for name in known if name in chosen or "alone" in name]
    measured = _timed(names, TINY if tiny else Shape(), effort)
    _verify(measured)
    return _report(measured)


def _timed(names: Sequence[str], shape: Shape, effort: Effort) -> dict[str, list[Measured]]:
    """Run every contender in its own processes, in turns."""
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(RankPool(2, timeout_seconds=900)) for name in names}
        losses = {name: pool.run(prepare, name, shape) for name, pool in pools.items()}
        rounds = [
            {name: pool.run(time_round, effort.calls) for name, pool in pools.items()}
            for _ in range(effort.rounds)
        ]
    found: dict[str, list[Measured]] = {}
    for name in names:
        for rank in range(2):
            steps, sent = zip(*(by_name[name][rank] for by_name in rounds), strict=True)
            bytes_sent = int(statistics.median(itertools.chain(*sent)))
            found.setdefault(name, []).append(Measured(losses[name][rank], list(steps), bytes_sent))
    return found


def prepare(name: str, shape: Shape) -> list[float]:
    """Build the model on every rank and take three steps; return their losses."""
    batches = make_batches(shape, dist.get_rank(), 4)
    step, losses = _built(name, shape), []
    for batch in batches[:_WARM_UP]:
        loss = step(batch).detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    _prepared.append((step, batches))
    return losses


def time_round(calls: int) -> tuple[list[float], list[int]]:
    """Time as many steps as a second allows on every rank, after one step that is not timed.

    Returns:
        Milliseconds and sent bytes of each step.
    """
    step, batches = _prepared[0]
    dist.barrier()
    start = time.perf_counter()
    step(batches[3])  # brings the caches into the state of a run of this contender
    took = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    times, sent = [], []
    for number in range(max(1, min(calls, int(_SECONDS_PER_ROUND / took.item())))):
        dist.barrier()
        before, start = _bytes_sent(), time.perf_counter()
        step(batches[number % 4])
        times.append(1e3 * (time.perf_counter() - start))
        sent.append(_bytes_sent() - before)
    return times, sent


def _built(name: str, shape: Shape) -> Step:
    bf16, env = name.endswith(BF16), default_env()
    if name == MLPS:
        return _mlps(shape)
    if name.startswith(DENSE):
        return dense_step(shape, bf16=bf16)
    if name.startswith(TORCHREC):
        peer = TorchRecLoop(shape, env, pipelined=False, bf16=bf16)
        return lambda batch: peer.step(iter([torchrec_batch(batch)]))
    loop = ClicksLoop(shape, env, pipelined=False, bf16=bf16, init_fn=fill)
    return lambda batch: loop.step(iter([batch]))


class _DenseModel(nn.Module):
    """The dense part of MeshRec's DLRM, without tables."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dense_arch = DenseArch(shape.dense_in, shape.bottom)
        self.inter_arch = InteractionArch(shape.num_tables)
        self.over_arch = OverArch(self.inter_arch.model.out_features(shape.dim), shape.top)

    def forward(self, dense: Tensor, vectors: Tensor) -> Tensor:
        return self.over_arch(self.inter_arch(self.dense_arch(dense), vectors))


def dense_step(shape: Shape, *, bf16: bool) -> Step:
    """Build the dense part without a process group: no sharding can be faster than it."""
    model = _DenseModel(shape)
    vectors = torch.rand(shape.batch, shape.num_tables, shape.dim).requires_grad_()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR, fused=True)

    def step(batch: Batch) -> Tensor:
        optimizer.zero_grad()
        vectors.grad = None  # tables take a new gradient in every step
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            logits = model(batch.dense, vectors).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits.float(), batch.labels)
        loss.backward()
        optimizer.step()
        return loss

    return step


def _mlps(shape: Shape) -> Step:
    """Build only the MLPs, with weights and activations in bf16, and without loss and optimizer."""

    def mlp(sizes: Sequence[int]) -> nn.Sequential:
        layers = [nn.Linear(*pair, dtype=torch.bfloat16) for pair in itertools.pairwise(sizes)]
        return nn.Sequential(*(nn.Sequential(each, nn.ReLU()) for each in layers[:-1]), layers[-1])

    width = shape.dim + (shape.num_tables + 1) * shape.num_tables // 2
    bottom, top = mlp([shape.dense_in, *shape.bottom]), mlp([width, *shape.top])
    vectors = torch.rand(shape.batch, width, dtype=torch.bfloat16).requires_grad_()

    def step(batch: Batch) -> Tensor:
        vectors.grad = None
        for each in (bottom, top):
            each.zero_grad()
        loss = bottom(batch.dense.bfloat16()).relu().float().mean() + top(vectors).float().mean()
        loss.backward()
        return loss

    return step


def _bytes_sent() -> int:
    """Return the bytes sent on all network interfaces of this machine, loopback included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def _verify(measured: dict[str, list[Measured]]) -> None:
    """Check that all contenders with tables have the losses of MeshRec. In bf16, only the first is compared:
    the next ones rise twentyfold, and rounding errors with them.
    """
    losses = {name: ranks[0].losses for name, ranks in measured.items() if "alone" not in name}
    for name, found in losses.items():
        expected = losses.get(TABLE_WISE, next(iter(losses.values())))
        compared = zip(found, expected, strict=True)
        steps, tolerance = (1, 1e-3) if BF16 in name or TABLE_WISE not in losses else (_WARM_UP, 1e-4)
        for loss, other in itertools.islice(compared, steps):
            if abs(loss - other) > tolerance * abs(other):
                raise AssertionError(f"{name}: losses {found}, expected {expected}")


def _report(measured: dict[str, list[Measured]]) -> Result:
    rows, figures, rounds = [], {}, {}
    for name, ranks in measured.items():
        # A step takes as long as on the slower rank.
        rounds[name] = [
            statistics.median(map(max, zip(*calls, strict=True)))
            for calls in zip(*(rank.milliseconds for rank in ranks), strict=True)
        ]
        step, sent = statistics.median(rounds[name]), ranks[0].sent_bytes
        rows.append([name, f"{step:.1f}", f"{sent / 1e6:.1f}"])
        figures[name] = {"step_ms": step, "sent_bytes": sent, "losses": ranks[0].losses}
    print(table(["contender", "step ms", "MB through sockets"], rows), "\n")
    return Result(figures, speed_bars(rounds))


def speed_bars(rounds: dict[str, list[float]]) -> list[Bar]:
    """Return the median over rounds of the ratio within a round."""

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rounds[name], rounds[other], strict=True))

    bars = []
    for ours, theirs, asked in (("", "", 2.0), (BF16, BF16, 2.8), (BF16, "", 4.3)):
        if {TABLE_WISE + ours, TORCHREC + theirs} <= rounds.keys():
            figure, ceiling = (ratio(TORCHREC + theirs, each + ours) for each in (TABLE_WISE, DENSE))
            text = f"meshrec{ours or ' fp32'} against torchrec{theirs or ' fp32'}"
            bars.append(Bar(text, figure, asked, ceiling=ceiling))
    figure = ratio(DENSE + BF16, MLPS)
    return [*bars, Bar("dense part in bf16 over its MLPs alone", figure, 1.5, at_most=True)]
