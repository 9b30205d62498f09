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
from collections.abc import Iterator
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
from meshrec.optim import CombinedOptimizer, KeyedOptimizerWrapper, RowWiseAdagrad
from meshrec.pipeline import TrainPipeline
from meshrec.tables.file_table import FileTable
from meshrec.tables.row_cache import slot_bytes

WIDTH, EXPONENT, SHARE = 64, 1.05, 0.1
ROW_BYTES = 4 * WIDTH + 4
_GROUP = Path("/sys/fs/cgroup/memory")
_SECONDS = 240
_ACTIVATIONS = 128 << 20
"""Memory of a step besides tables, which both arms with a limit get."""


class Sizes(NamedTuple):
    """The sizes of the model and of its batches."""

    num_tables: int
    num_rows: int
    batch: int
    bag: int
    top: list[int]
    warm_up: int
    steps: int


SIZES = Sizes(4, 1_000_000, 2048, 2, [1024, 512, 1], 80, 12)
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

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all)


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
    """Verify that the arms agree, then time them in turns."""
    sizes = TINY if tiny else SIZES
    rounds = effort.rounds
    batches = Batches(sizes, sizes.warm_up + rounds * sizes.steps + 3)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        storage = meshrec.FileRows(path=folder, cache_rows=max(256, int(SHARE * sizes.num_rows)))
        arms = {
            "memory": Arm(sizes, None, ahead=True),
            "file, ahead": Arm(sizes, storage, ahead=True),
            "file": Arm(sizes, storage, ahead=False),
        }
        feeds = {name: iter(batches) for name in arms}
        losses = {name: arm.run(feeds[name], sizes.warm_up)[0] for name, arm in arms.items()}
        _check(losses)
        files = _files(arms["file, ahead"])
        before = [(t.counts.num_used, t.counts.num_read, t.counts.num_written) for t in files]
        seconds: dict[str, list[float]] = {name: [] for name in arms}
        for _ in range(rounds):
            for name, arm in arms.items():
                found, taken = arm.run(feeds[name], sizes.steps)
                losses[name] = found
                seconds[name] += taken
            _check(losses)
        after = [(t.counts.num_used, t.counts.num_read, t.counts.num_written) for t in files]
        steps = rounds * sizes.steps
        hits, reads, writes = (sum(b[i] - a[i] for a, b in zip(before, after, strict=True)) for i in range(3))
        ours, plain = _read_rates(files[0])
        times = {name: statistics.median(each) for name, each in seconds.items()}
        block = files[0]._regions.file.layout.block_bytes
        disk = (reads + writes) / steps / plain
        figures = {
            "step_ms": {name: 1e3 * each for name, each in times.items()},
            "hit_rate": hits / (hits + reads),
            "reads_per_step": reads / steps,
            "writes_per_step": writes / steps,
            "bytes_read_over_needed": block / ROW_BYTES,
            "iops_plain": plain,
            "iops_ours": ours,
            "disk_ms_by_arithmetic": 1e3 * disk,
            "is_direct": files[0]._regions.file.is_direct,
        }
        del arms, files
    print(table(["arm", "ms"], [[name, f"{1e3 * each:.1f}"] for name, each in times.items()]))
    print(json.dumps({name: value for name, value in figures.items() if name != "step_ms"}), flush=True)
    limited = {kind: _limited(kind, tiny) for kind in ("file", "mapped", "memory of a small table")}
    figures["limited"] = limited
    bars = [
        Bar(
            name="a step in memory over one from the file",
            figure=times["memory"] / times["file, ahead"],
            asked=0.6,
            ceiling=min(1.0, times["memory"] / disk) if disk else None,
        ),
        Bar(name="reads over those of a plain reader", figure=ours / plain, asked=0.8),
        Bar(name="lookahead over none", figure=times["file"] / times["file, ahead"], asked=1.5),
    ]
    small, file, mapped = (limited[k] for k in ("memory of a small table", "file", "mapped"))
    if file and small:
        budget = sizes.num_tables * SHARE * sizes.num_rows * slot_bytes(ROW_BYTES)
        grown = file["anonymous"] - small["anonymous"]
        bars.append(
            Bar(name="memory over the cache's budget", figure=grown / budget, asked=1.1, at_most=True)
        )
    if mapped and file:
        bars.append(
            Bar(name="over a mapped table of the same budget", figure=mapped["step"] / file["step"], asked=2)
        )
    print(json.dumps(limited), flush=True)
    return Result(figures, bars)


