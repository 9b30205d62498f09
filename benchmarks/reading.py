"""Rows per second from Parquet to batches, beside plain scans of the same columns on one core.

The reader decodes ahead in a second thread, so it is also timed with both threads on one core. The columns
are shaped like the MovieLens ratings of `make demo`, and IDs come from fitted vocabularies. The batches are
verified first. The demo itself, trained by two ranks, shows how many samples a model consumes. Two ranks
also fit the features, beside one.
"""

import functools
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from benchmarks.harness import Bar, Effort, Result, Timing, measure, table, threads
from meshrec.data import Dataset, parquet
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.data.features.fitting import fit_on_ranks
from meshrec.data.parquet import open_parquet
from meshrec.testing import RankPool
from meshrec.train import join

SCAN, DEMO = "pyarrow's scan", "the demo, 2 ranks"
_BATCH = 1024


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Write, verify, time and compare with the bars."""
    num_rows = 5_000 if tiny else 2_000_000
    with threads(1), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ratings.parquet"
        schema = features().fit([write(path, num_rows)])
        dataset = parquet(train=path, schema=schema)
        verify(dataset, pq.read_table(path))
        contenders: dict[str, Callable[[], Any]] = {
            "meshrec": lambda: read(dataset),
            "meshrec, one core": lambda: on_one_core(lambda: read(dataset)),
            **scans(str(path), schema.columns()),
        }
        once = Effort(rounds=effort.rounds, calls=1, warm_ups=1)
        times = measure(contenders, once)
        fits = fitting_times(path, once)
    rates = {name: 1e3 * num_rows / timing.min for name, timing in times.items()}
    if not tiny:
        rates[DEMO] = demo_rate()
    rows = [[name, f"{rate:,.0f}", f"{rate / rates[SCAN]:.2f}x"] for name, rate in rates.items()]
    print(table(["reader", "rows/s", ""], rows))
    rows = [
        [str(ranks), f"{time.min / 1e3:.2f}", f"{fits[1].min / time.min:.2f}x"]
        for ranks, time in fits.items()
    ]
    print(table(["ranks", "fitting, s", ""], rows))
    bars = [Bar(name="reading over pyarrow's scan", figure=rates["meshrec"] / rates[SCAN], asked=0.7)]
    if not tiny:
        bars += [
            Bar(name="reading over the demo", figure=rates["meshrec"] / rates[DEMO], asked=3.0),
            Bar(name="fitting on 2 ranks over 1", figure=fits[1].min / fits[2].min, asked=1.7),
        ]
    seconds = {str(ranks): timing.min / 1e3 for ranks, timing in fits.items()}
    return Result({"rows_per_second": rates, "fitting_seconds_by_ranks": seconds}, bars)


def fitting_times(path: Path, effort: Effort) -> dict[int, Timing]:
    """Time how 1 and 2 ranks fit the features, and check that they are the same."""
    with RankPool(1, timeout_seconds=300) as one, RankPool(2, timeout_seconds=300) as two:
        pools = {"1": one, "2": two}
        digests = {name: pool.run(fit_digest, str(path))[0] for name, pool in pools.items()}
        assert digests["1"] == digests["2"], digests
        calls = {name: functools.partial(pool.run, fit, str(path)) for name, pool in pools.items()}
        times = measure(calls, effort)
    return {int(name): timing for name, timing in times.items()}


def fit(path: str) -> None:
    fit_on_ranks(features(), open_parquet, path, join("cpu").axis)


def fit_digest(path: str) -> str | None:
    """Fit the features on all ranks, and return a digest of them on rank 0."""
    fitted = fit_on_ranks(features(), open_parquet, path, join("cpu").axis)
    return None if fitted is None else hashlib.sha256(json.dumps(fitted.to_json()).encode()).hexdigest()


def features() -> Features:
    names = ("user", "movie", "device", "year", "genres")
    history = Vocabulary(name="history", table="movie", sequence=True, max_length=20)
    return Features(
        labels=(Label(column="liked"),),
        features=(Number(name="age"), *(Vocabulary(name=name) for name in names), history),
    )


def write(path: Path, num_rows: int) -> pa.Table:
    """Write a file of random ratings, and return its rows. Values follow Zipf's law."""
    rng = np.random.default_rng(0)

    def drawn(size: int, num: int, *, text: bool = False) -> pa.Array:
        """Draw ``num`` of ``size`` values."""
        shares = np.cumsum(1 / np.arange(1, size + 1))
        values = pa.array(rng.permutation(size)[np.searchsorted(shares / shares[-1], rng.random(num))])
        return pa.array([f"value {number}" for number in range(size)]).take(values) if text else values

    def lists(lengths: Any, size: int, *, text: bool = False) -> pa.Array:
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        return pa.ListArray.from_arrays(offsets, drawn(size, int(lengths.sum()), text=text))

    columns = {
        "liked": pa.array((rng.random(num_rows) < 0.4).astype(np.float32)),
        "age": pa.array(rng.random(num_rows).astype(np.float32)),
        "user": drawn(50_000, num_rows),
        "movie": drawn(20_000, num_rows),
        "device": drawn(20, num_rows, text=True),
        "year": drawn(90, num_rows),
        "genres": lists(rng.integers(1, 5, num_rows), 20, text=True),
        "history": lists(rng.integers(0, 21, num_rows), 20_000),
    }
    ratings = pa.table(columns)
    pq.write_table(ratings, path, row_group_size=32_768)
    return ratings


