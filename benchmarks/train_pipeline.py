"""The train pipeline beside the plain loop, on a simulated network.

C is the time of a step without a network, measured in the same run. Every exchange then has an extra latency
of 0, C/4 or C/2, and a bandwidth at which all bytes of a step take C/10. The loops train the same model and
take turns, with TorchRec's pipeline among them if it is installed. Their losses are compared before anything
is timed.
"""

import gc
import itertools
import resource
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

import meshrec
from benchmarks import train_pipeline_torchrec
from benchmarks.clicks_model import Clicks, ClicksLoop
from benchmarks.dlrm_contenders import fill
from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.slow_network import BACKEND, set_network
from meshrec import distributed as md
from meshrec.comms.dense_gradients import DENSE_GRADIENTS
from meshrec.testing import RankPool

LOOPS = ("plain", "pipeline")
PEER = "torchrec"
EXCHANGES = ("ids", "output", "gradient")
LATENCIES = {"0": 0.0, "C/4": 0.25, "C/2": 0.5}
_NUM_TABLES = 8
_WARM_UP = 6
_STEPS = 10
_MEMORY_STEPS = (200, 2000)


class Batch(NamedTuple):
    """One batch of the model."""

    dense: Tensor
    features: meshrec.KeyedJaggedTensor
    labels: Tensor


def _model(tiny: bool) -> Clicks:
    width, top = _sizes(tiny)
    tables = [
        meshrec.EmbeddingBagConfig(
            name=f"t{i}",
            embedding_dim=width,
            num_embeddings=10_000,
            feature_names=[f"f{i}"],
            init_fn=fill,
        )
        for i in range(_NUM_TABLES)
    ]
    return Clicks(meshrec.EmbeddingBagCollection(tables), [2 * width, width], top)


def _sizes(tiny: bool) -> tuple[int, list[int]]:
    """Sizes of the tables' rows and of the top MLP."""
    return (8, [16, 1]) if tiny else (64, [512, 256, 1])


class Round(NamedTuple):
    """Milliseconds of each step of one rank, and of each exchange within it (none for the peer)."""

    steps: list[float]
    exchanges: dict[str, list[float]]


class Measured(NamedTuple):
    """Results of one rank: losses by loop, C in seconds, and rounds by latency and loop."""

    losses: dict[str, list[float]]
    compute: float
    rounds: dict[str, dict[str, list[Round]]]


class _Loop:
    """One of our two loops on a rank."""

    def __init__(self, name: str, tiny: bool) -> None:
        env = _slow_env()
        self._loop = ClicksLoop(_model(tiny), env, pipelined=name == "pipeline", strict=True)
        self._batches = itertools.cycle(_batches(env.world.rank, 64 if tiny else 1024))
        self.model = self._loop.model

    def step(self) -> Tensor:
        return self._loop.step(self._batches)


def _slow_env() -> md.ShardingEnv:
    group: Any = dist.new_group(backend=BACKEND)
    return md.ShardingEnv.from_process_group(group, device_type="cpu")


def _peer(tiny: bool) -> train_pipeline_torchrec.PeerLoop:
    width, top = _sizes(tiny)
    batches = [
        (each.dense, list(each.features.keys()), each.features.values(), each.features.lengths(), each.labels)
        for each in _batches(dist.get_rank(), 64 if tiny else 1024)
    ]
    return train_pipeline_torchrec.PeerLoop(_NUM_TABLES, width, [2 * width, width], top, batches, _slow_env())


def _batches(rank: int, size: int) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(rank)
    names = [f"f{i}" for i in range(_NUM_TABLES)]
    for _ in range(8):
        lengths = torch.randint(0, 8, (_NUM_TABLES * size,), generator=generator)
        ids = torch.randint(0, 10_000, (int(lengths.sum()),), generator=generator)
        dense, labels = torch.rand(size, 13, generator=generator), torch.rand(size, generator=generator)
        yield Batch(dense, meshrec.KeyedJaggedTensor(names, ids, lengths=lengths), labels.round())


def all_loops(tiny: bool, num_rounds: int) -> Measured:
    """Compare the losses of the loops' first steps on a rank, then time the loops in turns."""
    set_network()
    loops: dict[str, Any] = {name: _Loop(name, tiny) for name in LOOPS}
    if train_pipeline_torchrec.is_here():
        loops[PEER] = _peer(tiny)
    losses = {name: [float(loop.step()) for _ in range(_WARM_UP)] for name, loop in loops.items()}
    num_bytes = _of_slowest(_bytes_per_step(loops["plain"]))
    compute = _of_slowest(
        min(statistics.median(_timed(loops["plain"], 0.0, float("inf")).steps) for _ in range(2)) / 1e3
    )
    rounds: dict[str, dict[str, list[Round]]] = {at: {name: [] for name in loops} for at in LATENCIES}
    for _ in range(num_rounds):
        for at, share in LATENCIES.items():
            speed = num_bytes / (compute / 10) if share else float("inf")
            for name, loop in loops.items():
                rounds[at][name].append(_timed(loop, share * compute, speed))
    return Measured(losses, compute, rounds)


