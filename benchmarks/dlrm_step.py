"""One training step of the same DLRM on 2 ranks: MeshRec, TorchRec, plain nn.EmbeddingBag and the dense part
alone.

The dense part is timed in MeshRec's version and in plain torch; the latter stands for the other libraries.
Every contender starts from the same weights and sees the same data, and the losses of the first steps are
compared before anything is timed. Each contender has its own processes. Contenders whose times are compared
take turns.
"""

import contextlib
import importlib.util
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from benchmarks.dlrm_contenders import BF16, TINY, Inputs, Shape, Step, build, make_inputs
from benchmarks.harness import Bar, Effort, Result, table
from meshrec.testing.rank_pool import RankPool

OUR_DENSE, PLAIN_DENSE = "meshrec dense alone", "plain dense alone"
MLPS = "plain mlps" + BF16
DENSE = (OUR_DENSE, PLAIN_DENSE, OUR_DENSE + BF16, PLAIN_DENSE + BF16, MLPS)
TABLE_WISE = "meshrec table_wise"
# Each group takes turns; what has whole tables on each rank is apart, for the sake of memory.
GROUPS = [
    [
        OUR_DENSE,
        PLAIN_DENSE,
        TABLE_WISE,
        "torchrec table_wise",
        "meshrec column_wise",
        "torchrec column_wise",
        "meshrec row_wise",
        "meshrec table_row_wise",
        "meshrec grid_shard",
    ],
    [OUR_DENSE, PLAIN_DENSE, "meshrec data_parallel", "torchrec data_parallel"],
    [OUR_DENSE, PLAIN_DENSE, "plain DDP"],
    [*DENSE, TABLE_WISE + BF16, "torchrec table_wise" + BF16, "torchrec table_wise"],
]
_WARM_UP = 3
_SECONDS_PER_ROUND = 1.0


_prepared: list[tuple[Step, list[Inputs]]] = []
"""The contender of one rank, with its batches."""


class Measured(NamedTuple):
    """Measurements of one contender on one rank."""

    losses: list[float]
    milliseconds: list[list[float]]
    """Step times by round."""
    sent_bytes: int


class Round(NamedTuple):
    """The timed steps of a round on one rank."""

    milliseconds: list[float]
    sent_bytes: list[int]


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify, time and compare with the bars. ``only``: names, or parts of names, of contenders."""
    shape = TINY if tiny else Shape()
    groups = [_timed(group, shape, effort) for group in _selected(only)]
    _verify({name: measured for group in groups for name, measured in group.items()})
    return _report(groups)


def _timed(group: Sequence[str], shape: Shape, effort: Effort) -> dict[str, list[Measured]]:
    """Run every contender in its own processes, in turns."""
    with contextlib.ExitStack() as stack:
        pools = {name: stack.enter_context(RankPool(2, timeout_seconds=900)) for name in group}
        losses = {name: pool.run(prepare, name, shape) for name, pool in pools.items()}
        rounds = [
            {name: pool.run(time_round, effort.calls) for name, pool in pools.items()}
            for _ in range(effort.rounds)
        ]
    return {
        name: [
            Measured(
                losses[name][rank],
                [by_name[name][rank].milliseconds for by_name in rounds],
                int(statistics.median(sent for by_name in rounds for sent in by_name[name][rank].sent_bytes)),
            )
            for rank in range(2)
        ]
        for name in group
    }


def _selected(only: Sequence[str]) -> list[list[str]]:
    """Return the groups of contenders that are wanted and installed, each with its dense part."""
    known = names = {name for group in GROUPS for name in group}
    if importlib.util.find_spec("torchrec") is None:
        names = {name for name in names if not name.startswith("torchrec")}
    if only:
        names = {name for name in names if any(word in name for word in only)}
    if not names:
        raise ValueError(f"--only {' '.join(only)} names no contender of {sorted(known)}.")
    groups = [[name for name in group if name in names or name in DENSE] for group in GROUPS]
    return [group for group in groups if set(group) - set(DENSE) or "dense alone" in only]


def prepare(name: str, shape: Shape) -> list[float]:
    """Build the model on every rank and take three steps; return their losses."""
    batches = [make_inputs(shape, number) for number in range(4)]
    step, losses = _built(name, shape), []
    for batch in batches[:_WARM_UP]:
        loss = step(batch).detach()
        dist.all_reduce(loss)
        losses.append(loss.item() / dist.get_world_size())
    _prepared.append((step, batches))
    return losses


def time_round(calls: int) -> Round:
    """Time as many steps as a second allows on every rank, after one step that is not timed."""
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
    return Round(times, sent)


def _built(name: str, shape: Shape) -> Step:
    library = next(each for each in ("meshrec", "torchrec", "plain") if name.startswith(each))
    return build(library, name.removeprefix(library).strip(), shape)


def _bytes_sent() -> int:
    """Return the bytes sent on all network interfaces of this machine, loopback included."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def _round_medians(ranks: list[Measured]) -> list[float]:
    """Return the median step of each round in milliseconds, where a step takes as long as on the slower
    rank.
    """
    return [
        statistics.median(map(max, zip(*calls, strict=True)))
        for calls in zip(*(rank.milliseconds for rank in ranks), strict=True)
    ]


