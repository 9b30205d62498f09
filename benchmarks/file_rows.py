"""Tables in files, with 10 % of their rows in memory, beside tables in memory and tables that are mapped.

The IDs follow Zipf's law with exponent 1.05 over shuffled rows of width 64. The disk is read and written past
the page cache where it allows that. Each arm trains the same batches and must give the same losses to the
bit.
"""

import ctypes
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import meshrec
from benchmarks.harness import Bar, Effort, Result, table
from meshrec import distributed as md
from meshrec.model_parallel import DistributedModelParallel
from meshrec.models.dlrm import DLRM
from meshrec.ops.mapping import expect_misses, map_file
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.planner import IdSample
from meshrec.planner.disk import hit_rate
from meshrec.tables.file_table import FileTable
from meshrec.tables.row_cache import slot_bytes

WIDTH, EXPONENT, SHARE = 64, 1.05, 0.1
ROW_BYTES = 4 * WIDTH + 4
_SECONDS, _SERVE_SECONDS = 120, 8


SERVED = ("pages", "pages, requested", "row cache")
"""The ways to look up rows of a file that is larger than memory."""


class Sizes(NamedTuple):
    """The sizes of the model and of its batches."""

    num_tables: int
    num_rows: int
    batch: int
    bag: int
    top: list[int]
    warm_up: int
    steps: int

    @property
    def cached(self) -> int:
        """The rows of a table that are in memory."""
        return max(256, int(SHARE * self.num_rows))


SIZES = Sizes(4, 600_000, 2048, 2, [512, 256, 1], 6, 10)
TINY = Sizes(2, 2_000, 32, 2, [16, 1], 3, 2)


