"""A server through its life: start with large tables, fresh weights, and stops under load.

The load comes from this process, on the same cores.
"""

import asyncio
import contextlib
import hashlib
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.serve import (
    TINY,
    Inputs,
    Running,
    Shape,
    inputs_of,
    package_of,
    percentile,
    request_of,
    serving,
)
from benchmarks.serve_load import Connection, closed, open_loop
from meshrec.checkpoint.delta import write_tensors
from meshrec.checkpoint.publishing import FORMAT
from meshrec.durable import sealed, sha256_of
from meshrec.export import Predictor, export
from meshrec.export.manifest import WEIGHTS
from meshrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from meshrec.sparse import KeyedJaggedTensor

_GIB = 1 << 30
_RUN = "benchmark"
_ROWS_OF_A_WINDOW = 64
"""Number of 64-float rows in 16 KiB. One page is touched in each window that the kernel maps at once."""


class Changes(NamedTuple):
    """Sizes of the benchmark: what changes, and how often."""

    served: Shape = Shape()
    table_gib: float = 8.0
    starts: int = 3
    deltas: int = 20
    seconds_between: float = 1.0
    rate: float = 100.0
    rows: int = 500_000
    batch: int = 2048
    reads: int = 1_000_000
    read_deltas: int = 50
    stops: int = 20


_TINY = Changes(TINY, 0.001, 1, 3, 0.3, 20.0, 1000, 16, 100, 3, 1)


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Run all parts in the order of a server's life. Each part verifies what it times."""
    changes = _TINY if tiny else Changes()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        figures: dict[str, float] = {}
        for part in (_start, _fresh, _torn, _stop):
            with tempfile.TemporaryDirectory() as folder:
                found = part(changes, Path(folder))
            print(
                table(["measured", ""], [[name, f"{value:.3f}"] for name, value in found.items()]), flush=True
            )
            figures |= found
    finally:
        torch.set_num_threads(threads)
    asked = {
        "ready after start beyond importing": (1.5, " s", True),
        "memory of two workers over one's": (1.05, "x", True),
        "delta visible, p95": (2.0, " s", True),
        "p99 latency with deltas over without": (1.3, "x", True),
        "checked reads": (float(changes.reads), "", False),
        "torn rows": (0.0, "", True),
        "rows of another version than said": (0.0, "", True),
        f"lost over {changes.stops} SIGTERMs": (0.0, "", True),
    }
    bars = [
        Bar(name=name, figure=figures[name], asked=bar, unit=unit, at_most=at_most)
        for name, (bar, unit, at_most) in asked.items()
    ]
    return Result(figures, bars)


def _start(changes: Changes, folder: Path) -> dict[str, float]:
    """Measure the seconds until a server with large tables is ready, and the memory of its processes."""
    row_bytes = 4 * changes.served.dim * changes.served.num_features
    shape = changes.served._replace(num_rows=int(changes.table_gib * _GIB / row_bytes) + 1)
    package = package_of(shape, folder / "large", is_zero=True)
    program = [sys.executable, "-W", "ignore", "-c", "import meshrec.cli.serve, meshrec.serve.server"]
    size = (package / WEIGHTS).stat().st_size
    imports, starts, memory = [], [], []
    for start in range(changes.starts):
        begin = time.perf_counter()
        subprocess.run(program, check=True)
        imports.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        with serving(package) as server:
            starts.append(time.perf_counter() - begin)
            if start == changes.starts - 1:
                memory.append(_memory_of(server, shape, size, workers=1))
    with serving(package, "--workers", "2") as server:
        memory.append(_memory_of(server, shape, size, workers=2))
    return {
        "importing, s": statistics.median(imports),
        "ready after start, s": statistics.median(starts),
        "ready after start beyond importing": statistics.median(starts) - statistics.median(imports),
        "tables, GiB": size / _GIB,
        "memory of one worker, GiB": memory[0] / _GIB,
        "memory of two workers, GiB": memory[1] / _GIB,
        "memory of two workers over one's": memory[1] / memory[0],
    }


