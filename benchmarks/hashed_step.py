"""Training steps of tables with hashed keys, beside fixed tables of the same rows.

All arms of a part see the same batches and alternate. Each part is verified first: where all IDs are known, a
hashed table equals the fixed table with the same rows. As in the trainer, Python's garbage collections leave
out the objects that exist before (``frozen_objects``).
"""

import gc
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import meshrec
from benchmarks.harness import Bar, Effort, Result, Timing, configs, in_turn, measure, selected, table
from benchmarks.memory_limit import PREFETCHES, LineLimit
from meshrec.ops.index import HashIndex, unique
from meshrec.ops.memory import frozen_objects, reserve_pages
from meshrec.optim import RowWiseAdagrad
from meshrec.tables import LRU, Hashed

FIXED, HASHED = "fixed tables", "hashed tables"
REUSED = "memory used before"
LINES = "a cache line of the index for each ID"
FROM_HOST = "memory of the host"
PAGES, PAGES_FROM_HOST = "writing to new pages", "writing to new pages of the host"


@dataclass(frozen=True, kw_only=True)
class Size:
    """``num_tables`` tables of ``num_rows`` x ``dim``, and batches of ``batch`` samples with ``bag`` IDs."""

    num_tables: int = 8
    num_rows: int = 1_000_000
    dim: int = 64
    batch: int = 2048
    bag: int = 20

    @property
    def num_ids(self) -> int:
        """The IDs of a table in a batch."""
        return self.batch * self.bag


def lines_of(indexes: Sequence[HashIndex], count: int) -> Callable[[], Any]:
    """Return a loop that touches ``count`` random cache lines of each index's own memory."""
    memory, lines = [], []
    for index in indexes:
        (header, buckets, *_), _ = index.kernel_tensors or ([], 0)
        shards = header[8:].view(-1, 4)
        shard = torch.randint(0, len(shards), (count,))
        line = (torch.rand(count, dtype=torch.float64) * shards[shard, 1]).long()
        memory.append(buckets.view(-1, 64))
        lines.append(shard * buckets.shape[1] + line)
    loop = LineLimit(memory, lines)
    timings = measure(
        {str(each): partial(loop.forward, each) for each in PREFETCHES}, Effort(rounds=3, calls=1)
    )
    best = min(PREFETCHES, key=lambda each: timings[str(each)].median)
    return partial(loop.forward, best)


class Arm:
    """Tables that are trained. ``raw`` has the ID of each row of each table, ``keys`` those of the tables."""

    def __init__(self, size: Size, keys: Hashed | None = None, raw: Sequence[Tensor] = ()) -> None:
        self.size = size
        num_rows, options = (size.num_rows, {}) if keys is None else (None, {"keys": keys})
        tables = configs(size.num_tables, num_rows, size.dim, **options)
        self._features = [config.feature_names[0] for config in tables]
        self.module = meshrec.EmbeddingBagCollection(tables)
        generator = torch.Generator().manual_seed(1)
        for t in range(size.num_tables if keys is None or raw else 0):
            weight = torch.empty(size.num_rows, size.dim).uniform_(-0.1, 0.1, generator=generator)
            own = self.module.embedding_bags[f"t{t}"]
            if keys is None:
                own.weight.data.copy_(weight)
            else:
                own.load({"weight": weight, "ids": raw[t]}, "")
        meshrec.fuse(self.module, optimizer=RowWiseAdagrad(lr=0.02))
        self._offsets = torch.arange(size.num_tables * size.batch + 1) * size.bag
        self._grad = torch.randn(size.batch, size.num_tables * size.dim, generator=generator)

    def forward(self, ids: Tensor) -> Tensor:
        features = meshrec.KeyedJaggedTensor(self._features, ids, offsets=self._offsets)
        return self.module(features).values()

    def step(self, ids: Tensor) -> Tensor:
        found = self.forward(ids)
        found.backward(self._grad)
        return found

    @torch.no_grad()
    def look_up(self, ids: Tensor) -> Tensor:
        return self.forward(ids)