class Clicks(nn.Module):
    """A DLRM with its loss."""

    def __init__(self, sizes: Sizes, storage: meshrec.FileRows | None) -> None:
        super().__init__()
        configs = [
            meshrec.EmbeddingBagConfig(
                name=f"t{i}",
                num_embeddings=sizes.num_rows,
                embedding_dim=WIDTH,
                feature_names=[f"f{i}"],
                storage=storage,
            )
            for i in range(sizes.num_tables)
        ]
        torch.manual_seed(0)
        collection = meshrec.EmbeddingBagCollection(configs, device="meta")
        self.dlrm = DLRM(collection, 13, [128, WIDTH], sizes.top)

    def forward(self, batch: tuple[Tensor, meshrec.KeyedJaggedTensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss twice, in the form of the pipelines."""
        logits = self.dlrm(*batch[:2]).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch[2])
        return loss, loss.detach()


class Batches:
    """Batches of IDs by Zipf's law, made before anything is timed."""

    def __init__(self, sizes: Sizes, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        ranks = torch.arange(1, sizes.num_rows + 1, dtype=torch.float64)
        law = ranks.pow(-EXPONENT).cumsum(0)
        places = torch.randperm(sizes.num_rows, generator=generator)
        self._all = []
        num_ids = sizes.batch * sizes.bag
        for _ in range(count):
            drawn = torch.rand(sizes.num_tables * num_ids, generator=generator, dtype=torch.float64) * law[-1]
            ids = places[torch.searchsorted(law, drawn).clamp_(max=sizes.num_rows - 1)]
            features = meshrec.KeyedJaggedTensor(
                [f"f{i}" for i in range(sizes.num_tables)],
                ids,
                lengths=torch.full((sizes.num_tables * sizes.batch,), sizes.bag),
            )
            dense = torch.rand(sizes.batch, 13, generator=generator)
            labels = (torch.rand(sizes.batch, generator=generator) < 0.3).float()
            self._all.append((dense, features, labels))

        self.law, self.places, self.ids_per_table = law, places, num_ids

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)

    def ids(self, count: int, seed: int) -> Tensor:
        """Draw some IDs of one table."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(count, generator=generator, dtype=torch.float64) * self.law[-1]
        return self.places[torch.searchsorted(self.law, drawn).clamp_(max=len(self.places) - 1)]


class Arm:
    """A model that is trained step by step."""

    def __init__(self, sizes: Sizes, storage: meshrec.FileRows | None, *, ahead: bool) -> None:
        model, env = Clicks(sizes, storage), md.ShardingEnv.single_process()
        path = "dlrm.sparse_arch.embedding_bag_collection"
        plan = md.construct_module_sharding_plan(
            model.get_submodule(path),
            {f"t{i}": md.table_wise(rank=0) for i in range(sizes.num_tables)},
            world_size=1,
        )
        self.model = DistributedModelParallel(
            model,
            env,
            plan=md.ShardingPlan({path: plan}),
            sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.05))],
        )
        fused = self.model.fused_optimizer
        rest = {name: p for name, p in self.model.named_parameters() if name not in fused.params}
        dense = KeyedOptimizerWrapper(rest, lambda parameters: torch.optim.Adagrad(parameters, lr=0.01))
        self._optimizer = CombinedOptimizer([fused, dense])
        self._pipeline = TrainPipeline(self.model, self._optimizer) if ahead else None
        shards = self.model.module.get_submodule(path).built.shards  # type: ignore[union-attr]
        self.tables = [rows for each in shards.values() for rows in each.tables]

    def fill(self, batches: Batches) -> None:
        """Use rows as training would, until half of the rows of full caches have been replaced."""
        for number, rows in enumerate(self.files()):
            turn = 0
            while rows.counts.num_written < len(rows.slot_keys) // 2:
                ids = batches.ids(batches.ids_per_table, seed=1000 * number + turn)
                rows.resolve(ids, train=True).pin.wait()  # type: ignore[attr-defined]
                turn += 1

    def files(self) -> list[FileTable]:
        """Return the tables in files."""
        return [each for each in self.tables if isinstance(each, FileTable)]

    def counts(self) -> tuple[int, int, int]:
        """Return the distinct rows of batches that were in memory and that were not, and the rows written."""
        counts = [rows.counts for rows in self.files()]
        return tuple(
            sum(getattr(c, name) for c in counts) for name in ("num_used", "num_read", "num_written")
        )  # type: ignore[return-value]

    def run(self, batches: Iterator[Any], count: int) -> tuple[list[float], list[float]]:
        """Train some steps; return the losses, and seconds."""
        losses, seconds = [], []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(float(self._step(batches)))
            seconds.append(time.perf_counter() - start)
        return losses, seconds

    def _step(self, batches: Iterator[Any]) -> Tensor:
        if self._pipeline is not None:
            output: Tensor = self._pipeline.progress(batches)
            return output
        self._optimizer.zero_grad()
        loss, output = self.model(next(batches))
        loss.backward()
        self._optimizer.step()
        return output


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify that the arms agree, and time them in turns; then train each within a limit of memory."""
    sizes = TINY if tiny else SIZES
    batches = Batches(sizes, sizes.warm_up + effort.rounds * sizes.steps + 3)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        figures, bars = _in_turns(sizes, batches, effort.rounds, folder)
    print(json.dumps(figures), flush=True)
    limited, more = _all_limited(sizes, tiny)
    print(json.dumps(limited), flush=True)
    return Result({**figures, "limited": limited}, [*bars, *more])


def _in_turns(sizes: Sizes, batches: Batches, rounds: int, folder: str) -> tuple[dict[str, Any], list[Bar]]:
    """Time a step in memory, from a file with lookahead, and without."""
    storage = meshrec.FileRows(path=folder, cache_rows=sizes.cached)
    arms = {
        "memory": Arm(sizes, None, ahead=True),
        "file, ahead": Arm(sizes, storage, ahead=True),
        "file": Arm(sizes, storage, ahead=False),
    }
    for arm in arms.values():
        arm.fill(batches)
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
    hits, reads, writes = (after - b for after, b in zip(ahead.counts(), before, strict=True))
    steps, (rows, *_) = rounds * sizes.steps, ahead.files()
    rates = _rates(rows)
    times = {name: statistics.median(each) for name, each in seconds.items()}
    disk = reads / steps / rates["plain reads"] + writes / steps / rates["our writes"]
    sample = batches.ids(200_000, seed=7)
    draws = sizes.batch * sizes.bag
    figures = {
        "step_ms": {name: 1e3 * each for name, each in times.items()},
        "disk_ms_by_arithmetic": 1e3 * disk,
        "hit_rate": hits / (hits + reads),
        "predicted_hit_rate": hit_rate(
            sizes.num_rows, sizes.cached, IdSample(len(sample), len(sample.unique())), draws
        ),
        "reads_per_step": reads / steps,
        "writes_per_step": writes / steps,
        "bytes_read_over_needed": rows.stored.file.layout.block_bytes / ROW_BYTES,
        "per_second": rates,
        "is_direct": rows.stored.file.is_direct,
    }
    bars = [
        Bar(
            name="a step in memory over one from the file",
            figure=times["memory"] / times["file, ahead"],
            asked=0.6,
            ceiling=min(1.0, times["memory"] / disk) if disk else None,
        ),
        Bar(name="reads over a plain reader's", figure=rates["our reads"] / rates["plain reads"], asked=0.8),
        Bar(name="lookahead over none", figure=times["file"] / times["file, ahead"], asked=1.5),
    ]
    print(table(["arm", "ms"], [[name, f"{1e3 * each:.1f}"] for name, each in times.items()]))
    return figures, bars


def _all_limited(sizes: Sizes, tiny: bool) -> tuple[dict[str, Any], list[Bar]]:
    """Train from a file and from mapped memory, with the memory of a small model and that of the cache.

    The page cache takes what it is given, so mapped memory has a limit; what the file takes is counted.
    """
    budget = sizes.num_tables * sizes.cached * slot_bytes(ROW_BYTES)
    found: dict[str, Any] = {"budget": budget}
    for kind in ("small", "file"):
        # Threads and the allocator's arenas differ by several megabytes from one process to the next.
        runs = [_limited(kind, tiny, 1 << 40) for _ in range(3)]
        if None in runs:
            return found, []
        found[kind] = sorted(runs, key=lambda each: each["peak"])[1]  # type: ignore[index]
    small = found["small"]
    found["mapped"] = _limited("mapped", tiny, int(small["peak"] + 1.1 * budget))
    room = int(small["peak"] + SHARE * 4 * sizes.num_rows * ROW_BYTES)
    found |= {f"serve: {kind}": _limited(kind, tiny, room) for kind in SERVED}
    file, mapped, bars = found["file"], found["mapped"], []
    if file:
        grown = (file["peak"] - small["peak"]) / budget
        bars.append(Bar(name="memory over the cache's budget", figure=grown, asked=1.1, at_most=True))
    if file and mapped:
        bars.append(
            Bar(name="over a mapped table of the same budget", figure=mapped["step"] / file["step"], asked=2)
        )
    return found, bars


def _check(losses: dict[str, list[float]]) -> None:
    first = next(iter(losses.values()))
    for name, each in losses.items():
        if each != first:
            raise RuntimeError(f"{name} has losses {each}, and memory {first}")


def _serve(kind: str, sizes: Sizes, limit: int) -> dict[str, float]:
    """Look up small requests in one table within the limit: in a mapped file, or through a cache of rows."""
    rows, batch, seconds = 4 * sizes.num_rows, 256, list[float]()
    batches = Batches(sizes._replace(num_rows=rows), 0)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        look_up = _cached(sizes, rows, folder) if kind == "row cache" else _in_pages(kind, rows, folder)
        with _memory_limit(limit), torch.no_grad():
            end = time.perf_counter() + _SERVE_SECONDS
            while time.perf_counter() < end:
                ids = batches.ids(batch, seed=len(seconds))
                start = time.perf_counter()
                look_up(ids)
                seconds.append(time.perf_counter() - start)
        return {"step": statistics.median(seconds[len(seconds) // 2 :]), "requests": float(len(seconds))}


def _cached(sizes: Sizes, num_rows: int, folder: str) -> Callable[[Tensor], Tensor]:
    """Return the lookup of rows through a cache of a tenth of them."""
    storage = meshrec.FileRows(path=folder, cache_bytes=int(SHARE * num_rows * ROW_BYTES))
    (rows,) = Arm(sizes._replace(num_tables=1, num_rows=num_rows), storage, ahead=False).files()
    rows.stored.make(rows.stored.missing(torch.arange(num_rows)))

    def look_up(ids: Tensor) -> Tensor:
        slots, pin = rows.resolve(ids, train=False)
        pin.wait()  # type: ignore[attr-defined]
        return rows.rows[slots]

    return look_up


def _in_pages(kind: str, num_rows: int, folder: str) -> Callable[[Tensor], Tensor]:
    """Return the lookup of rows in a mapped file."""
    config = meshrec.EmbeddingBagConfig(
        name="t", num_embeddings=num_rows, embedding_dim=WIDTH, feature_names=["f"]
    )
    module = meshrec.EmbeddingBagCollection([config], device="meta")
    with open(f"{folder}/rows", "wb+") as file:
        for first in range(0, num_rows, 1 << 16):
            file.write(torch.rand(min(1 << 16, num_rows - first), WIDTH).numpy().tobytes())
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        mapping = map_file(file.fileno(), num_rows * WIDTH * 4)
    if kind == "pages, requested":
        expect_misses(mapping)
    weight = mapping.content.view(torch.float32).view(num_rows, WIDTH)
    module.embedding_bags["t"].weight = nn.Parameter(weight, requires_grad=False)

    def look_up(ids: Tensor) -> Tensor:
        return module(meshrec.KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids)).long())).values()

    return look_up


def _rates(rows: FileTable, count: int = 40_000) -> dict[str, float]:
    """Return the rows per second that the table reads and writes, and that a bare loop reads."""
    file, num_rows = rows.stored.file, rows.rectangle.r1
    count = min(count, num_rows // 2)
    library = _plain_reader()
    rows.stored.make(rows.stored.missing(torch.arange(num_rows)))
    memory = [torch.zeros(count, *part.shape[1:], dtype=part.dtype) for part in (rows.rows, *rows.state)]
    slots, found = torch.arange(count), {"our reads": [], "plain reads": [], "our writes": []}
    for turn in range(5):
        keys = torch.randperm(num_rows, generator=torch.Generator().manual_seed(turn))[:count].sort().values
        positions = torch.tensor([file.layout.position(key) for key in keys.tolist()])
        start = time.perf_counter()
        file.read(keys, memory, slots)
        found["our reads"].append(count / (time.perf_counter() - start))
        start = time.perf_counter()
        file.write(keys, memory, slots)
        found["our writes"].append(count / (time.perf_counter() - start))
        taken = library.read_blocks(
            file._file,
            ctypes.c_void_p(positions.data_ptr()),
            ctypes.c_int64(count),
            ctypes.c_int64(file.layout.block_bytes),
            32,
        )
        found["plain reads"].append(count / taken)
    return {name: statistics.median(each) for name, each in found.items()}


def _plain_reader() -> ctypes.CDLL:
    source = Path(__file__).with_name("disk_limit.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "disk_limit.so"
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        flags = ["-O2", "-std=c++20", "-fPIC", "-shared", "-pthread"]
        subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    library.read_blocks.restype = ctypes.c_double
    return library


def _limited(kind: str, tiny: bool, limit: int) -> dict[str, float] | None:
    """Train in a process of its own within a limit of memory; None if there may be no limit."""
    command = [sys.executable, "-m", "benchmarks.file_rows", kind, "tiny" if tiny else "full", str(limit)]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{kind}: not measured: it took more than {_SECONDS} s")
        return None
    if found.returncode:
        print(f"{kind}: not measured ({found.returncode}): {found.stderr.strip().splitlines()[-1:]}")
        return None
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[Callable[[], int]]:
    """Limit what this process takes from now on, with its share of the page cache; yield its peak so far.

    The limit is that of a control group below the one that the process is in, so all limits above it hold.
    """
    line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
    own = Path("/sys/fs/cgroup/memory" + line.split(":", 2)[2])
    group = own / f"meshrec-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        for thread in os.listdir("/proc/self/task"):
            (group / "tasks").write_text(thread)
        yield lambda: int((group / "memory.max_usage_in_bytes").read_text())
    finally:
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                (own / "tasks").write_text(thread)
        with suppress(OSError):
            group.rmdir()


def _mapped(arm: Arm, folder: str) -> None:
    """Put the memory of all tables into files that the system maps, and forget it."""
    for number, rows in enumerate(arm.tables):
        for place, part in enumerate([rows.rows, *rows.state]):
            path = f"{folder}/{number}-{place}"
            part.detach().numpy().tofile(path)
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = torch.from_file(path, shared=True, size=part.numel(), dtype=part.dtype)
            part.data = mapped.view(part.shape)


def _alone(kind: str, sizes: Sizes, limit: int) -> dict[str, float]:
    """Make an arm, and train it within the limit. The memory of mapped tables is the page cache's."""
    torch.set_num_threads(2)
    if kind == "small":
        sizes = sizes._replace(num_rows=sizes.num_rows // 100)
    if kind == "mapped":  # its steps take many seconds
        sizes = sizes._replace(warm_up=1, steps=1)
    count = sizes.warm_up + 2 * sizes.steps + 3
    batches = Batches(sizes, count)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        storage = meshrec.FileRows(path=folder, cache_rows=sizes.cached)
        arm = Arm(sizes, storage if kind == "file" else None, ahead=True)
        if kind == "mapped":
            _mapped(arm, folder)
        with _memory_limit(limit) as peak:
            arm.fill(batches)
            feed = iter(batches)
            arm.run(feed, sizes.warm_up)
            _, seconds = arm.run(feed, 2 * sizes.steps)
            return {"step": statistics.median(seconds), "peak": float(peak())}


if __name__ == "__main__":
    of_tiny = sys.argv[2] == "tiny"
    arm = _serve if sys.argv[1] in SERVED else _alone
    print(json.dumps(arm(sys.argv[1], TINY if of_tiny else SIZES, int(sys.argv[3]))))