def _memory_of(server: Running, shape: Shape, size: int, *, workers: int) -> int:
    """Return the bytes of all processes once every worker has its tables."""
    _touch_all(server, shape, size, workers)
    return sum(_memory(pid)["Pss"] for pid in _tree(server.process.pid))


def _touch_all(server: Running, shape: Shape, size: int, workers: int) -> None:
    """Request rows of all parts of the tables until every worker has mapped nearly all of them."""
    features = [f"f{number}" for number in range(shape.num_features)]
    requests = []
    for ids in torch.arange(0, shape.num_rows, _ROWS_OF_A_WINDOW).split(shape.batch):
        ones = torch.ones(len(ids), dtype=torch.int64)
        inputs: Inputs = (
            torch.zeros(len(ids), shape.num_dense),
            dict.fromkeys(features, ids),
            dict.fromkeys(features, ones),
        )
        requests.append(request_of(inputs))

    async def sweep() -> None:
        with contextlib.closing(Connection(server.port)) as connection:
            for request in requests:
                status, body = await connection.ask(request)
                if status != 200:
                    raise AssertionError(f"the server answered with {body!r}")

    for _ in range(10 * workers):  # a connection stays with one of the workers
        asyncio.run(sweep())
        mapped = [_memory(pid)["Rss"] >= 0.95 * size for pid in _tree(server.process.pid)]
        if sum(mapped) >= workers:
            return
    raise AssertionError(f"requests for all rows left some of {workers} workers without their tables")


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _tree(int(child)))]


def _memory(pid: int) -> dict[str, int]:
    """Return bytes by kind. In ``Pss`` a shared page counts in proportion for each process."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    return {line.split(":")[0]: 1024 * int(line.split()[1]) for line in lines}


class _Prepared:
    """Deltas that are written except for the file that makes each one visible.

    They count from 1, and each belongs to one training step.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._last, self.published = folder, "", dict[int, float]()
        self._count = 0
        folder.mkdir()

    def write(self, rows: Mapping[str, tuple[Tensor, Tensor]], whole: Mapping[str, Tensor]) -> None:
        self._count += 1
        flat = {f"{n}.ids": ids for n, (ids, _) in rows.items()}
        flat |= {f"{n}.rows": each for n, (_, each) in rows.items()}
        digests = {}
        for kind, tensors in (("rows", flat), ("dense", whole)):
            path = self.folder / f"{self._count:08d}.{kind}.safetensors"
            write_tensors(path, tensors)
            digests[path.name] = sha256_of(path)
        said = {
            "format": FORMAT,
            "number": self._count,
            "run": _RUN,
            "since": self._count - 1,
            "step": self._count,
            "rows": {name: len(ids) for name, (ids, _) in rows.items()},
            "sha256": digests,
            "previous": self._last,
            "tracked": sorted(rows),
            "whole": sorted(whole),
        }
        data = sealed(said)
        (self.folder / f".{self._count:08d}").write_bytes(data)
        self._last = hashlib.sha256(data).hexdigest()

    async def publish(self, seconds_between: float) -> None:
        """Publish all deltas at a fixed rate."""
        for number in range(1, self._count + 1):
            (self.folder / f".{number:08d}").rename(self.folder / f"{number:08d}.json")
            self.published[number] = time.perf_counter()
            await asyncio.sleep(seconds_between)


def _delta_said(head: bytes) -> int:
    """Return the number of the last delta that an answer completely contains; 0 for the package itself."""
    version: str = json.loads(head)["model_version"]
    return int(version.partition("+")[2] or 0)


