"""Building histories on disk from a synthetic log: time beside DuckDB's sort of the same file, and memory.

Each build runs in a process of its own. Memory is the peak of its anonymous pages; pages of mapped files,
which the system may drop at any time, do not count.
"""

import multiprocessing
import re
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.harness import Bar, Effort, Result, table
from meshrec.train.log_sources import Log

_ROWS, _TINY = (8_000_000, 32_000_000), (500, 1000)
_USERS, _ITEMS, _BLOCK = 5_000_000, 1_000_000, 1_000_000
_GIB = 1.0
"""Memory for building; DuckDB gets four times as much."""


class Run(NamedTuple):
    """Seconds, and peak anonymous memory in bytes."""

    seconds: float
    memory: int


def run(effort: Effort, *, tiny: bool = False, parts: list[str] | None = None) -> Result:
    """Time each build and sort once; ``parts``: million rows of each log. Tests compare results."""
    sizes = [int(1e6 * float(part)) for part in parts] if parts else _TINY if tiny else _ROWS
    runs = {}
    with tempfile.TemporaryDirectory() as folder:
        for num_rows in sizes:
            log = Path(folder, f"{num_rows}.parquet")
            write(log, num_rows)
            for name, work in (("histories", build), ("DuckDB", sort)):
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    runs[name, num_rows] = process.submit(work, log).result()
    rows = [
        [f"{num_rows / 1e6:g}, {name}", f"{one.seconds:.1f}", f"{one.memory / 1e6:.0f}"]
        for (name, num_rows), one in runs.items()
    ]
    print(table(["million rows", "s", "MB"], rows))
    first, last = runs["histories", sizes[0]], runs["histories", sizes[-1]]
    ratio = last.seconds / runs["DuckDB", sizes[-1]].seconds
    figures = {f"{name} {num_rows}": one._asdict() for (name, num_rows), one in runs.items()}
    bars = [
        Bar(name="time over DuckDB's sort", figure=ratio, asked=1.5, at_most=True),
        Bar(name="memory growth", figure=last.memory / first.memory, asked=1.1, at_most=True),
    ]
    return Result(figures, bars)


def write(path: Path, num_rows: int) -> None:
    """Write a log in blocks: users and items by Zipf's law, and times in no order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    users = rng.permutation(_USERS)
    schema = pa.schema([(name, pa.int64()) for name in ("user", "item", "time")])

    def ranks(num: int, size: int, exponent: float) -> Any:
        power = 1 - exponent
        return ((rng.random(num) * (size**power - 1) + 1) ** (1 / power)).astype(np.int64).clip(1, size) - 1

    with pq.ParquetWriter(path, schema) as writer:
        for start in range(0, num_rows, _BLOCK):
            num = min(_BLOCK, num_rows - start)
            times = 1_600_000_000 + rng.integers(0, 50_000_000, num)
            columns = [users[ranks(num, _USERS, 0.8)], ranks(num, _ITEMS, 1.05), times]
            writer.write_table(pa.table(columns, schema=schema))


def build(log: Path) -> Run:
    """Build histories, and return the costs."""
    source = Log(log=(str(log),), histories=log.with_suffix(".histories"), histories_gib=_GIB)
    return measured(lambda: source.interactions(source.fit()))


def sort(log: Path) -> Run:
    """Sort the log with DuckDB into a Parquet file, and return the costs."""
    import duckdb

    connection = duckdb.connect()
    connection.execute(
        f"SET memory_limit = '{4 * _GIB}GiB'; SET temp_directory = '{log.with_suffix('.spill')}'"
    )
    query = (
        f"COPY (SELECT * FROM '{log}' ORDER BY user, time) TO '{log.with_suffix('.sorted')}' (FORMAT parquet)"
    )
    return measured(lambda: connection.execute(query))


def measured(work: Callable[[], object]) -> Run:
    """Call ``work``, and return its costs."""
    memory, done = [0], threading.Event()

    def watch() -> None:
        is_done = False
        while not is_done:
            is_done = done.wait(0.02)
            match = re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())
            memory[0] = max(memory[0], 1024 * int(match[1]) if match else 0)

    watcher = threading.Thread(target=watch)
    watcher.start()
    start = time.monotonic()
    work()
    seconds = time.monotonic() - start
    done.set()
    watcher.join()
    return Run(seconds, memory[0])