def _verify(measured: dict[str, list[Measured]]) -> None:
    """Check that all contenders have the same first loss, and those with equal optimizers the same losses.

    The dense part alone is not compared.
    """
    names = [name for name in measured if name not in DENSE]
    reference = next((n for n in names if n.startswith("meshrec")), None)
    for name in names if reference is not None else []:
        # Others have no row-wise optimizer, or apply it to each column shard alone.
        steps = _WARM_UP if name.startswith(("meshrec", "torchrec table_wise")) else 1
        expected, tolerance = measured[reference or name][0].losses, 1e-4
        if BF16 in name or BF16 in (reference or ""):
            steps, tolerance = 1, 1e-3  # the next losses rise twentyfold, and rounding errors with them
        for loss, other in zip(measured[name][0].losses[:steps], expected[:steps], strict=True):
            if abs(loss - other) > tolerance * abs(other):
                raise AssertionError(f"{name}: losses {measured[name][0].losses}, expected {expected}")


def _report(groups: Sequence[dict[str, list[Measured]]]) -> Result:
    rows, figures, bars = [], {}, []
    for measured in groups:
        rounds = {name: _round_medians(ranks) for name, ranks in measured.items()}
        for name, times in rounds.items():
            dense = statistics.median(rounds[_dense_of(name)])
            step, sent = statistics.median(times), measured[name][0].sent_bytes
            rows.append([name, *(f"{x:.1f}" for x in (step, step - dense, sent / 1e6))])
            figures[name] = {
                "step_ms": step,
                "not_dense_ms": step - dense,
                "sent_bytes": sent,
                "losses": measured[name][0].losses,
            }
        bars += speed_bars(rounds)
    print(table(["contender", "step ms", "not dense ms", "MB through sockets"], rows), "\n")
    return Result(figures, bars)


def _dense_of(name: str) -> str:
    """Return the name of the dense part alone that belongs to a contender."""
    if name == MLPS:
        return MLPS
    dense = OUR_DENSE if name.startswith("meshrec") else PLAIN_DENSE
    return dense + BF16 if name.endswith(BF16) else dense


def speed_bars(rounds: dict[str, list[float]]) -> list[Bar]:
    """Return the median over rounds of the ratio within a round."""

    def ratio(name: str, other: str) -> float:
        return statistics.median(a / b for a, b in zip(rounds[name], rounds[other], strict=True))

    def not_dense(name: str) -> list[float]:
        dense = rounds[_dense_of(name)]
        return [step - alone for step, alone in zip(rounds[name], dense, strict=True)]

    bars = []
    for kind in ("row_wise", "table_row_wise", "grid_shard"):
        if {name := f"meshrec {kind}", TABLE_WISE} <= rounds.keys():
            figure = ratio(name, TABLE_WISE)
            bars.append(Bar(name=f"{kind} against table_wise", figure=figure, asked=1.3, at_most=True))
    for kind in ("table_wise", "column_wise", "data_parallel"):
        ours, theirs = f"meshrec {kind}", f"torchrec {kind}"
        if {ours, theirs} <= rounds.keys():
            asked = 15.0 if kind == "data_parallel" else 2.0
            ceiling = ratio(theirs, OUR_DENSE)
            bars.append(
                Bar(name=f"{kind} against TorchRec", figure=ratio(theirs, ours), asked=asked, ceiling=ceiling)
            )
        if {ours, theirs} <= rounds.keys() and kind != "data_parallel":
            bars.append(_not_dense_bar(f"{kind}, what is not dense", not_dense(ours), not_dense(theirs)))
    ours, theirs = TABLE_WISE + BF16, "torchrec table_wise" + BF16
    if {ours, theirs} <= rounds.keys():
        figure, ceiling = ratio(theirs, ours), ratio(theirs, OUR_DENSE + BF16)
        bars.append(
            Bar(name="table_wise, both bf16, against TorchRec", figure=figure, asked=2.8, ceiling=ceiling)
        )
    theirs = theirs.removesuffix(BF16)
    if {ours, theirs} <= rounds.keys():
        figure = ratio(theirs, ours)
        bars.append(Bar(name="table_wise bf16 against TorchRec fp32", figure=figure, asked=4.3))
    if MLPS in rounds:
        figure = ratio(OUR_DENSE + BF16, MLPS)
        bars.append(
            Bar(name="dense part in bf16 over its MLPs alone", figure=figure, asked=1.5, at_most=True)
        )
    return bars


def _not_dense_bar(name: str, ours: list[float], theirs: list[float]) -> Bar:
    """Return the ratio of the times outside the dense part; a lower bound of it if our time is below its own
    spread.
    """
    middle = statistics.median(ours)
    first, _, last = statistics.quantiles(ours, n=4, method="inclusive")
    if middle <= last - first:
        name, middle = f"{name}, at least", max(middle, 0.0) + last - first
    return Bar(name=name, figure=statistics.median(theirs) / middle, asked=4.0)
