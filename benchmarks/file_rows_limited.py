"""Tables in files within a limit of memory, in processes of their own: see ``file_rows.py``."""

import ctypes
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import meshrec
from benchmarks.file_rows_arms import ROW_BYTES, SHARE, SIZES, TINY, WIDTH, Arm, Batches, Sizes
from benchmarks.harness import Bar, table
from meshrec.ops.mapping import expect_misses, map_file
from meshrec.tables.row_cache import slot_bytes

_SECONDS, _SERVE_SECONDS = 120, 8
_MAPPED_SECONDS = 60
"""A table that the system maps begins no further step after that time."""
_MOST_MEMORY, _MADV_RANDOM = 1.1, 1


SERVED = ("pages", "pages requested", "row cache")
"""The ways to look up rows of a file that is larger than memory."""
Found = dict[str, Any]


def memory(tiny: bool) -> tuple[Found, list[Bar]]:
    """Train from a file, and with tables so small that their memory does not count."""
    budget = _budget(tiny)
    # Threads and the allocator's arenas differ by several megabytes from one process to the next.
    found = {kind: _limited(kind, tiny, 1 << 40, times=3) for kind in ("small", "file")}
    if not all(found.values()):
        return found, []
    peak = {kind: statistics.median(run["peak"] for run in runs) for kind, runs in found.items()}
    grown = (peak["file"] - peak["small"]) / budget
    bar = Bar(name="memory over the cache's budget", figure=grown, asked=_MOST_MEMORY, at_most=True)
    return {"budget": budget, **found}, [bar]


def mapped(tiny: bool) -> tuple[Found, list[Bar]]:
    """Train from a file, and, with as much memory as that took, from memory that the system maps."""
    file = _limited("file", tiny, 1 << 40)
    if not file:
        return {}, []
    limit, sizes = int(file[0]["peak"]), TINY if tiny else SIZES
    own = _limited("mapped", tiny, limit)
    name = "over a mapped table of the same budget"
    step = own[0]["step"] if own else float(_SECONDS)
    if not own:
        name += f", which made no step in {_SECONDS} s: at least"
    larger = sizes.num_tables * sizes.num_rows * ROW_BYTES / limit
    found = {"limit": limit, "tables_over_limit": larger, "file": file, "mapped": own}
    return found, [Bar(name=name, figure=step / file[0]["step"], asked=2)]


def serve(tiny: bool) -> tuple[Found, list[Bar]]:
    """Look up small requests in a file of ten times the memory, with one worker and with two."""
    room = 64 << 20 if tiny else int(SHARE * 4 * SIZES.num_rows * ROW_BYTES)
    found: Found = {}
    for kind, workers in (("pages", 1), ("pages requested", 1), ("pages requested", 2), ("row cache", 1)):
        runs = _limited(kind, tiny, room, workers=workers)
        if runs:
            found[f"{kind}, {workers}"] = runs[0]
    rows = [
        [name, f"{each['per_second']:.0f}", f"{each['p50_ms']:.1f}", f"{each['p99_ms']:.1f}"]
        for name, each in found.items()
    ]
    print(table(["lookups, workers", "requests/s", "p50, ms", "p99, ms"], rows))
    return found, []


def _budget(tiny: bool) -> int:
    """Return the bytes of all caches, as ``FileRows`` counts them."""
    sizes = TINY if tiny else SIZES
    return sizes.num_tables * sizes.cached * slot_bytes(ROW_BYTES)


def _limited(
    kind: str, tiny: bool, limit: int, *, times: int = 1, workers: int = 1
) -> list[dict[str, float]]:
    """Run an arm in a process of its own within a limit of memory; return nothing if it does not end."""
    size = "tiny" if tiny else "full"
    command = [sys.executable, "-m", "benchmarks.file_rows_limited", kind, size, str(limit), str(workers)]
    results = []
    for _ in range(times):
        try:
            found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            print(f"{kind}: not measured: it took more than {_SECONDS} s")
            return []
        if found.returncode:
            print(f"{kind}: not measured ({found.returncode}): {found.stderr.strip().splitlines()[-1:]}")
            return []
        results.append(json.loads(found.stdout.splitlines()[-1]))
    return results


class _Group:
    """A control group that limits the memory of processes, with their share of the page cache.

    It lies below the group that the process is in, so all limits above it hold.
    """

    def __init__(self, num_bytes: int) -> None:
        line = next(line for line in Path("/proc/self/cgroup").read_text().splitlines() if ":memory:" in line)
        self._own = Path("/sys/fs/cgroup/memory" + line.split(":", 2)[2])
        self._path = self._own / f"meshrec-{os.getpid()}"
        self._path.mkdir()
        (self._path / "memory.limit_in_bytes").write_text(str(num_bytes))

    def enter(self) -> None:
        """Limit what this process takes from now on."""
        for thread in os.listdir("/proc/self/task"):
            (self._path / "tasks").write_text(thread)

    @property
    def peak(self) -> int:
        """The largest number of bytes so far."""
        return int((self._path / "memory.max_usage_in_bytes").read_text())

    def remove(self) -> None:
        """Let this process leave the group."""
        for thread in os.listdir("/proc/self/task"):
            with suppress(OSError):
                (self._own / "tasks").write_text(thread)
        with suppress(OSError):
            self._path.rmdir()


