"""Shared parts of all benchmarks: fair timing, bars that pass or miss, and reports as text and JSON."""

import ctypes
import datetime
import itertools
import json
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Effort:
    """Number of rounds, of timed calls per round, and of untimed calls before them."""

    rounds: int = 7
    calls: int = 3
    warm_ups: int = 5


class Timing(NamedTuple):
    """Milliseconds per call."""

    median: float
    min: float


@dataclass(frozen=True)
class Bar:
    """A figure that a benchmark promises: ``figure`` must reach ``asked``, or stay below it.

    ``ceiling`` is the value that the figure would have on this machine for code that only waits for memory
    (or, for a training step, only computes its dense part).
    """

    name: str
    figure: float
    asked: float
    unit: str = "x"
    at_most: bool = False
    ceiling: float | None = None

    @property
    def met(self) -> bool:
        return self.figure <= self.asked if self.at_most else self.figure >= self.asked


class Result(NamedTuple):
    """Result of a benchmark: its figures in the form of JSON, and its bars."""

    figures: Any
    bars: list[Bar]


def measure(
    contenders: Mapping[str, Callable[[], Any]],
    effort: Effort,
    before: Mapping[str, Callable[[], Any]] | None = None,
) -> dict[str, Timing]:
    """Measure the contenders in turns, round after round, so that a slow minute of the machine affects all.

    ``before``: what is called before each call of a contender, and is not timed.
    """
    prepare = {name: lambda: None for name in contenders} | dict(before or {})
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(effort.rounds):
        for name, call in contenders.items():
            for _ in range(effort.warm_ups):  # caches and threads as in a run of this contender alone
                call()
            for _ in range(effort.calls):
                prepare[name]()
                start = time.perf_counter()
                call()
                seconds[name].append(time.perf_counter() - start)
    return {name: Timing(1e3 * statistics.median(each), 1e3 * min(each)) for name, each in seconds.items()}


def in_turn(calls: Iterable[Callable[[], Any]]) -> Callable[[], Any]:
    """Return a function that calls the next of several functions each time."""
    turns = itertools.cycle(calls)
    return lambda: next(turns)()


def selected(names: Sequence[str], only: Sequence[str]) -> list[str]:
    """Return the names that contain a word of ``only``; all of them if there are no words.

    Raises:
        ValueError: no name contains any of the words.
    """
    chosen = [name for name in names if not only or any(word in name for word in only)]
    if not chosen:
        raise ValueError(f"--only {' '.join(only)} names nothing of {', '.join(names)}.")
    return chosen


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Compute with this many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def configs(num_tables: int, num_rows: int | None, dim: int, **options: Any) -> list[Any]:
    """Return configs of tables t0, t1, ... of equal shapes, which features f0, f1, ... read."""
    from meshrec import EmbeddingBagConfig

    options |= {} if num_rows is None else {"num_embeddings": num_rows}
    return [
        EmbeddingBagConfig(name=f"t{t}", embedding_dim=dim, feature_names=[f"f{t}"], **options)
        for t in range(num_tables)
    ]


def compiled(source: Path, *flags: str) -> ctypes.CDLL:
    """Compile a C++ file and load it."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "library.so"
        compiler = shlex.split(os.environ.get("CXX", "")) or ["c++"]
        flags = (*flags, "-std=c++20", "-fPIC", "-shared")
        subprocess.run([*compiler, *flags, str(source), "-o", str(target)], check=True)
        return ctypes.CDLL(str(target))


def table(header: list[str], rows: list[list[str]]) -> str:
    """Format a plain-text table, with the first column left-aligned and the others right-aligned."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]

    def line(row: list[str]) -> str:
        cells = [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join([row[0].ljust(widths[0]), *cells]).rstrip()

    return "\n".join([line(header), "-" * len(line(header)), *map(line, rows)])


def bars_table(bars: list[Bar]) -> str:
    rows = [
        [
            bar.name,
            f"{bar.figure:.2f}{bar.unit}",
            f"{'<=' if bar.at_most else '>='} {bar.asked:g}{bar.unit}",
            "" if bar.ceiling is None else f"{bar.ceiling:.2f}{bar.unit}",
            "PASS" if bar.met else "MISS",
        ]
        for bar in bars
    ]
    return table(["bar", "figure", "asked", "ceiling here", ""], rows)


def machine() -> dict[str, Any]:
    """Return what a figure depends on: processor, memory and versions, without the machine's name."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    model = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "cpu": model or platform.processor(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def save(bench: str, result: Result) -> Path:
    """Write one run's figures and verdicts as JSON, for comparisons later on."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    now = datetime.datetime.now(datetime.timezone.utc)
    path = RESULTS / f"{bench}_{now:%Y%m%dT%H%M%S}.json"
    bars = [{**asdict(bar), "met": bar.met} for bar in result.bars]
    report = {"machine": machine(), "figures": result.figures, "bars": bars}
    path.write_text(json.dumps(report, indent=1) + "\n")
    return path
