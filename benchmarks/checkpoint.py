"""Time to save and load a table over 2 ranks, beside plain sequential writes and reads on the same disk.

Both sides write and read the same number of bytes from the same two processes, and both end with fsync. The
page cache of the files is dropped before reads. The two sides take turns, so that a slow minute of the disk
affects both.
"""

import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.harness import Bar, Effort, Result, configs, table
from meshrec import EmbeddingBagCollection
from meshrec import distributed as md
from meshrec.checkpoint import async_save, load, save
from meshrec.checkpoint.blocks import memory_of
from meshrec.comms.mesh import default_env
from meshrec.model_parallel import DistributedModelParallel
from meshrec.optim import RowWiseAdagrad
from meshrec.testing import RankPool

WORLD_SIZE = 2
DIM = 128
GIB = 1 << 30
_state: dict[str, DistributedModelParallel] = {}
_WRITE = 1 << 22


def make(num_rows: int) -> int:
    """Make a row-wise table on all ranks; return the bytes of this rank's part."""
    tables = configs(1, num_rows, DIM, init_fn=torch.Tensor.zero_)
    module = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    plan = md.construct_module_sharding_plan(module, {"t0": md.row_wise()}, world_size=WORLD_SIZE)
    model = DistributedModelParallel(
        nn.ModuleDict({"ebc": module}),
        plan=md.ShardingPlan({"ebc": plan}),
        sharders=[md.EmbeddingBagCollectionSharder(RowWiseAdagrad(lr=0.1))],
        dense=None,
    )
    for shard in weights(model):
        shard.copy_(torch.rand(1, DIM).expand_as(shard))
    _state["model"] = model
    return sum(shard.nbytes for shard in weights(model))


def weights(model: DistributedModelParallel) -> list[Tensor]:
    return [parameter.detach() for parameter in model.parameters()]


def timed(function: object) -> float:
    """Return the seconds until all ranks are done."""
    dist.barrier()
    start = time.perf_counter()
    function()  # type: ignore[operator]
    dist.barrier()
    return time.perf_counter() - start


def plain_write(folder: Path) -> float:
    path = folder / f"plain-{default_env().world.rank}"

    def write() -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for shard in weights(_state["model"]):
            content = memory_of(shard)
            for begin in range(0, len(content), _WRITE):
                os.write(descriptor, content[begin : begin + _WRITE])
        os.fsync(descriptor)
        os.close(descriptor)

    return timed(write)


def plain_read(folder: Path) -> float:
    path = folder / f"plain-{default_env().world.rank}"
    drop_cache(path)
    targets = weights(_state["model"])

    def read() -> None:
        descriptor = os.open(path, os.O_RDONLY)
        for shard in targets:
            content, done = memory_of(shard), 0
            while done < len(content):
                done += os.readv(descriptor, [content[done : done + _WRITE]])
        os.close(descriptor)

    return timed(read)


def drop_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def saved(folder: Path) -> tuple[float, int]:
    """Return the seconds, and the rise of this rank's peak memory in bytes."""
    model = _state["model"]
    Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
    before = status("VmRSS")
    seconds = timed(lambda: save(folder / "checkpoint", {"model": model}))
    return seconds, status("VmHWM") - before


def saved_in_background(folder: Path) -> tuple[float, float, float]:
    """Time a background save. Return the seconds for which training stops, the seconds until the save is on
    disk, and the time of a step meanwhile over one before.
    """
    model = _state["model"]
    before = step(model)
    box = []
    start = time.perf_counter()
    stop = timed(lambda: box.append(async_save(folder / "background", {"model": model})))
    steps = [step(model)]
    while box[0].is_writing:
        steps.append(step(model))
    box[0].wait()
    return stop, time.perf_counter() - start, statistics.mean(steps) / before


def step(model: DistributedModelParallel) -> float:
    """Time an update of 4096 rows of this rank's part, which waits for no other rank."""
    (shard,) = weights(model)
    start = time.perf_counter()
    ids = torch.randint(0, shard.shape[0], (4096,))
    shard.index_add_(0, ids, torch.ones(4096, DIM))
    return time.perf_counter() - start


def loaded(folder: Path) -> float:
    for path in (folder / "checkpoint").glob("data-*"):
        drop_cache(path)
    model = _state["model"]
    return timed(lambda: load(folder / "checkpoint", {"model": model}))


def verified(folder: Path) -> bool:
    """Check that saving and loading gives back the same bits."""
    model = _state["model"]
    before = [shard[::1000].clone() for shard in weights(model)]
    save(folder / "checkpoint", {"model": model})
    for shard in weights(model):
        shard.fill_(-1)
    load(folder / "checkpoint", {"model": model})
    return all(torch.equal(shard[::1000], old) for shard, old in zip(weights(model), before, strict=True))


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def run(effort: Effort, *, tiny: bool = False, folder: Path | None = None) -> Result:
    total = GIB // 64 if tiny else 2 * GIB
    rounds = min(effort.rounds, 3)
    where = Path(tempfile.mkdtemp(dir=folder or Path.cwd()))
    times: dict[str, list[float]] = {"plain write": [], "save": [], "plain read": [], "load": [], "stop": []}
    memory, slower, background = [], [], []
    try:
        with RankPool(WORLD_SIZE, timeout_seconds=600.0) as pool:
            shard_bytes = max(pool.run(make, total // (4 * DIM)))
            assert all(pool.run(verified, where)), "what is loaded is not what was saved"
            for _ in range(rounds):
                times["plain write"].append(max(pool.run(plain_write, where)))
                found = pool.run(saved, where)
                times["save"].append(max(seconds for seconds, _ in found))
                memory.append(max(grown for _, grown in found))
                times["plain read"].append(max(pool.run(plain_read, where)))
                times["load"].append(max(pool.run(loaded, where)))
                aside = pool.run(saved_in_background, where)
                times["stop"].append(max(each[0] for each in aside))
                background.append(max(each[1] for each in aside))
                slower.append(max(each[2] for each in aside))
    finally:
        shutil.rmtree(where)
    median = {name: statistics.median(each) for name, each in times.items()}
    rows = [
        [name, f"{seconds:.3f} s", f"{total / GIB / seconds:.2f} GiB/s" if name != "stop" else ""]
        for name, seconds in median.items()
    ]
    print(table([f"{total / GIB:g} GiB over {WORLD_SIZE} ranks", "median", ""], rows), end="\n\n")
    stop, extra = median["stop"] / median["save"], statistics.median(memory) / shard_bytes
    bars = [
        Bar("save over plain writes", median["plain write"] / median["save"], 0.7),
        Bar("load over plain reads", median["plain read"] / median["load"], 0.7),
        Bar("stop of an async save over a save", stop, 0.1, at_most=True),
        Bar("peak memory of a save over the shard", extra, 0.1, at_most=True),
    ]
    figures = {**times, "extra_bytes": memory, "steps_meanwhile": slower, "background": background}
    return Result(figures, bars)