def verify(dataset: Dataset, ratings: pa.Table) -> None:
    """Check that every value was read once: the most frequent value of a vocabulary has the lowest ID."""
    batches = [batch.sparse.to_dict() for batch in dataset.train.batches(_BATCH)]
    for name in ("user", "device", "genres"):
        values = ratings[name].combine_chunks()
        counts = pc.value_counts(values.flatten() if pa.types.is_list(values.type) else values)
        expected = np.sort(counts.field("counts").to_numpy())[::-1]
        # Rows 0 and 1 of a table are for values that are missing or not in the vocabulary.
        ids = np.concatenate([batch[name].values().numpy() for batch in batches])
        found = np.bincount(ids, minlength=2 + len(expected))
        if found.tolist() != [0, 0, *expected.tolist()]:
            raise AssertionError(
                f"read {found.sum()} values of {name} with the counts {found}, not {expected}"
            )


def read(dataset: Dataset) -> int:
    return sum(len(batch) for batch in dataset.train.batches(_BATCH))


def on_one_core(call: Callable[[], Any]) -> Any:
    """Call a function on one core, with the threads that it starts; without a limit outside Linux."""
    if not hasattr(os, "sched_setaffinity"):
        return call()
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        return call()
    finally:
        os.sched_setaffinity(0, cores)


def scans(path: str, columns: list[str]) -> dict[str, Callable[[], Any]]:
    """Return functions that read the columns without converting them, on one thread."""
    arms: dict[str, Callable[[], Any]] = {
        SCAN: lambda: [*pq.ParquetFile(path).iter_batches(32_768, columns=columns, use_threads=False)]
    }
    if importlib.util.find_spec("polars"):
        os.environ["POLARS_MAX_THREADS"] = "1"  # read when polars is imported
        import polars

        arms["polars"] = lambda: polars.read_parquet(path, columns=columns)
    if importlib.util.find_spec("duckdb"):
        import duckdb

        connection = duckdb.connect(config={"threads": 1})
        query = f"SELECT {', '.join(columns)} FROM '{path}'"
        arms["DuckDB"] = lambda: connection.sql(query).to_arrow_table()
    return arms


def demo_rate() -> float:
    """Train the recipe of the demo by two ranks, and return its samples per second."""
    with tempfile.TemporaryDirectory() as runs:
        command = ["-m", "meshrec", "train", "movielens_dlrm", "--nproc", "2", "--no-checkpoints", "--quiet"]
        process = subprocess.run(
            [sys.executable, *command, "--runs", runs], capture_output=True, text=True, check=True
        )
    match = re.search(r"([\d,]+) samples/s while training", process.stdout)
    assert match, process.stdout
    return float(match[1].replace(",", ""))
