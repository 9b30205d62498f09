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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Bar, Effort, Result, selected, table
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
from benchmarks.serve_load import Outcome, open_loop
from benchmarks.serve_misbehave import WAYS
from meshrec.export import Predictor
from meshrec.export.manifest import WEIGHTS

_GIB = 1 << 30
_AT_A_TIME = 1 << 22
_CONNECTIONS = 64
"""Connections of the good client. When a machine stalls, requests pile up, and the server refuses a client
that opens more than 256 connections for them."""
START = "verified start"
"""Name of the measurement of the verified start, beside the ways to misbehave."""


class Sizes(NamedTuple):
    """Sizes of the benchmark."""

    served: Shape = Shape()
    gib: float = 4.0
    rounds: int = 3
    rate: float = 100.0
    seconds: float = 4.0


_TINY = Sizes(TINY, 0.001, 1, 50.0, 0.2)


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Verify the answers of a server under attack, then time them; then time the start.

    Args:
        effort: the number of rounds.
        tiny: whether to measure for an instant only.
        only: names, or parts of names, of ways to misbehave and of `START`; all if there are none.

    Raises:
        ValueError: ``only`` names nothing.
    """
    sizes = _TINY if tiny else Sizes(rounds=effort.rounds)
    chosen = selected([*WAYS, START], only)
    ways = [name for name in chosen if name != START]
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        if ways:
            figures |= _attacked(sizes, Path(folder), ways)
        if START in chosen:
            figures |= _start(sizes, _large_package(sizes, Path(folder) / "large"))
    print(table(["measured", ""], [[name, f"{value:.3f}"] for name, value in figures.items()]), flush=True)
    asked = {f"p99, {way}, over none": 2.0 for way in WAYS} | {f"{START} over reading, cold": 1.3}
    bars = [Bar(name, figures[name], bar, at_most=True) for name, bar in asked.items() if name in figures]
    return Result(figures, bars)


def _attacked(sizes: Sizes, folder: Path, ways: Sequence[str]) -> dict[str, float]:
    """Measure the p99 latency of good requests while a client misbehaves, over that without one."""
    package = package_of(sizes.served, folder / "served")
    predictor = Predictor(package)
    inputs = inputs_of(sizes.served, predictor.features, 1)
    expected = predictor(*inputs).numpy().tobytes()
    found: dict[str, float] = {}
    with serving(package) as server:
        _good(server, inputs, expected, sizes, "nobody")
        for name in ways:
            ratios = []
            for number in range(sizes.rounds):
                calm = _good(server, inputs, expected, sizes, "nobody")
                with _misbehaving(server.port, name):
                    hostile = _good(server, inputs, expected, sizes, name)
                ratios.append(hostile / calm)
                print(f"{name}, round {number}: p99 {1e3 * hostile:.2f} ms over {1e3 * calm:.2f}", flush=True)
            found[f"p99, {name}, over none"] = statistics.median(ratios)
    return found


def _good(server: Running, inputs: Inputs, expected: bytes, sizes: Sizes, beside: str) -> float:
    """Return the p99 latency in seconds of requests that must all get the right scores.

    Raises:
        AssertionError: not all did; the message has the first failures and the end of the server's log.
    """
    wrong = 0

    def check(body: bytes) -> None:
        nonlocal wrong
        wrong += not body.endswith(expected)

    outcome: Outcome = asyncio.run(
        open_loop(
            server.port,
            request_of(inputs),
            rate=sizes.rate,
            seconds=sizes.seconds,
            connections=_CONNECTIONS,
            on_body=check,
        )
    )
    if set(outcome.statuses) != {200} or wrong:
        raise AssertionError(
            f"beside {beside}: answers by status {dict(outcome.statuses)}, {wrong} with wrong scores; first "
            f"failures {outcome.failures}; {server.state()}"
        )
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


def _large_package(sizes: Sizes, folder: Path) -> Path:
    """Export a package of ``sizes.gib`` GiB."""
    row_bytes = 4 * sizes.served.dim * sizes.served.num_features
    return package_of(sizes.served._replace(num_rows=int(sizes.gib * _GIB / row_bytes) + 1), folder)


def _start(sizes: Sizes, package: Path) -> dict[str, float]:
    """Measure the time of opening a package, which verifies all files, over that of reading its weights.

    Cold: the file is not in the page cache. Warm: all of it is.
    """
    found = {"package, GiB": (package / WEIGHTS).stat().st_size / _GIB}
    for state, prepare in {"cold": _forget, "warm": lambda package: _read(package / WEIGHTS)}.items():
        works: list[Callable[[], object]] = [lambda: _read(package / WEIGHTS), lambda: Predictor(package)]
        seconds: list[list[float]] = [[], []]
        for number in range(sizes.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                prepare(package)
                begin = time.perf_counter()
                works[which]()
                seconds[which].append(time.perf_counter() - begin)
        ratios = [start / read for read, start in zip(*seconds, strict=True)]
        found[f"reading, {state}, s"] = statistics.median(seconds[0])
        found[f"{START}, {state}, s"] = statistics.median(seconds[1])
        found[f"{START} over reading, {state}"] = statistics.median(ratios)
    return found


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
