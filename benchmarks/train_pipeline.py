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
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.clicks_model import (
    HAS_TORCHREC,
    ClicksLoop,
    Shape,
    TorchRecLoop,
    fill,
    make_batches,
    torchrec_batch,
)
from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.slow_network import BACKEND, set_network
from meshrec import distributed as md
from meshrec.comms.dense_gradients import DENSE_GRADIENTS
from meshrec.testing import RankPool

LOOPS = ("plain", "pipeline")
PEER = "torchrec"
EXCHANGES = ("ids", "output", "gradient")
LATENCIES = {"0": 0.0, "C/4": 0.25, "C/2": 0.5}
FULL = Shape(num_tables=8, num_rows=10_000, is_ragged=True, bottom=(128, 64), top=(512, 256, 1))
TINY = Shape(num_tables=8, num_rows=10_000, dim=8, batch=64, is_ragged=True, bottom=(16, 8), top=(16, 1))
_WARM_UP = 6
_STEPS = 10
_MEMORY_STEPS = (200, 2000)


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
    """One of the loops on a rank."""

    def __init__(self, name: str, shape: Shape) -> None:
        group: Any = dist.new_group(backend=BACKEND)
        env = md.ShardingEnv.from_process_group(group, device_type="cpu")
        batches: list[Any] = make_batches(shape, env.world.rank, 8)
        if name == PEER:
            self._loop: Any = TorchRecLoop(shape, env, pipelined=True)
            batches = [torchrec_batch(batch) for batch in batches]
        else:
            self._loop = ClicksLoop(shape, env, pipelined=name == "pipeline", strict=True, init_fn=fill)
        self._batches = itertools.cycle(batches)
        self.model = self._loop.model

    def step(self) -> torch.Tensor:
        loss: torch.Tensor = self._loop.step(self._batches)
        return loss


def all_loops(shape: Shape, num_rounds: int) -> Measured:
    """Compare the losses of the loops' first steps on a rank, then time the loops in turns."""
    set_network()
    loops = {name: _Loop(name, shape) for name in (*LOOPS, *[PEER] * HAS_TORCHREC)}
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


def _timed(loop: _Loop, latency_seconds: float, bytes_per_second: float) -> Round:
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
    loop, found, done = _Loop("pipeline", TINY), [], 0
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
        ranks = pool.run(all_loops, TINY if tiny else FULL, effort.rounds)
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
    bars, rows, latencies, parts = [], [], {}, []
    loops = list(rounds["0"])
    medians = {
        at: {name: [statistics.median(each.steps) for each in found] for name, found in by_name.items()}
        for at, by_name in rounds.items()
    }
    waits = {
        at: {name: _exchanges(found) for name, found in by_name.items()} for at, by_name in rounds.items()
    }
    bare = {name: statistics.median(medians["0"][name]) for name in loops}

    def ratio(at: str, name: str) -> float:
        """Return the median over rounds of a loop's step over the pipeline's."""
        pairs = zip(medians[at][name], medians[at]["pipeline"], strict=True)
        return statistics.median(a / b for a, b in pairs)

    for at, share in LATENCIES.items():
        steps = {name: statistics.median(medians[at][name]) for name in loops}
        # Embeddings wait for the update, and the update for their gradients: two latencies in any order.
        allowed = steps["plain"] / (1e3 * compute * (1 + 2 * share)) if share else 1.0
        more = {
            name: {phase: waits[at][name][phase] - waits["0"][name][phase] for phase in EXCHANGES}
            for name in LOOPS
        }
        plain, exposed = (sum(more[name].values()) for name in LOOPS)
        latencies[at] = {
            **{f"{name}_ms": steps[name] for name in loops},
            "ratio": ratio(at, "plain"),
            "allowed": allowed,
            "waits_ms": more,
            "hidden_ms": plain - exposed,
            "exposed_ms": exposed,
        }
        rows.append(
            [at, *(f"{steps[name]:.1f}" for name in loops), f"{ratio(at, 'plain'):.2f}", f"{allowed:.2f}"]
            + [f"{more[name]['ids']:.1f}" for name in LOOPS]
        )
        asked, ceiling = (0.95 * allowed, allowed) if share else (0.98, None)
        bars.append(Bar(f"step at a = {at}", ratio(at, "plain"), asked, ceiling=ceiling))
        if share:
            sums = {"plain": bare["plain"] + plain, "pipeline": bare["pipeline"] + exposed}
            parts += [abs(sums[name] / steps[name] - 1) for name in LOOPS]
        if PEER in loops:
            bars.append(Bar(f"TorchRec's pipeline over ours at a = {at}", ratio(at, PEER), 1))
    ids = latencies["C/4"]["waits_ms"]
    share = 100 * max(0.0, ids["pipeline"]["ids"]) / ids["plain"]["ids"]
    growth = max(100 * (late / early - 1) for early, late in memory)
    bars += [
        Bar("wait for ids at a = C/4", share, 5, unit=" %", at_most=True),
        Bar("hidden + exposed + compute, off", 100 * max(parts), 3, unit=" %", at_most=True),
        Bar("memory over 2,000 steps", growth, 1, unit=" %", at_most=True),
    ]
    print(f"C = {1e3 * compute:.1f} ms; milliseconds per step")
    print(table(["a", *loops, "ratio", "allowed", "ids: plain", "pipeline"], rows), flush=True)
    return Result({"compute_ms": 1e3 * compute, "latencies": latencies, "memory": memory}, bars)


def _exchanges(found: list[Round]) -> dict[str, float]:
    """Return milliseconds by phase: the median over rounds of each round's median."""
    return {
        phase: statistics.median(statistics.median(each.exchanges[phase]) for each in found)
        for phase in EXCHANGES
    }
