"""The hash index: finding and inserting IDs, beside the flat hash maps of Abseil, Boost and ska (which torch
brings along), and beside a loop that touches one cache line for each distinct ID.

All arms have the same IDs, distinct and in random order, and are first checked against each other. Each map
is built with the defaults of its library, as Debian packages it (libabsl-dev, libboost1.81-dev).
"""

import ctypes
import gc
import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, Timing, measure, table
from benchmarks.memory_limit import PREFETCHES, LineLimit
from meshrec.ops.index import HashIndex, unique

SOURCE = Path(__file__).with_name("index_peers.cpp")
THREADS = (1, 2)
OURS, LIMIT = "MeshRec", "one cache line for each ID"


class Peer(NamedTuple):
    """A library's map, and what it is built with."""

    name: str
    header: str
    map: str
    libraries: tuple[str, ...] = ()


PEERS = [
    Peer(
        "absl::flat_hash_map",
        "<absl/container/flat_hash_map.h>",
        "absl::flat_hash_map",
        ("-labsl_raw_hash_set", "-labsl_hash", "-labsl_city", "-labsl_low_level_hash"),
    ),
    Peer(
        "boost::unordered_flat_map",
        "<boost/unordered/unordered_flat_map.hpp>",
        "boost::unordered_flat_map",
    ),
    Peer("ska::flat_hash_map", "<c10/util/flat_hash_map.h>", "ska::flat_hash_map"),
]


def build(peer: Peer, folder: str) -> ctypes.CDLL | None:
    """Compile a peer; print a line and return None where its library is not installed."""
    target = Path(folder) / f"{peer.name.split(':')[0]}.so"
    include = Path(torch.__file__).parent / "include"
    command = shlex.split(os.environ.get("CXX", "")) or ["c++"]
    command += ["-O3", "-march=native", "-std=c++20", "-fPIC", "-shared", "-fopenmp", "-w", f"-I{include}"]
    command += [f"-DHEADER={peer.header}", f"-DMAP={peer.map}", str(SOURCE), "-o", str(target)]
    done = subprocess.run([*command, *peer.libraries], capture_output=True, text=True)
    if done.returncode:
        print(f"{peer.name} is skipped: its headers or libraries are not installed")
        return None
    library = ctypes.CDLL(str(target))
    library.peer_create.restype = ctypes.c_void_p
    return library


class PeerMap:
    """A map that holds the first IDs, with their positions as slots."""

    def __init__(self, library: ctypes.CDLL, ids: Tensor) -> None:
        self._library = library
        start = time.perf_counter()
        address = library.peer_create(ctypes.c_void_p(ids.data_ptr()), ctypes.c_int64(len(ids)))
        self.seconds = time.perf_counter() - start
        self._map = ctypes.c_void_p(address)

    def find(self, ids: Tensor) -> Tensor:
        slots = torch.empty_like(ids)
        pointers = [ctypes.c_void_p(each.data_ptr()) for each in (ids, slots)]
        sizes = [ctypes.c_int64(each) for each in (len(ids), torch.get_num_threads())]
        self._library.peer_find(self._map, pointers[0], sizes[0], pointers[1], sizes[1])
        return slots

    def close(self) -> None:
        self._library.peer_destroy(self._map)


