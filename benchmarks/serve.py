"""The server beside a bare call of its package: throughput, batching, latency, overload, reloads and sharing.

The load comes from this process, on the same cores. Server and bare call have one thread each.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Bar, Effort, Result, configs, table, threads
from benchmarks.serve_load import Outcome, closed, http, open_loop
from meshrec.durable import sha256_of, write_digests
from meshrec.export import Predictor, export
from meshrec.export.manifest import MANIFEST, WEIGHTS
from meshrec.models.dlrm import DLRM
from meshrec.modules import EmbeddingBagCollection

DEADLINE_MS = 200
_REFUSED_MS = 10
INFER = "/v2/models/model/infer"


class Shape(NamedTuple):
    num_features: int = 26
    num_rows: int = 100_000
    dim: int = 64
    num_dense: int = 13
    bottom: tuple[int, ...] = (512, 256, 64)
    top: tuple[int, ...] = (512, 512, 256, 1)
    seconds: float = 2.0
    compile: bool = True
    batch: int = 512
    items: int = 500
    history: int = 100


TINY = Shape(3, 100, 8, 2, (8, 8), (8, 1), 0.3, False, 16, 20, 10)
Inputs = tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify that the server's scores equal those of the bare call, then time both."""
    shape = TINY if tiny else Shape()
    # Much is known of the user, and a small network ranks the items.
    heavy = TINY if tiny else Shape(num_dense=256, bottom=(1024, 512, 64), top=(128, 64, 1), history=300)
    with threads(1), tempfile.TemporaryDirectory() as folder:
        return _measure(shape, heavy, Path(folder), 1 if tiny else max(3, effort.rounds // 3))


def _measure(shape: Shape, heavy: Shape, folder: Path, num_turns: int) -> Result:
    first = package_of(shape, folder / "first")
    packages = [first, _with_other_weights(first, folder / "second")]
    predictor = Predictor(first)
    with serving(first) as server, serving(first, "--max-batch", "1") as single:
        verify(server, predictor, inputs_of(shape, predictor.features, shape.batch))
        turns = [_turn(shape, predictor, server, single) for _ in range(num_turns)]
    # A host that others use is faster in one minute than in the next: a ratio is of neighbouring seconds.
    figures = {name: statistics.median(turn[name] for turn in turns) for name in turns[0]}
    figures["lost over 20 reloads"] = _lost_over_reloads(
        packages, inputs_of(shape, predictor.features, 1), folder
    )
    ranking = f"1 user x {shape.items} items, plain over shared"
    figures[ranking] = _plain_over_shared(shape, folder / "shared")
    figures[f"{ranking}, heavy user"] = _plain_over_shared(heavy, folder / "heavy")
    print(table(["measured", ""], [[name, f"{value:.2f}"] for name, value in figures.items()]))
    asked = {
        "throughput per CPU second over the bare call's": (0.6, "x", False),
        "64 clients of one sample, batching on over off": (4.0, "x", False),
        "p50 at concurrency 1 over the bare call's": (1.0, " ms", True),
        "p99 at concurrency 1 over the bare call's": (3.0, " ms", True),
        "answered in time at 2x overload, of capacity": (0.9, "x", False),
        "p95 of a refusal, ms": (float(_REFUSED_MS), " ms", True),
        "lost over 20 reloads": (0.0, "", True),
        ranking: (3.0, "x", False),
        f"{ranking}, heavy user": (3.0, "x", False),
    }
    bars = [Bar(name, figures[name], bar, unit, at_most) for name, (bar, unit, at_most) in asked.items()]
    return Result({**figures, "turns": turns}, bars)


def _turn(shape: Shape, predictor: Predictor, server: "Running", single: "Running") -> dict[str, float]:
    """Measure a server with batching, and one that scores request by request."""
    large, one, middle = (inputs_of(shape, predictor.features, n) for n in (shape.batch, 1, 64))
    figures: dict[str, float] = {}

    started = time.process_time()
    calls = len(_seconds(lambda: predictor(*large), shape.seconds))
    bare_rate = calls / (time.process_time() - started)
    started = server.cpu_seconds()
    done = server.load(request_of(large), clients=2, seconds=shape.seconds).statuses[200]
    server_rate = done / (server.cpu_seconds() - started)
    figures["throughput per CPU second over the bare call's"] = server_rate / bare_rate

    bare = _seconds(lambda: predictor(*one), shape.seconds)
    alone = server.load(request_of(one), clients=1, seconds=shape.seconds).seconds[200]
    for percent in (50, 99):
        figures[f"p{percent} at concurrency 1 over the bare call's"] = 1e3 * (
            percentile(alone, percent) - percentile(bare, percent)
        )

    batched, unbatched = (
        each.load(request_of(one), clients=64, seconds=shape.seconds).statuses[200]
        for each in (server, single)
    )
    figures["64 clients of one sample, batching on over off"] = batched / unbatched

    capacity = server.load(request_of(middle), clients=16, seconds=shape.seconds).statuses[200]
    request = request_of(middle, {"X-Timeout-Ms": str(DEADLINE_MS)})
    flood = asyncio.run(
        open_loop(server.port, request, rate=2 * capacity / shape.seconds, seconds=shape.seconds)
    )
    in_time = sum(1e3 * s <= DEADLINE_MS for s in flood.seconds.get(200, []))
    figures["answered in time at 2x overload, of capacity"] = in_time / capacity
    refused = flood.seconds.get(503, []) or [0.0]
    figures[f"refused within {_REFUSED_MS} ms at 2x overload"] = statistics.mean(
        1e3 * s <= _REFUSED_MS for s in refused
    )
    figures["p95 of a refusal, ms"] = 1e3 * percentile(refused, 95)
    return figures


class Running(NamedTuple):
    """A server in its own process."""

    process: "subprocess.Popen[bytes]"
    port: int
    log: Path

    def state(self) -> str:
        """Describe whether the process runs, and how its log ends."""
        code = self.process.poll()
        how = "runs" if code is None else f"ended with {code}"
        return f"the server {how}; its log ends with {self.log.read_text(errors='replace')[-2000:]!r}"

    def cpu_seconds(self) -> float:
        words = Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")

    def ask(self, request: bytes) -> bytes:
        outcome = asyncio.run(closed(self.port, request, clients=1, seconds=0.01, keep_bodies=True))
        if set(outcome.statuses) != {200}:
            raise AssertionError(f"the server answered with {outcome.bodies[0]!r}")
        return outcome.bodies[0]

    def load(self, request: bytes, *, clients: int, seconds: float) -> Outcome:
        outcome = asyncio.run(closed(self.port, request, clients=clients, seconds=seconds))
        if set(outcome.statuses) != {200}:
            raise AssertionError(f"the server answered with {outcome.statuses}")
        return outcome


@contextlib.contextmanager
def serving(package: Path, *options: str) -> Iterator[Running]:
    """Serve a package with one thread, wait until the server is ready, and stop it at the end."""
    module = [sys.executable, "-W", "ignore", "-m", "meshrec"]
    # Not a port that was free a moment ago: another program may have it when the server starts.
    command = [*module, "serve", f"model={package}", "--port", "0", *options]
    variables = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=log)
        server = Running(process, 0, Path(log.name))
        try:
            while not _is_ready(server.port):
                if process.poll() is not None:
                    raise AssertionError(server.state())
                if found := re.search(r" at http://127\.0\.0\.1:(\d+)", server.log.read_text()):
                    server = server._replace(port=int(found[1]))
                time.sleep(0.05)
            yield server
        finally:
            process.terminate()
            process.wait(60)


def _is_ready(port: int) -> bool:
    if port:
        with contextlib.suppress(OSError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready", timeout=5).close()
            return True
    return False


def _lost_over_reloads(packages: list[Path], inputs: Inputs, folder: Path) -> float:
    """Count requests without an answer, or whose scores belong to another version than the answer says."""
    place = folder / "current"
    place.symlink_to(packages[0])
    versions = {p.version: p(*inputs).numpy().tobytes() for p in map(Predictor, packages)}
    with serving(place) as server:

        async def reload() -> Outcome:
            work = asyncio.create_task(
                closed(server.port, request_of(inputs), clients=8, seconds=4.0, keep_bodies=True)
            )
            for turn in range(1, 21):
                (folder / "next").symlink_to(packages[turn % 2])
                (folder / "next").replace(place)
                server.process.send_signal(signal.SIGHUP)
                await asyncio.sleep(0.15)
            return await work

        outcome = asyncio.run(reload())
    wrong, seen = outcome.statuses.total() - outcome.statuses[200], set()
    for body in outcome.bodies:
        said = json.loads(body[: len(body) - 4])
        seen.add(said["model_version"])
        wrong += versions[said["model_version"]] != body[-4:]
    if len(seen) != 2:
        raise AssertionError(f"of two versions only {seen} answered")
    return float(wrong)


def _plain_over_shared(shape: Shape, folder: Path) -> float:
    """Return the latency of ranking items for one user with repeated features, over that with shared
    features.

    A quarter of the features belong to the item. The dense values and the other features belong to the user.
    A sixth of all features are histories of ``shape.history`` IDs; the others have one ID.
    """
    features = [f"f{number}" for number in range(shape.num_features)]
    user = features[max(1, len(features) // 4) :]
    histories = dict.fromkeys(features[-max(1, len(features) // 6) :], shape.history)
    package = package_of(shape, folder, shared=[*user, "dense"])
    _, values, lengths = inputs_of(shape, features, shape.items)
    dense, user_values, user_lengths = inputs_of(shape, features, 1, histories)
    shared = (
        dense,
        {f: user_values[f] if f in user else values[f] for f in features},
        {f: user_lengths[f] if f in user else lengths[f] for f in features},
    )
    plain = (
        dense.expand(shape.items, -1).contiguous(),
        {f: user_values[f].repeat(shape.items) if f in user else values[f] for f in features},
        {f: user_lengths[f].repeat(shape.items) if f in user else lengths[f] for f in features},
    )
    requests = [request_of(plain), request_of(shared, parameters={"shared": True})]
    seconds: list[list[float]] = [[], []]
    with serving(package) as server:
        scores = [server.ask(request)[-4 * shape.items :] for request in requests]
        np.testing.assert_allclose(*(np.frombuffer(each, np.float32) for each in scores), rtol=1e-5)
        for _ in range(4):  # in turn, so that a slow moment meets both
            for each, request in zip(seconds, requests, strict=True):
                each += server.load(request, clients=1, seconds=shape.seconds / 2).seconds[200]
    return statistics.median(seconds[0]) / statistics.median(seconds[1])


def _with_other_weights(package: Path, folder: Path) -> Path:
    """Make another version of a package, which need not be compiled."""
    shutil.copytree(package, folder)
    weights = np.memmap(folder / WEIGHTS, np.float32, "r+")
    weights *= 0.5
    weights.flush()
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest["sha256"][WEIGHTS] = sha256_of(folder / WEIGHTS)
    (folder / MANIFEST).write_text(json.dumps(manifest))
    write_digests(folder)
    return folder


def package_of(shape: Shape, folder: Path, **options: Any) -> Path:
    """Export a DLRM."""
    torch.manual_seed(0)
    features = [f"f{number}" for number in range(shape.num_features)]
    sparse = EmbeddingBagCollection(configs(shape.num_features, shape.num_rows, shape.dim))
    model = DLRM(sparse, shape.num_dense, list(shape.bottom), list(shape.top))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return export(
            model, folder, features=features, num_dense=shape.num_dense, compile=shape.compile, **options
        )


def inputs_of(shape: Shape, features: list[str], batch: int, bags: Mapping[str, int] | None = None) -> Inputs:
    """Make samples with one ID per feature, or as many as ``bags`` says."""
    generator = torch.Generator().manual_seed(batch)
    sizes = dict.fromkeys(features, 1) | dict(bags or {})
    lengths = {f: torch.full((batch,), sizes[f]) for f in features}
    values = {f: torch.randint(0, shape.num_rows, (batch * sizes[f],), generator=generator) for f in features}
    return torch.randn(batch, shape.num_dense, generator=generator), values, lengths


def request_of(
    inputs: Inputs, headers: Mapping[str, str] | None = None, parameters: Mapping[str, Any] | None = None
) -> bytes:
    """Encode a binary request of the Open Inference Protocol."""
    dense, values, lengths = inputs
    arrays = {"dense": ("FP32", dense.numpy())}
    for f in values:
        arrays[f"{f}.values"] = "INT64", values[f].numpy()
        arrays[f"{f}.lengths"] = "INT32", lengths[f].numpy().astype(np.int32)
    head = json.dumps(
        {
            "parameters": {"binary_data_output": True, **(parameters or {})},
            "inputs": [
                {
                    "name": name,
                    "datatype": kind,
                    "shape": list(array.shape),
                    "parameters": {"binary_data_size": array.nbytes},
                }
                for name, (kind, array) in arrays.items()
            ],
        }
    ).encode()
    body = b"".join([head, *(array.tobytes() for _, array in arrays.values())])
    return http(INFER, body, {"Inference-Header-Content-Length": str(len(head)), **(headers or {})})


def verify(server: Running, predictor: Predictor, inputs: Inputs) -> None:
    scores = predictor(*inputs)
    found = torch.frombuffer(
        bytearray(server.ask(request_of(inputs))[-4 * len(scores) :]), dtype=torch.float32
    )
    torch.testing.assert_close(found, scores, rtol=1e-6, atol=0)


def _seconds(call: Callable[[], object], seconds: float) -> list[float]:
    found, end = [], time.perf_counter() + seconds
    for _ in range(5):
        call()
    while (start := time.perf_counter()) < end:
        call()
        found.append(time.perf_counter() - start)
    return found


def percentile(seconds: list[float], percent: int) -> float:
    return float(np.percentile(seconds, percent))
