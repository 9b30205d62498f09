"""A server under attack and its verified start: what safety costs the clients that behave.

Good requests come from this process at a steady rate. One bad client at a time misbehaves from a process of
its own and from another loopback address, as the server limits clients by their address.
"""

import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Bar, Effort, Result, table
from benchmarks.serve import TINY, Inputs, Shape, inputs_of, package_of, percentile, request_of, serving
from benchmarks.serve_load import Outcome, open_loop
from benchmarks.serve_misbehave import WAYS
from meshrec.export import Predictor
from meshrec.export.manifest import WEIGHTS

_GIB = 1 << 30
_AT_A_TIME = 1 << 22
_CONNECTIONS = 64
"""Connections of the good client. When a machine stalls, requests pile up, and the server refuses a client
that opens more than 256 connections for them."""


class Sizes(NamedTuple):
    """Sizes of the benchmark."""

    served: Shape = Shape()
    gib: float = 4.0
    rounds: int = 3
    rate: float = 100.0
    seconds: float = 4.0


_TINY = Sizes(TINY, 0.001, 1, 50.0, 0.2)


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Verify the answers of a server under attack, then time them; then time the start."""
    sizes = _TINY if tiny else Sizes(rounds=effort.rounds if effort.rounds < 3 else 3)
    figures: dict[str, float] = {}
    for part in (_attacked, _start):
        with tempfile.TemporaryDirectory() as folder:
            found = part(sizes, Path(folder))
        print(table(["measured", ""], [[name, f"{value:.3f}"] for name, value in found.items()]), flush=True)
        figures |= found
    asked = {f"p99, {way}, over none": 2.0 for way in WAYS} | {"verified start over reading": 1.3}
    bars = [
        Bar(name=name, figure=figures[name], asked=bar, unit="x", at_most=True) for name, bar in asked.items()
    ]
    return Result(figures, bars)


def _attacked(sizes: Sizes, folder: Path) -> dict[str, float]:
    """Measure the p99 latency of good requests while a client misbehaves, over that without one."""
    package = package_of(sizes.served, folder / "package")
    predictor = Predictor(package)
    inputs = inputs_of(sizes.served, predictor.features, 1)
    expected = predictor(*inputs).numpy().tobytes()
    found: dict[str, float] = {}
    with serving(package) as server:
        _good(server.port, inputs, expected, sizes)
        for name in WAYS:
            ratios = []
            for _ in range(sizes.rounds):
                calm = _good(server.port, inputs, expected, sizes)
                with _misbehaving(server.port, name):
                    ratios.append(_good(server.port, inputs, expected, sizes) / calm)
            found[f"p99, {name}, over none"] = statistics.median(ratios)
    return found


def _good(port: int, inputs: Inputs, expected: bytes, sizes: Sizes) -> float:
    """Return the p99 latency in seconds of requests that must all get the right scores."""
    wrong = 0

    def check(body: bytes) -> None:
        nonlocal wrong
        wrong += not body.endswith(expected)

    outcome: Outcome = asyncio.run(
        open_loop(
            port,
            request_of(inputs),
            rate=sizes.rate,
            seconds=sizes.seconds,
            connections=_CONNECTIONS,
            on_body=check,
        )
    )
    assert set(outcome.statuses) == {200}, outcome.statuses
    assert wrong == 0
    return percentile(outcome.seconds[200], 99)


@contextlib.contextmanager
def _misbehaving(port: int, name: str):  # type: ignore[no-untyped-def]
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.serve_misbehave", str(port), name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "began\n"
            yield
            assert process.poll() is None, f"the bad client ended with {process.returncode}"
        finally:
            process.kill()


def _start(sizes: Sizes, folder: Path) -> dict[str, float]:
    """Measure how long a package takes to open with all files compared, over reading its weights.

    Both begin with a file that is not in the page cache.
    """
    row_bytes = 4 * sizes.served.dim * sizes.served.num_features
    shape = sizes.served._replace(num_rows=int(sizes.gib * _GIB / row_bytes) + 1)
    package = package_of(shape, folder / "package")
    reading: list[float] = []
    starting: list[float] = []
    both: list[tuple[list[float], Callable[[], object]]] = [
        (reading, lambda: _read(package / WEIGHTS)),
        (starting, lambda: Predictor(package)),
    ]
    for number in range(2 * sizes.rounds):
        for seconds, work in both if number % 2 else both[::-1]:
            _forget(package)
            begin = time.perf_counter()
            work()
            seconds.append(time.perf_counter() - begin)
    return {
        "package, GiB": (package / WEIGHTS).stat().st_size / _GIB,
        "reading, s": statistics.median(reading),
        "verified start, s": statistics.median(starting),
        "verified start over reading": statistics.median(
            start / read for start, read in zip(starting, reading, strict=True)
        ),
    }


def _read(path: Path) -> None:
    """Read a file from its beginning to its end, as one thread does."""
    buffer = memoryview(np.empty(_AT_A_TIME, np.uint8))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def _forget(package: Path) -> None:
    """Have the kernel drop a package's pages, so that the next reader reads them from the disk."""
    for path in package.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