def distinct(num: int, seed: int) -> Tensor:
    """Return distinct random IDs in random order."""
    generator = torch.Generator().manual_seed(seed)
    drawn = unique(torch.randint(-(2**63), 2**63 - 1, (num + num // 50 + 100,), generator=generator))[0]
    return drawn[torch.randperm(len(drawn), generator=generator)[:num]]


def batches(size: Size, num: int = 4) -> list[Tensor]:
    """Return the rows that batches read, int64 [num_tables, num_ids] each."""
    generator = torch.Generator().manual_seed(2)
    shape = (size.num_tables, size.num_ids)
    return [torch.randint(0, size.num_rows, shape, generator=generator) for _ in range(num)]


def in_turns(call: Callable[[Tensor], Any], batches: Sequence[Tensor]) -> Callable[[], Any]:
    """Return a function that calls with the next batch."""
    return in_turn([partial(call, batch) for batch in batches])


def known(size: Size, effort: Effort, step_bar: float) -> tuple[dict[str, Timing], list[Bar]]:
    """Compare steps and lookups where every ID has a row."""
    raw = [distinct(size.num_rows, t) for t in range(size.num_tables)]
    fixed, hashed = Arm(size), Arm(size, Hashed(max_rows=size.num_rows + 64), raw)
    rows = batches(size)
    ids = [torch.cat([raw[t][own[t]] for t in range(size.num_tables)]) for own in rows]
    rows = [own.flatten() for own in rows]
    for own, other in zip(rows[:2], ids[:2], strict=True):
        assert torch.equal(fixed.step(own), hashed.step(other)), "hashed and fixed tables differ"
    timings = measure({FIXED: in_turns(fixed.step, rows), HASHED: in_turns(hashed.step, ids)}, effort)
    indexes = [table.key_index for table in hashed.module.hashed_tables().values()]
    look_ups = {
        FIXED: in_turns(fixed.look_up, rows),
        HASHED: in_turns(hashed.look_up, ids),
        LINES: lines_of(indexes, size.num_ids),
    }
    reads = measure(look_ups, effort)
    ceiling = 1 + reads[LINES].median / reads[FIXED].median
    timings |= {f"{name}, evaluation": each for name, each in reads.items()}
    bars = [
        at_most(f"step, all IDs known, width {size.dim}", timings, HASHED, step_bar),
        replace(at_most(f"lookup in evaluation, width {size.dim}", reads, HASHED, 1.25), ceiling=ceiling),
    ]
    return timings, bars


def at_most(name: str, timings: dict[str, Timing], arm: str, asked: float) -> Bar:
    return Bar(name, timings[arm].median / timings[FIXED].median, asked, at_most=True)


def new(size: Size, effort: Effort) -> tuple[dict[str, Timing], list[Bar]]:
    """Measure steps in which every ID is new: in memory that the process has had before, in memory that the
    system has free, and in memory that the host of a virtual machine may have to give first.
    """
    effort = replace(effort, calls=1, warm_ups=1)
    fixed, *arms = Arm(size), *(Arm(size, Hashed(max_rows=100_000_000)) for _ in range(3))
    num = size.num_tables * size.num_ids
    turns = [0, 0, 0]

    def fresh(arm: int) -> None:
        turns[arm] += 1
        arms[arm].step(torch.arange(num) * 0x9E3779B97F4A7C15 + turns[arm])

    for _ in range(2 * effort.rounds):
        fresh(2)
    for each in arms[2].module.hashed_tables().values():
        each.clear()
    num_bytes = num * (size.dim + 1) * 4  # of the rows and their optimizer state
    calls = {
        FIXED: in_turns(fixed.step, [own.flatten() for own in batches(size)]),
        FROM_HOST: lambda: fresh(0),
        HASHED: lambda: fresh(1),
        REUSED: lambda: fresh(2),
        PAGES_FROM_HOST: fresh_pages(num_bytes),
        PAGES: fresh_pages(num_bytes),
    }
    free = partial(free_pages, 3 * num_bytes)
    timings = measure(calls, effort, {HASHED: free, PAGES: free})
    for arm, turn in zip(arms[:2], turns, strict=False):
        tables = arm.module.hashed_tables().values()
        assert all(each.num_alive == turn * size.num_ids for each in tables), "an ID has no row"
    bars = []
    for arm, pages in ((REUSED, None), (HASHED, PAGES), (FROM_HOST, PAGES_FROM_HOST)):
        bar = at_most(f"step, 100 % new IDs, {arm}", timings, arm, 2.5)
        ceiling = None if pages is None else 1 + timings[pages].median / timings[FIXED].median
        bars.append(replace(bar, ceiling=ceiling))
    return timings, bars


def fresh_pages(num_bytes: int) -> Callable[[], object]:
    """Return a function that writes to ``num_bytes`` of memory, at each call to pages not touched before."""
    room = 64
    memory, turn = reserve_pages((room, num_bytes), torch.uint8, None), 0

    def touch() -> object:
        nonlocal turn
        assert memory is not None, "the system does not reserve so many addresses"
        turn += 1
        return memory[turn % room].fill_(1)

    return touch


def free_pages(num_bytes: int) -> None:
    """Write to memory and return it to the system, which then has it free."""
    memory = reserve_pages((num_bytes,), torch.uint8, None)
    assert memory is not None, "the system does not reserve so many addresses"
    memory.fill_(1)


def eviction(size: Size, effort: Effort) -> tuple[dict[str, Timing], list[Bar]]:
    """Compare steps of full tables in which 1 % of the rows go."""
    raw = [distinct(size.num_rows, t) for t in range(size.num_tables)]
    fixed, hashed = Arm(size), Arm(size, Hashed(max_rows=size.num_rows, evict=LRU()), raw)
    num_new = size.num_rows // 100
    rows = batches(size, 8)
    known_ids = [torch.stack([raw[t][row] for t, row in enumerate(own)]) for own in rows]
    turn = 0

    def step() -> None:
        nonlocal turn
        ids = known_ids[turn % len(rows)]
        turn += 1
        ids[:, :num_new] = torch.arange(turn * num_new, (turn + 1) * num_new)
        hashed.step(ids.flatten())

    turns = [own.flatten() for own in rows]
    timings = measure({FIXED: in_turns(fixed.step, turns), HASHED: step}, effort)
    for each in hashed.module.hashed_tables().values():
        assert each.num_alive <= size.num_rows
        assert each.report.evicted >= turn * num_new, "rows stayed"
    return timings, [at_most("step, eviction of 1 % of the rows", timings, HASHED, 1.5)]


def growth(num_rows: int, dim: int, threads: int) -> dict[str, float]:
    """Let a table grow from 1,000 rows, in a process of its own; return times of steps and memory, and how
    much longer than the median a step of a fixed table takes at most, in as many seconds (``delay``).
    """
    torch.set_num_threads(threads)
    size = Size(num_tables=1, dim=dim, batch=2048, bag=20)
    arm = Arm(size, Hashed(max_rows=num_rows + size.num_ids))
    arm.step(torch.arange(size.num_ids) % 1000)
    table_ = arm.module.hashed_tables()["t0"]
    next_id, seconds = 1000, []
    half = size.num_ids // 2
    with frozen_objects():
        while table_.num_alive < num_rows:
            known_ids = torch.randint(0, next_id, (size.num_ids - half,))
            ids = torch.cat([known_ids, torch.arange(next_id, next_id + half)])
            next_id += half
            start = time.perf_counter()
            arm.step(ids)
            seconds.append(time.perf_counter() - start)
    status = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    peak, end = (float(status[name].split()[0]) for name in ("VmHWM", "VmRSS"))
    later = seconds[len(seconds) // 50 :]  # what any first steps take
    fixed, ids = Arm(replace(size, num_rows=1_000_000)), torch.randint(0, 1_000_000, (size.num_ids,))
    others = []
    while sum(others) < sum(seconds):
        start = time.perf_counter()
        fixed.step(ids)
        others.append(time.perf_counter() - start)
    return {
        "slowest": max(later),
        "median": statistics.median(later),
        "delay": max(others[len(others) // 50 :]) - statistics.median(others),
        "peak": peak,
        "end": end,
        "steps": len(seconds),
    }


def run_growth(num_rows: int, dim: int) -> tuple[dict[str, float], list[Bar]]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(growth, (num_rows, dim, torch.get_num_threads()))
    slowest, peak = found["slowest"] / found["median"], found["peak"] / found["end"]
    ceiling = 1 + found["delay"] / found["median"]
    return found, [
        Bar("growth: slowest step over the median", slowest, 4, at_most=True, ceiling=ceiling),
        Bar("growth: peak memory over the end's", peak, 1.15, at_most=True),
    ]


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify and time. ``tiny`` shrinks the tables, which only shows that the benchmark works."""
    full = Size(num_rows=2000, batch=16) if tiny else Size()
    few = replace(effort, calls=1, warm_ups=2)
    runs: dict[str, Callable[[], tuple[Any, list[Bar]]]] = {
        "known64": lambda: known(full, few, 1.3),
        "known128": lambda: known(replace(full, dim=128), few, 1.2),
        "new": lambda: new(full, few),
        "eviction": lambda: eviction(full, few),
        "growth": lambda: run_growth(200_000 if tiny else 20_000_000, 16),
    }
    figures, bars = {}, []
    for part in selected(list(runs), only):
        with frozen_objects():
            found, own = runs[part]()
        gc.collect()
        bars += own
        figures[part] = found
        rows = [
            [name, *(f"{ms:.1f}" for ms in each)] for name, each in found.items() if isinstance(each, Timing)
        ]
        if rows:
            print(table([f"{part}: ms", "median", "least"], rows), end="\n\n", flush=True)
    figures["size"] = asdict(full) | {"cores": os.cpu_count()}
    return Result(figures, bars)