@contextmanager
def _memory_limit(num_bytes: int) -> Iterator[_Group]:
    group = _Group(num_bytes)
    try:
        yield group
    finally:
        group.remove()


def _map_tables(arm: Arm, folder: str) -> None:
    """Put the memory of all tables into files that the system maps, and forget it.

    The system is told that accesses are random. Otherwise it reads 32 pages for each row, and no step ends.
    """
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    for number, rows in enumerate(arm.tables):
        for place, part in enumerate([rows.rows, *rows.state]):
            path = f"{folder}/{number}-{place}"
            part.detach().numpy().tofile(path)
            with open(path, "rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = torch.from_file(path, shared=True, size=part.numel(), dtype=part.dtype)
            num_bytes = ctypes.c_size_t(found.nbytes)
            if madvise(ctypes.c_void_p(found.data_ptr()), num_bytes, _MADV_RANDOM):
                raise OSError(ctypes.get_errno(), "madvise")
            part.data = found.view(part.shape)


def _train(kind: str, sizes: Sizes, limit: int) -> dict[str, float]:
    """Make an arm, and train it within the limit. The memory of mapped tables is the page cache's."""
    torch.set_num_threads(2)
    if kind == "small":
        sizes = sizes._replace(num_rows=sizes.num_rows // 100)
    batches = Batches(sizes, sizes.warm_up + 2 * sizes.steps + 3)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        storage = meshrec.FileRows(path=folder, cache_rows=sizes.cached)
        arm = Arm(sizes, storage if kind == "file" else None, ahead=True)
        if kind == "mapped":
            _map_tables(arm, folder)
        with _memory_limit(limit) as group:
            group.enter()
            arm.fill(batches)
            feed, seconds = iter(batches), list[float]()
            end = time.perf_counter() + _MAPPED_SECONDS
            while len(seconds) < sizes.warm_up + 2 * sizes.steps and time.perf_counter() < end:
                seconds += arm.run(feed, 1)[1]
            timed = seconds[min(sizes.warm_up, len(seconds) - 1) :]
            return {"step": statistics.median(timed), "steps": float(len(timed)), "peak": float(group.peak)}


def _serve(kind: str, sizes: Sizes, limit: int, workers: int) -> dict[str, float]:
    """Look up small requests in one table within the limit, which all workers share."""
    rows = 4 * sizes.num_rows
    batches = Batches(sizes._replace(num_rows=rows), 0)
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
        look_up = _cached(sizes, rows, folder) if kind == "row cache" else _in_pages(kind, rows, folder)
        with _memory_limit(limit) as group, torch.no_grad():
            serving = (look_up, batches, group)
            seconds = _requests(*serving, 0) if workers == 1 else _shared(serving, workers)
    ordered = sorted(seconds)
    return {
        "per_second": len(seconds) / (_SERVE_SECONDS / 2),
        "p50_ms": 1e3 * statistics.median(seconds),
        "p99_ms": 1e3 * ordered[99 * len(ordered) // 100],
    }


_Serving = tuple[Callable[[Tensor], Tensor], Batches, _Group]


def _shared(serving: _Serving, workers: int) -> list[float]:
    """Look up requests in forked workers. They have the file's pages in common, as the workers of a server
    do.
    """
    torch.set_num_threads(1)  # a forked process has none of the threads of its parent
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=lambda worker=worker: queue.put(_requests(*serving, worker)))
        for worker in range(workers)
    ]
    for each in processes:
        each.start()
    seconds = [second for _ in processes for second in queue.get()]
    for each in processes:
        each.join()
    return seconds


def _requests(
    look_up: Callable[[Tensor], Tensor], batches: Batches, group: _Group, worker: int
) -> list[float]:
    """Look up requests of 256 IDs one after the other; return the seconds of those of the second half."""
    look_up(torch.zeros(256, dtype=torch.int64))  # the process's own memory is not the table's
    group.enter()
    seconds, number = list[float](), 0
    begin = time.perf_counter()
    while (start := time.perf_counter()) < begin + _SERVE_SECONDS:
        ids = batches.ids(256, seed=100_000 * worker + number)
        before, number = time.perf_counter(), number + 1
        look_up(ids)
        if start > begin + _SERVE_SECONDS / 2:
            seconds.append(time.perf_counter() - before)
    return seconds


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
    if kind == "pages requested":
        expect_misses(mapping)
    weight = mapping.content.view(torch.float32).view(num_rows, WIDTH)
    module.embedding_bags["t"].weight = nn.Parameter(weight, requires_grad=False)

    def look_up(ids: Tensor) -> Tensor:
        return module(meshrec.KeyedJaggedTensor(["f"], ids, lengths=torch.ones(len(ids)).long())).values()

    return look_up


if __name__ == "__main__":
    _kind, _size, _limit, _workers = sys.argv[1:]
    _sizes = TINY if _size == "tiny" else SIZES
    served = _kind in SERVED
    print(
        json.dumps(
            _serve(_kind, _sizes, int(_limit), int(_workers))
            if served
            else _train(_kind, _sizes, int(_limit))
        )
    )