def _fresh(changes: Changes, folder: Path) -> dict[str, float]:
    """Publish a delta of 1 % of all rows per second; measure when answers show it, and what it costs."""
    shape = changes.served
    package = package_of(shape, folder / "first", about={"run": _RUN, "step": 0})
    predictor = Predictor(package)
    prepared = _Prepared(folder / "deltas")
    tables = {n: w for n, w in predictor.weights.items() if w.shape == (shape.num_rows, shape.dim)}
    whole = {n: w for n, w in predictor.weights.items() if n not in tables}
    share = changes.seconds_between / 100
    generator = torch.Generator().manual_seed(0)
    for _ in range(changes.deltas):
        rows = {}
        for name in tables:
            ids = torch.randperm(shape.num_rows, generator=generator)[: max(1, int(share * shape.num_rows))]
            rows[name] = ids.sort().values, torch.randn(len(ids), shape.dim, generator=generator)
        prepared.write(rows, whole)
    request = request_of(inputs_of(shape, predictor.features, 1))
    seen: dict[int, float] = {}

    def see(body: bytes) -> None:
        seen.setdefault(_delta_said(body[:-4]), time.perf_counter())

    seconds = changes.deltas * changes.seconds_between
    with serving(package, "--deltas", f"model={prepared.folder}") as server:

        async def phases() -> tuple[list[float], list[float]]:
            async def load(seconds: float) -> list[float]:
                done = await open_loop(server.port, request, rate=changes.rate, seconds=seconds, on_body=see)
                if set(done.statuses) != {200}:
                    raise AssertionError(f"the server answered with {done.statuses}")
                return done.seconds[200]

            without = await load(seconds / 2)
            publishing = asyncio.create_task(prepared.publish(changes.seconds_between))
            with_deltas = await load(seconds)
            await publishing
            without += await load(seconds / 2)
            return without, with_deltas

        without, with_deltas = asyncio.run(phases())
    last = changes.deltas
    if last not in seen:
        raise AssertionError(f"delta {last} never came; the answers were of {sorted(seen)}")
    visible = [
        min(at for delta, at in seen.items() if delta >= number) - since
        for number, since in prepared.published.items()
    ]
    return {
        "delta visible, median, s": statistics.median(visible),
        "delta visible, p95": percentile(visible, 95),
        "p50 without deltas, ms": 1e3 * percentile(without, 50),
        "p50 with deltas, ms": 1e3 * percentile(with_deltas, 50),
        "p99 without deltas, ms": 1e3 * percentile(without, 99),
        "p99 with deltas, ms": 1e3 * percentile(with_deltas, 99),
        "p99 latency with deltas over without": percentile(with_deltas, 99) / percentile(without, 99),
    }


class _Rows(nn.Module):
    """A model that answers with the row of an ID."""

    def __init__(self, num_rows: int, dim: int) -> None:
        super().__init__()
        config = EmbeddingBagConfig(
            name="t", embedding_dim=dim, num_embeddings=num_rows, feature_names=["f0"]
        )
        self.sparse = EmbeddingBagCollection([config])
        with torch.no_grad():
            for weight in self.parameters():
                weight.zero_()

    def forward(self, dense: Tensor, sparse: KeyedJaggedTensor) -> Tensor:
        return self.sparse(sparse).values() + 0 * dense[:, :1]