def _files(arm: Arm) -> list[FileTable]:
    return [each for each in arm.tables if isinstance(each, FileTable)]


def _check(losses: dict[str, list[float]]) -> None:
    first = next(iter(losses.values()))
    for name, each in losses.items():
        if each != first:
            raise RuntimeError(f"{name} has losses {each}, and memory {first}")


def _read_rates(rows: FileTable, count: int = 40_000) -> tuple[float, float]:
    """Return rows read per second by the table and by a loop that only reads their blocks."""
    file = rows._regions.file
    num_rows = rows.rectangle.r1
    count = min(count, num_rows // 2)
    memory = rows._regions.first_rows(0, min(1, num_rows))
    ours, plain = [], []
    source = Path(__file__).with_name("disk_limit.cpp")
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "disk_limit.so"
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        flags = ["-O2", "-std=c++20", "-fPIC", "-shared", "-pthread"]
        subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True)
        library = ctypes.CDLL(str(target))
    library.read_blocks.restype = ctypes.c_double
    rows._regions.make(rows._regions.missing(torch.arange(num_rows)))
    for turn in range(5):
        keys = torch.randperm(num_rows, generator=torch.Generator().manual_seed(turn))[:count].sort().values
        slots = torch.arange(count)
        memory = [part.new_empty(count, *part.shape[1:]) for part in memory]
        start = time.perf_counter()
        file.read(keys, memory, slots)
        ours.append(count / (time.perf_counter() - start))
        positions = torch.tensor([file.layout.position(key) for key in keys.tolist()])
        taken = library.read_blocks(
            file._file,
            ctypes.c_void_p(positions.data_ptr()),
            ctypes.c_int64(count),
            ctypes.c_int64(file.layout.block_bytes),
            32,
        )
        plain.append(count / taken)
    return statistics.median(ours), statistics.median(plain)


def _limited(kind: str, tiny: bool) -> dict[str, float] | None:
    """Train in a process of its own; mapped and file tables within a limit of memory, if there may be one."""
    command = [sys.executable, "-m", "benchmarks.file_rows", kind, "tiny" if tiny else "full"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
    except subprocess.TimeoutExpired:
        print(f"{kind}: not measured: it took more than {_SECONDS} s")
        return None
    if found.returncode:
        print(f"{kind}: not measured: {found.stderr.strip().splitlines()[-1:]}")
        return None
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[None]:
    """Limit this process and its share of the page cache, through a control group."""
    group = _GROUP / f"meshrec-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(num_bytes))
        (group / "tasks").write_text(str(os.getpid()))
        for thread in os.listdir("/proc/self/task"):
            (group / "tasks").write_text(thread)
        yield
    finally:
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                (_GROUP / "tasks").write_text(thread)
        with suppress(OSError):
            group.rmdir()


def _anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line.split()[1] for line in lines if line.startswith("RssAnon")))


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


def _alone(kind: str, sizes: Sizes) -> dict[str, float]:
    torch.set_num_threads(2)
    if kind.startswith("memory"):
        sizes = sizes._replace(num_rows=sizes.num_rows // 100)
    batches = iter(Batches(sizes, sizes.warm_up + sizes.steps + 3))
    budget = int(sizes.num_tables * SHARE * sizes.num_rows * slot_bytes(ROW_BYTES))
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        storage = meshrec.FileRows(path=folder, cache_rows=max(256, int(SHARE * sizes.num_rows)))
        before = _anonymous()
        arm = Arm(sizes, storage if kind == "file" else None, ahead=True)
        if kind == "mapped":
            _mapped(arm, folder)
        with _memory_limit(_anonymous() + _ACTIVATIONS + budget):
            arm.run(batches, sizes.warm_up if kind == "file" else sizes.warm_up // 4)
            _, seconds = arm.run(batches, sizes.steps)
        return {"step": statistics.median(seconds), "anonymous": float(_anonymous() - before)}


if __name__ == "__main__":
    print(json.dumps(_alone(sys.argv[1], TINY if sys.argv[2] == "tiny" else SIZES)))