def distinct_ids(kind: str, count: int) -> Tensor:
    """Return distinct IDs in ascending order."""
    if kind == "multiples of 2^32":
        return (torch.arange(count) - count // 2) << 32
    drawn = torch.randint(-(2**63), 2**63 - 1, (count + count // 50 + 100,))
    return unique(drawn)[0][:count]


def filled(ids: Tensor, name: str = "benchmark") -> tuple[HashIndex, float]:
    """Return an index with the IDs, and the seconds that they took, in batches of 2^20."""
    index = HashIndex(1 << (len(ids) - 1).bit_length(), name=name)
    start = time.perf_counter()
    for part in ids.split(1 << 20):
        index.insert(part)
    return index, time.perf_counter() - start


def lines_of(indexes: Sequence[HashIndex], count: int) -> Callable[[], Any]:
    """Return a loop that touches ``count`` random cache lines of each index's own memory."""
    memory, lines = [], []
    for index in indexes:
        header, buckets = index._rows.memory[:2]  # type: ignore[union-attr]
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


def time_finding(
    index: HashIndex, ids: Tensor, batch: Tensor, folder: str, effort: Effort
) -> tuple[dict[int, dict[str, Timing]], dict[str, float]]:
    """Time a batch of all arms, each beside our index, on each number of threads.

    The maps are built one at a time, as several would not fit in memory. For our index and for the loop, the
    result has the times of the first turn.
    """
    timings: dict[int, dict[str, Timing]] = {threads: {} for threads in THREADS}
    seconds = {}
    expected = index.find(batch)
    assert torch.equal(ids[expected], batch)
    for peer in [None, *PEERS]:
        calls: dict[str, Callable[[], Any]] = {OURS: partial(index.find, batch)}
        other = None
        if peer is None:
            torch.set_num_threads(1)
            calls[LIMIT] = lines_of([index], len(batch))
        elif (library := build(peer, folder)) is not None:
            other = PeerMap(library, ids)
            assert torch.equal(other.find(batch), expected)
            calls[peer.name], seconds[peer.name] = other.find, other.seconds
            calls[peer.name] = partial(other.find, batch)
        else:
            continue
        for threads in THREADS:
            torch.set_num_threads(threads)
            turn = measure(calls, effort)
            if peer is not None:
                seconds[f"{peer.name}, {threads} threads"] = turn[peer.name].median / turn[OURS].median
            timings[threads] = {**turn, **timings[threads]}
        if other is not None:
            other.close()
        gc.collect()
    return timings, seconds


def run(effort: Effort, *, tiny: bool = False, num_ids: int = 50_000_000) -> Result:
    """Verify and time. ``tiny`` shrinks the index, which only shows that the benchmark works."""
    num_ids = 20_000 if tiny else num_ids
    batch_size = 2000 if tiny else 1 << 20
    before = torch.get_num_threads()
    torch.manual_seed(0)
    ids = distinct_ids("hashes", num_ids)
    index, seconds = filled(ids)
    batch = ids[torch.randint(0, num_ids, (batch_size,)).unique()]
    batch = batch[torch.randperm(len(batch))]
    with tempfile.TemporaryDirectory() as folder:
        timings, others = time_finding(index, ids, batch, folder, effort)
    bars = []
    for threads in THREADS:
        ours, limit = timings[threads][OURS].median, timings[threads][LIMIT].median
        name = f"finding, {threads} threads, over one cache line for each ID"
        bars.append(Bar(name=name, figure=ours / limit, asked=1.5, at_most=True))
    for name, figure in others.items():
        if name.endswith("threads"):
            bars.append(Bar(name=f"finding, as fast as {name}", figure=figure, asked=2.0))
        else:
            bars.append(Bar(name=f"inserting all IDs, as fast as {name}", figure=figure / seconds, asked=1.0))
    per_id = index.num_bytes / num_ids
    bars.append(Bar(name="bytes for an ID", figure=per_id, asked=16, unit=" B", at_most=True))
    bars.append(adversarial(index, batch, num_ids, effort))
    torch.set_num_threads(before)
    rows = [
        [name, *(f"{1e6 * timings[threads][name].median / len(batch):.1f}" for threads in THREADS)]
        for name in timings[1]
    ]
    print(table([f"{num_ids:,} IDs: ns to find one", "1 thread", "2 threads"], rows), end="\n\n")
    print(f"inserting: {1e9 * seconds / num_ids:.0f} ns an ID, with the growth from nothing\n")
    return Result({str(n): {k: t._asdict() for k, t in by.items()} for n, by in timings.items()}, bars)


def adversarial(index: HashIndex, batch: Tensor, num_ids: int, effort: Effort) -> Bar:
    """Compare IDs that a table without a mix would have in few buckets with random ones, side by side."""
    ids = distinct_ids("multiples of 2^32", num_ids)
    other, _ = filled(ids)
    drawn = ids[torch.randint(0, num_ids, (len(batch),)).unique()]
    drawn = drawn[torch.randperm(len(drawn))]
    torch.set_num_threads(1)
    turn = measure({"random": partial(index.find, batch), "multiples": partial(other.find, drawn)}, effort)
    figure = turn["multiples"].median / len(drawn) / (turn["random"].median / len(batch))
    return Bar(name="finding multiples of 2^32, over random IDs", figure=figure, asked=1.2, at_most=True)
