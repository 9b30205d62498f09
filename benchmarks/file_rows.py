"""Tables in files, with 10 % of their rows in memory, beside tables in memory.

The disk is read and written past the page cache where it allows that. Each arm trains the same batches and
must give the same losses to the bit. Steps in memory, from a file, from a file without lookahead, and from a
file in a file system in memory, which shows the time of the cache without a disk, stand beside the disk's own
rates.
"""

import ctypes
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

import meshrec
from benchmarks.file_rows_arms import ROW_BYTES, SIZES, TINY, Arm, Batches, Sizes
from benchmarks.harness import Bar, Effort, Result, compiled, table
from meshrec.planner import IdSample
from meshrec.planner.disk import hit_rate
from meshrec.tables.cached.table import FileTable

LEAST_STEP, LEAST_LOOKAHEAD = 0.6, 1.5
_MLPERF = SIZES._replace(shape=replace(SIZES.shape, top=(1024, 1024, 512, 256, 1)))
_IN_MEMORY = Path("/dev/shm")


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Time steps with a dense part that takes less time than the disk, and with one that takes more."""
    dense = {"terabyte": TINY} if tiny else {"terabyte": SIZES, "mlperf": _MLPERF}
    found = {}
    for name, sizes in dense.items():
        batches = Batches(sizes.shape, sizes.warm_up + effort.rounds * sizes.steps + 3)
        no_disk = _IN_MEMORY if _IN_MEMORY.is_dir() else Path.cwd()
        with (
            tempfile.TemporaryDirectory(dir=Path.cwd()) as folder,
            tempfile.TemporaryDirectory(dir=no_disk) as fast,
        ):
            found[name] = _in_turns(sizes, batches, effort.rounds, {"disk": folder, "fast": fast})
    times = ["memory", "file", "no lookahead", "no disk", "disk alone"]
    header = ["dense part", *(f"{each}, ms" for each in times), "step", "lookahead"]
    print(table(header, [[name, *each.row()] for name, each in found.items()]))
    bars = [bar for name, each in found.items() for bar in each.bars(name)]
    return Result({name: each.figures for name, each in found.items()}, bars)


class Turns(NamedTuple):
    """Seconds of a step of each arm, and those that the disk alone needs for it."""

    memory: float
    ahead: float
    plain: float
    fast: float
    disk: float
    figures: dict[str, Any]

    @property
    def most_step(self) -> float:
        """The ratio of a step in memory to one from the file, if nothing but the slower of disk and
        processor took time.
        """
        return min(1.0, self.memory / self.disk) if self.disk else 1.0

    @property
    def most_lookahead(self) -> float:
        """The ratio of a step in which nothing overlaps to one in which everything does."""
        return (self.memory + self.disk) / max(self.memory, self.disk)

    def row(self) -> list[str]:
        times = [f"{1e3 * each:.1f}" for each in self[:5]]
        step, ahead = self.memory / self.ahead, self.plain / self.ahead
        return [*times, f"{step:.2f} of {self.most_step:.2f}", f"{ahead:.2f} of {self.most_lookahead:.2f}"]

    def bars(self, name: str) -> list[Bar]:
        """Return the bars that this disk allows with this dense part, and that of its reads.

        Lookahead has a bar where the disk takes longer than computing. Elsewhere it hides all waiting, but
        the system's work for each request still takes time from processors that compute.
        """
        rates = self.figures["per_second"]
        figure = rates["our reads"] / rates["plain reads"]
        bars = [Bar(f"{name}: reads over a plain reader's", figure, 0.8)]
        if self.most_step >= LEAST_STEP:
            text, step = f"{name}: a step in memory over one from the file", self.memory / self.ahead
            bars.append(Bar(text, step, LEAST_STEP, ceiling=self.most_step))
        if self.disk >= self.memory:
            text, ahead = f"{name}: lookahead over none", self.plain / self.ahead
            bars.append(Bar(text, ahead, LEAST_LOOKAHEAD, ceiling=self.most_lookahead))
        return bars


def _in_turns(sizes: Sizes, batches: Batches, rounds: int, folders: dict[str, str]) -> Turns:
    """Time a step in memory, from a file with lookahead, and without."""
    storage, fast = (
        meshrec.FileRows(path=folders[name], cache_rows=sizes.cached) for name in ("disk", "fast")
    )
    arms = {
        "memory": Arm(sizes, None, ahead=True),
        "file, ahead": Arm(sizes, storage, ahead=True),
        "file": Arm(sizes, storage, ahead=False),
        "no disk": Arm(sizes, fast, ahead=True),
    }
    num_ids = sizes.shape.batch * sizes.shape.bag
    for arm in arms.values():
        arm.fill(batches, num_ids)
    feeds = {name: iter(batches) for name in arms}
    losses = {name: arm.run(feeds[name], sizes.warm_up)[0] for name, arm in arms.items()}
    _check(losses)
    ahead = arms["file, ahead"]
    before = ahead.counts()
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(rounds):
        for name, arm in arms.items():
            losses[name], taken = arm.run(feeds[name], sizes.steps)
            seconds[name] += taken
        _check(losses)
    hits, *moved = (after - b for after, b in zip(ahead.counts(), before, strict=True))
    reads, writes = (each / rounds / sizes.steps for each in moved)
    rows = ahead.files[0]
    rates = _rates(rows, max(1, math.ceil(reads / sizes.shape.num_tables)))
    sample = batches.ids(200_000, seed=7)
    times = {name: statistics.median(each) for name, each in seconds.items()}
    figures = {
        "step_ms": {name: 1e3 * each for name, each in times.items()},
        "slowest_tenth_ms": {name: 1e3 * sorted(each)[9 * len(each) // 10] for name, each in seconds.items()},
        "hit_rate": hits / (hits + moved[0]),
        "predicted_hit_rate": hit_rate(
            sizes.shape.num_rows, sizes.cached, IdSample(len(sample), len(sample.unique())), num_ids
        ),
        "reads_per_step": reads,
        "writes_per_step": writes,
        "bytes_read_over_needed": rows.stored.file.layout.block_bytes / ROW_BYTES,
        "per_second": rates,
        "is_direct": rows.stored.file.is_direct,
    }
    disk = reads / rates["plain reads"] + writes / rates["our writes"]
    return Turns(*times.values(), disk, figures)


def _check(losses: dict[str, list[float]]) -> None:
    first = next(iter(losses.values()))
    for name, each in losses.items():
        if each != first:
            raise RuntimeError(f"{name} has losses {each}, and memory {first}")


def _rates(rows: FileTable, count: int) -> dict[str, float]:
    """Return rows per second: those that the table reads and writes with ``count`` rows per call, as in a
    step, and those that a bare loop reads without waiting between calls.
    """
    file, num_rows, calls = rows.stored.file, rows.rectangle.r1, 30
    library = compiled(Path(__file__).with_name("disk_limit.cpp"), "-O2", "-pthread")
    library.read_blocks.restype = ctypes.c_double
    rows.stored.write_initial(rows.stored.unwritten(torch.arange(num_rows)))
    memory = [torch.zeros(count, *part.shape[1:], dtype=part.dtype) for part in (rows.rows, *rows.state)]
    slots, found = torch.arange(count), {"our reads": [], "plain reads": [], "our writes": []}
    for turn in range(7):
        generator = torch.Generator().manual_seed(turn)
        drawn = [torch.randperm(num_rows, generator=generator)[:count].sort().values for _ in range(calls)]
        positions = torch.tensor([file.layout.position(key) for keys in drawn for key in keys.tolist()])
        for name, transfer in (("our reads", file.read), ("our writes", file.write)):
            start = time.perf_counter()
            for keys in drawn:
                transfer(keys, memory, slots)
            found[name].append(calls * count / (time.perf_counter() - start))
        taken = library.read_blocks(
            file._file,
            ctypes.c_void_p(positions.data_ptr()),
            ctypes.c_int64(len(positions)),
            ctypes.c_int64(file.layout.block_bytes),
            32,
        )
        found["plain reads"].append(calls * count / taken)
    return {name: statistics.median(each) for name, each in found.items()}