def _torn(changes: Changes, folder: Path) -> dict[str, float]:
    """Read rows that every delta touches. All values of a row are the number of its delta."""
    dim, batch = 64, changes.batch
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        package = export(
            _Rows(changes.rows, dim),
            folder / "rows",
            features=["f0"],
            num_dense=1,
            scores=None,
            about={"run": _RUN, "step": 0},
            compile=changes.served.compile,
        )
    (name,) = Predictor(package).weights
    generator = torch.Generator().manual_seed(0)
    touched = torch.randperm(changes.rows, generator=generator)[: changes.rows // 100].sort().values
    prepared = _Prepared(folder / "deltas")
    for number in range(1, changes.read_deltas + 1):
        prepared.write({name: (touched, torch.full((len(touched), dim), float(number)))}, {})
    counts: Counter[str] = Counter()
    said: set[int] = set()

    def check(body: bytes) -> None:
        num_bytes = 4 * dim * batch
        rows = np.frombuffer(body[-num_bytes:], np.float32).reshape(batch, dim)
        delta = _delta_said(body[:-num_bytes])
        said.add(delta)
        first = rows[:, 0]
        counts["reads"] += batch
        counts["torn"] += int((rows != rows[:, :1]).any(1).sum())
        counts["strange"] += int(((first != delta) & (first != delta + 1)).sum())
        counts["between"] += int(first.min() != first.max())
        counts["answers"] += 1

    def request() -> bytes:
        ids = touched[torch.randint(0, len(touched), (batch,), generator=generator)]
        ones = torch.ones(batch, dtype=torch.int64)
        return request_of((torch.zeros(batch, 1), {"f0": ids}, {"f0": ones}))

    with serving(package, "--deltas", f"model={prepared.folder}") as server:

        async def read() -> None:
            publishing = asyncio.create_task(prepared.publish(0.2))
            while counts["reads"] < changes.reads or not publishing.done():
                clients = [
                    closed(server.port, request(), clients=1, seconds=1.0, on_body=check) for _ in range(4)
                ]
                for done in await asyncio.gather(*clients):
                    if set(done.statuses) != {200}:
                        raise AssertionError(f"the server answered with {done.statuses}")
            await publishing

        asyncio.run(read())
    if len(said) < 2:
        raise AssertionError(f"no delta came while rows were read; the answers were of {sorted(said)}")
    return {
        "checked reads": float(counts["reads"]),
        "torn rows": float(counts["torn"]),
        "rows of another version than said": float(counts["strange"]),
        "versions seen": float(len(said)),
        "answers while a delta went in, share": counts["between"] / counts["answers"],
    }


def _stop(changes: Changes, folder: Path) -> dict[str, float]:
    """Stop servers one after the other, while clients move on to the next when nobody listens any more.

    A refused connection is not a loss. Every request that was sent must get a correct answer.
    """
    shape = changes.served
    package = package_of(shape, folder / "package")
    predictor = Predictor(package)
    inputs = inputs_of(shape, predictor.features, 1)
    request, ports = request_of(inputs), list[int]()
    counts: Counter[str] = Counter()
    ended = threading.Event()

    async def client(expected: bytes) -> None:
        turn = 0
        connection = Connection(ports[turn])
        while not ended.is_set():
            try:
                status, body = await connection.ask(request)
            except ConnectionRefusedError:
                turn += 1
                connection = Connection(ports[turn])
                continue
            except (OSError, asyncio.IncompleteReadError):
                connection.close()
                counts["lost"] += 1
                continue
            counts["wrong"] += status != 200 or body[-4:] != expected
            counts[f"of server {turn}"] += 1
        connection.close()

    async def clients(expected: bytes) -> None:
        await asyncio.gather(*(client(expected) for _ in range(8)))

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(serving(package))
        ports.append(server.port)
        expected = server.ask(request)[-4:]
        load = threading.Thread(target=asyncio.run, args=(clients(expected),))
        load.start()
        try:
            for turn in range(changes.stops):
                following = stack.enter_context(serving(package))
                ports.append(following.port)
                time.sleep(0.05 + 0.01 * turn)
                server.process.terminate()
                if server.process.wait(60) != 0:
                    raise AssertionError(f"a stopped server ended with {server.process.returncode}")
                server = following
            time.sleep(0.2)
        finally:
            ended.set()
            load.join(60)
    idle = [turn for turn in range(changes.stops + 1) if not counts[f"of server {turn}"]]
    if idle:
        raise AssertionError(f"servers {idle} got no request")
    answers = sum(count for what, count in counts.items() if what.startswith("of server"))
    return {
        f"lost over {changes.stops} SIGTERMs": float(counts["lost"] + counts["wrong"]),
        "answers meanwhile": float(answers),
    }