def _of_slowest(value: float) -> float:
    """Return the largest value of all ranks."""
    found = torch.tensor([float(value)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _bytes_per_step(loop: _Loop) -> int:
    """Return the bytes that this rank sends in a step of the plain loop.

    Dense gradients count twice, as in the ring of many ranks, whichever way they take.
    """
    with md.measure_traffic() as traffic:
        loop.step()
    dense = [p.grad for p in loop.model.parameters() if p.grad is not None]
    of_tables = sum(sent for name, sent in traffic.items() if name != DENSE_GRADIENTS)
    return of_tables + 2 * sum(grad.nbytes for grad in dense)


def _timed(loop: Any, latency_seconds: float, bytes_per_second: float) -> Round:
    """Run some steps of the loop on a network of this latency and bandwidth."""
    steps: list[float] = []
    exchanges: dict[str, list[float]] = {name: [] for name in EXCHANGES}
    set_network(latency_seconds=latency_seconds, bytes_per_second=bytes_per_second)
    try:
        for _ in range(3):
            loop.step()
        for _ in range(_STEPS):
            start = time.perf_counter()
            with md.record_phases() as seconds:
                loop.step()
            steps.append(1e3 * (time.perf_counter() - start))
            for name, own in exchanges.items():
                own.append(1e3 * seconds.get(name, 0.0))
    finally:
        set_network()
    return Round(steps, exchanges)


def memory_of_steps(tiny: bool) -> list[int]:
    """Return the bytes of this rank's process after few and after many steps."""
    loop, found, done = _Loop("pipeline", True), [], 0
    for count in _MEMORY_STEPS:
        while done < (count // 20 if tiny else count):
            loop.step()
            done += 1
        gc.collect()
        found.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize())
    return found


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify, time and compare with the bars."""
    with RankPool(2, timeout_seconds=900) as pool:
        ranks = pool.run(all_loops, tiny, effort.rounds)
    for found in ranks:
        if found.losses["plain"] != found.losses["pipeline"]:
            raise AssertionError(f"the losses differ: {found.losses}")
        if PEER in found.losses:
            expected = torch.tensor(found.losses["plain"])
            torch.testing.assert_close(torch.tensor(found.losses[PEER]), expected, rtol=1e-4, atol=1e-5)
    with RankPool(2, timeout_seconds=900) as pool:
        memory = pool.run(memory_of_steps, tiny)
    return _report(ranks[0].compute, ranks[0].rounds, memory)


def _report(compute: float, rounds: dict[str, dict[str, list[Round]]], memory: list[list[int]]) -> Result:
    figures: dict[str, Any] = {"compute_ms": 1e3 * compute, "latencies": {}, "memory": memory}
    bars, rows = [], []
    loops = list(rounds["0"])
    medians = {
        at: {name: [statistics.median(each.steps) for each in found] for name, found in by_name.items()}
        for at, by_name in rounds.items()
    }
    waits = {
        at: {name: _exchanges(found) for name, found in by_name.items()} for at, by_name in rounds.items()
    }
    bare = {name: statistics.median(medians["0"][name]) for name in loops}
    parts = []
    for at, share in LATENCIES.items():
        steps = {name: statistics.median(medians[at][name]) for name in loops}
        plain, pipeline = (medians[at][name] for name in LOOPS)
        ratio = statistics.median(a / b for a, b in zip(plain, pipeline, strict=True))
        # Embeddings wait for the update, and the update for their gradients: two latencies in any order.
        least = 1e3 * compute * (1 + 2 * share)
        allowed = steps["plain"] / least if share else 1.0
        more = {
            name: {phase: waits[at][name][phase] - waits["0"][name][phase] for phase in EXCHANGES}
            for name in LOOPS
        }
        exposed = sum(more["pipeline"].values())
        hidden = sum(more["plain"].values()) - exposed
        figures["latencies"][at] = {
            **{f"{name}_ms": steps[name] for name in loops},
            "ratio": ratio,
            "allowed": allowed,
            "waits_ms": more,
            "hidden_ms": hidden,
            "exposed_ms": exposed,
        }
        rows.append(
            [at, *(f"{steps[name]:.1f}" for name in loops), f"{ratio:.2f}", f"{allowed:.2f}"]
            + [f"{more[name]['ids']:.1f}" for name in LOOPS]
        )
        if share:
            bars.append(Bar(name=f"step at a = {at}", figure=ratio, asked=0.95 * allowed, ceiling=allowed))
            sums = {"plain": bare["plain"] + hidden + exposed, "pipeline": bare["pipeline"] + exposed}
            parts.append(max(abs(sums[name] / steps[name] - 1) for name in LOOPS))
        else:
            bars.append(Bar(name="step at a = 0", figure=ratio, asked=0.98))
        if PEER in loops:
            against = [a / b for a, b in zip(medians[at][PEER], pipeline, strict=True)]
            bars.append(
                Bar(
                    name=f"TorchRec's pipeline over ours at a = {at}",
                    figure=statistics.median(against),
                    asked=1,
                )
            )
    ids = {name: figures["latencies"]["C/4"]["waits_ms"][name]["ids"] for name in LOOPS}
    share = 100 * max(0.0, ids["pipeline"]) / ids["plain"]
    bars.append(Bar(name="wait for ids at a = C/4", figure=share, asked=5, unit=" %", at_most=True))
    bars.append(
        Bar(name="hidden + exposed + compute, off", figure=100 * max(parts), asked=3, unit=" %", at_most=True)
    )
    growth = max(100 * (late / early - 1) for early, late in memory)
    bars.append(Bar(name="memory over 2,000 steps", figure=growth, asked=1, unit=" %", at_most=True))
    print(f"C = {1e3 * compute:.1f} ms; milliseconds per step")
    header = ["a", *loops, "ratio", "allowed", "ids: plain", "pipeline"]
    print(table(header, rows), flush=True)
    return Result(figures, bars)


def _exchanges(found: list[Round]) -> dict[str, float]:
    """Return milliseconds by phase: the median over rounds of each round's median."""
    return {
        phase: statistics.median(statistics.median(each.exchanges[phase]) for each in found)
        for phase in EXCHANGES
    }
