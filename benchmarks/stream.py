"""`meshrec follow` beside training on files: throughput, seconds from event to score, and AUC after a drift.

All parts run the commands themselves, in processes of their own with one thread per rank. Events are clicks
with a known best AUC, in Parquet files that are added to a folder.
"""

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from benchmarks import serve
from benchmarks.harness import Bar, Effort, Result, selected, table
from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.data.features import Features, Key, Label, Number
from meshrec.data.synthetic import ClickSource, Teacher
from meshrec.export import Predictor
from meshrec.metrics.areas import area_under_curve
from meshrec.optim import Adam, RowWiseAdagrad
from meshrec.train import DenseOptimizer, DLRMConfig, Parquet, Recipe, Training, WideDeepConfig
from meshrec.train.observers import Finished, Stepped

BATCH, NUM_VALUES, NUM_DENSE = 512, 200, 4
NUM_FEATURES = 4
PARTS = ("throughput", "freshness", "drift")
_RECIPE, _WIDE, _CLOCK = (f"{__file__}:{name}" for name in ("recipe", "wide_recipe", "clock"))
_ROOT = Path(__file__).parents[1]
_START = 1_700_000_000
_WARM_UP_STEPS = 20
"""Steps before the throughput is measured."""
_FILES_PER_SECOND = 5
_WAIT_SECONDS = 120
# Longer than the window "hour" of `meshrec follow`, which then has the events of the last file only.
_GAP_SECONDS = 7200


class Sizes(NamedTuple):
    """Sizes of the benchmark; events in units of `BATCH`, except for the rate per second."""

    rounds: int
    steps: int = 2000
    rate: int = 5000
    seconds: int = 60
    before: int = 800
    after: int = 391
    """Steps after the drift and before the window: 200,000 events."""
    window: int = 200
    drifts: int = 5
    """Number of drifts, each from and to other click probabilities."""


_QUICK = Sizes(rounds=1, steps=600, seconds=15, drifts=1)
_TINY = Sizes(rounds=1, steps=40, rate=500, seconds=2, before=20, after=10, window=10, drifts=1)


def recipe() -> Recipe:
    """Return a DLRM on hashed tables."""
    features = Features(
        labels=(Label(column="clicked"),),
        features=(
            *(Number(name=f"d{number}", missing=0.0) for number in range(NUM_DENSE)),
            *(Key(name=f"f{number}", max_rows=4 * NUM_VALUES) for number in range(NUM_FEATURES)),
        ),
    )
    return Recipe(
        name="stream",
        data=Parquet(train=("missing",), features=features),
        model=DLRMConfig(embedding_dim=16, bottom=(32,), top=(64,)),
        tables=RowWiseAdagrad(lr=0.5),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=BATCH, epochs=1),
    )


def wide_recipe() -> Recipe:
    """Return a recipe with the model that `meshrec inspect` proposes, without its fit to training data.

    Its linear part follows a change of click probabilities faster than a DLRM. The learning rates were chosen
    on events of other click probabilities than those of the benchmark.
    """
    return dataclasses.replace(
        recipe(),
        model=WideDeepConfig(embedding_dim=16, layers=(64,), dropout=0.0, id_dropout=0.0),
        tables=Adam(lr=0.01),
        dense=DenseOptimizer(kind="adam", lr=1e-3),
    )


def clock(folder: Any) -> Callable[[Any], None]:
    """Return an observer that stores the seconds of all steps but the first ones, on rank 0."""
    start, end = (0.0, 0.0), (0.0, 0.0)
    num_samples = 0

    def observe(event: Any) -> None:
        nonlocal start, end, num_samples
        if isinstance(event, Stepped):
            usage = resource.getrusage(resource.RUSAGE_SELF)
            end = time.perf_counter(), usage.ru_utime + usage.ru_stime
            if event.step <= _WARM_UP_STEPS:
                start = end
            else:
                num_samples += event.num_samples
        elif isinstance(event, Finished):
            seconds = {"wall": end[0] - start[0], "cpu": end[1] - start[1]}
            (folder.path / "clock.json").write_text(json.dumps(seconds | {"samples": num_samples}))

    return observe


def run(effort: Effort, *, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Run the parts of the benchmark, each of which checks what was trained.

    Args:
        effort: number of rounds; up to two make a quick run.
        tiny: whether to try the benchmark itself only.
        only: names of `PARTS`; empty: all.
    """
    sizes = _TINY if tiny else _QUICK if effort.rounds <= 2 else Sizes(rounds=3)
    figures: dict[str, float] = {}
    bars: list[Bar] = []
    measures = {"throughput": _throughput, "freshness": _freshness, "drift": _drift}
    for part in selected(PARTS, only):
        with tempfile.TemporaryDirectory() as folder:
            part_figures, part_bars = measures[part](sizes, Path(folder))
        figures |= part_figures
        bars += part_bars
    print(table(["measured", ""], [[name, f"{value:.4g}"] for name, value in figures.items()]), flush=True)
    return Result(figures, bars)


def clicks(num: int, *, split: int, truth: int, start: float = _START) -> tuple[pa.Table, float]:
    """Draw clicks, a millisecond apart, and return them with the best possible AUC.

    Args:
        num: number of clicks.
        split: another number gives other samples.
        truth: another number gives other click probabilities.
        start: time of the first click in seconds since 1970.
    """
    source = ClickSource(
        num_samples=num,
        num_embeddings=[NUM_VALUES] * NUM_FEATURES,
        num_dense=NUM_DENSE,
        exponent=1.2,
        seed=0,
        teacher=Teacher(seed=truth, bias=-1.0, signal=1.5),
        split=split,
    )
    blocks = [source.block(block) for block in range(len(source.block_sizes))]
    labels = np.concatenate([samples.labels for samples, _ in blocks])
    best = area_under_curve(
        torch.from_numpy(np.concatenate([chances for _, chances in blocks])), torch.from_numpy(labels)
    )
    dense = np.concatenate([samples.dense for samples, _ in blocks])
    ids = [np.concatenate([samples.ids[f].values for samples, _ in blocks]) for f in range(NUM_FEATURES)]
    columns = {"clicked": labels} | {f"d{number}": dense[:, number] for number in range(NUM_DENSE)}
    columns |= {f"f{number}": values for number, values in enumerate(ids)}
    assert best is not None
    return pa.table(columns | {"ts": start + 1e-3 * np.arange(num)}), best


def add_file(folder: Path, name: str, rows: pa.Table) -> Path:
    """Add a complete file to a followed folder."""
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.parquet"
    pq.write_table(rows, folder / f"_{path.name}")
    return (folder / f"_{path.name}").rename(path)


def start_meshrec(*words: Any) -> "subprocess.Popen[str]":
    """Start a command with one thread per rank."""
    paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    variables = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [sys.executable, "-W", "ignore", "-m", "meshrec", *map(str, words)]
    return subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def meshrec(*words: Any) -> None:
    """Run a command, which must succeed."""
    with start_meshrec(*words) as process:
        output, _ = process.communicate()
    if process.returncode:
        raise RuntimeError(f"meshrec {' '.join(map(str, words))}: {output[-3000:]}")


def check_trained(run: Path, num: int) -> None:
    """Check that a run has trained this number of events.

    Raises:
        AssertionError: it has trained another number.
    """
    latest = CheckpointManager(run / "checkpoints").latest()
    assert latest is not None, f"{run} has no checkpoint"
    trained = read_manifest(latest).values["progress"]["content"]["num_samples"]
    assert trained == num, f"{run.name} trained {trained} events of {num}"


def last_line(run: Path) -> dict[str, Any]:
    """Return the last metrics line about training."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return next(line for line in reversed(lines) if line["kind"] == "train")  # type: ignore[no-any-return]


def _throughput(sizes: Sizes, folder: Path) -> tuple[dict[str, float], list[Bar]]:
    """Measure following a folder, over training one epoch on the files in it."""
    events, runs = folder / "events", folder / "runs"
    num = sizes.steps * BATCH
    rows, _ = clicks(num, split=0, truth=0)
    for number in range(10):
        add_file(events, str(number), rows.slice(number * num // 10, num // 10))
    arms = {
        "follow": ("follow", _RECIPE, events, "--time", "ts", "--stop-when-idle", "0.2"),
        "train": ("train", _RECIPE, "--data.train", events),
    }
    figures, bars = {}, []
    for ranks in (1, 2):
        rates: dict[str, list[float]] = {}
        for number in range(sizes.rounds):
            for arm in arms if number % 2 else reversed(arms):
                name = f"{arm}-{ranks}-{number}"
                options = ("--nproc", ranks, "--track", _CLOCK, "--runs", runs, "--name", name, "--quiet")
                meshrec(*arms[arm], *options)
                check_trained(runs / name, num)
                measured = json.loads((runs / name / "clock.json").read_text())
                for unit in ("wall", "cpu"):
                    rates.setdefault(f"{arm} {unit}", []).append(measured["samples"] / measured[unit])
            assert last_line(runs / f"follow-{ranks}-{number}")["samples@day"] == num
        for unit, word in {"wall": "second", "cpu": "CPU second of rank 0"}.items():
            pairs = zip(rates[f"follow {unit}"], rates[f"train {unit}"], strict=True)
            ratio = statistics.median(follow / train for follow, train in pairs)
            bars.append(Bar(f"follow over train, samples per {word}, ranks {ranks}", ratio, 0.8))
            for arm in arms:
                figures[f"{arm}, samples per {word}, ranks {ranks}"] = statistics.median(
                    rates[f"{arm} {unit}"]
                )
    return figures, bars


def _freshness(sizes: Sizes, folder: Path) -> tuple[dict[str, float], list[Bar]]:
    """Measure the seconds from an event to a server with its weights, at a steady rate, on two ranks."""
    events, runs, package = folder / "events", folder / "runs", folder / "package"
    first = 20 * BATCH
    add_file(events, "0", clicks(first, split=0, truth=0)[0])
    named = ("--runs", runs, "--name", "live", "--quiet")
    intervals = ("--time", "ts", "--delta-seconds", 1, "--stop-when-idle", 0.2)
    waiting = ("--stop-when-idle", "none")
    # An export reads the data of the recipe.
    meshrec("follow", _RECIPE, events, "--data.train", events, *intervals, *named)
    # The package has the position of its run among the deltas.
    meshrec("export", runs / "live", "--out", package, "--no-compile")
    with (
        serve.serving(package, "--deltas", f"model={runs / 'live'}") as server,
        _interrupted(start_meshrec("follow", "--resume", "--nproc", 2, *waiting, *named)) as follow,
    ):
        now = time.time()
        add_file(events, "1", clicks(BATCH, split=1, truth=0, start=now)[0])
        _served_until(server, now, lambda: follow.poll() is None)
        command = [sys.executable, "-m", __name__, str(events), str(sizes.rate), str(sizes.seconds)]
        with subprocess.Popen(command, cwd=_ROOT) as writer:
            trace = _served_until(server, np.inf, lambda: writer.poll() is None)
        assert writer.returncode == 0
        written = [pq.read_table(path, columns=["ts"])["ts"].to_numpy() for path in sorted(events.glob("2*"))]
        times = np.concatenate(written)
        # A step waits for a complete batch.
        times = times[: len(times) // BATCH * BATCH]
        trace += _served_until(server, times[-1], lambda: follow.poll() is None)
        follow.send_signal(signal.SIGINT)
        output, _ = follow.communicate(timeout=_WAIT_SECONDS)
        state = json.loads((runs / "live" / "summary.json").read_text())["state"]
        assert state == "stopped", output
        check_trained(runs / "live", first + BATCH + len(times))
        _check_scores(server, runs / "live", folder / "last")
    served, newest = np.array(trace).T
    seconds = served[np.searchsorted(newest, times - 1e-6)] - times
    figures = {f"event to served score, p{p}, s": float(np.percentile(seconds, p)) for p in (50, 99)}
    figures["events per second"] = len(times) / (times[-1] - times[0])
    name = f"event to served score, p99, {sizes.rate:,} events/s"
    return figures, [Bar(name, figures["event to served score, p99, s"], 10.0, " s", at_most=True)]


@contextlib.contextmanager
def _interrupted(process: "subprocess.Popen[str]") -> Iterator["subprocess.Popen[str]"]:
    """End a process that still runs."""
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()


def _served_until(
    server: serve.Running, event_time: float, goes_on: Callable[[], bool]
) -> list[tuple[float, float]]:
    """Poll the event time of a server's weights until it is reached; return moments and event times.

    Args:
        server: the server.
        event_time: event time to wait for, Unix time in seconds; infinite: wait while ``goes_on``.
        goes_on: whether a process that must run still does.
    """
    trace: list[tuple[float, float]] = []
    deadline = time.monotonic() + _WAIT_SECONDS
    while goes_on():
        with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        if match := re.search(r"^meshrec_event_time_seconds\{[^}]*\} (\S+)", page, re.MULTILINE):
            trace.append((time.time(), float(match[1])))
            if trace[-1][1] >= event_time - 1e-6:
                return trace
        if time.monotonic() > deadline and np.isfinite(event_time):
            raise AssertionError(f"not served after {_WAIT_SECONDS} s: {event_time}; {server.state()}")
        time.sleep(0.02)
    assert np.isinf(event_time), "meshrec follow has ended"
    return trace


def _check_scores(server: serve.Running, run: Path, package: Path) -> None:
    """Check that a server with all deltas has the scores of the run's last checkpoint."""
    meshrec("export", run, "--last", "--out", package, "--no-compile")
    predictor = Predictor(package)
    shape = serve.TINY._replace(num_rows=NUM_VALUES, num_dense=NUM_DENSE)
    serve.verify(server, predictor, serve.inputs_of(shape, predictor.features, 8))


def _drift(sizes: Sizes, folder: Path) -> tuple[dict[str, float], list[Bar]]:
    """Measure the AUC in a window after a change of all click probabilities, test-then-train.

    The bar is for the mean of several changes, because their results differ by a third of it.
    """
    figures: dict[str, float] = {}
    gaps = []
    for number in range(sizes.drifts):
        gap, aucs = _drift_between(sizes, folder / str(number), 10 * number)
        gaps.append(gap)
        figures |= aucs if number == 0 else {}
    figures |= {f"best AUC minus that of follow, drift {number}": gap for number, gap in enumerate(gaps)}
    name = f"best AUC minus that of follow, {BATCH * sizes.after:,} events after a drift, mean of {len(gaps)}"
    return figures, [Bar(name, statistics.mean(gaps), 0.01, "", at_most=True)]


def _drift_between(sizes: Sizes, folder: Path, truth: int) -> tuple[float, dict[str, float]]:
    """Return the gap to the best AUC after a change from a truth to the next one, and the AUCs.

    Two models that do not follow stand beside the first change: one trained on the events before it, and one
    retrained on all events since, four times each, which is the most that retraining once a day could have.
    """
    events, runs = folder / "events", folder / "runs"
    folder.mkdir()
    num_before, num_after, num = (BATCH * steps for steps in (sizes.before, sizes.after, sizes.window))
    before = add_file(events, "0", clicks(num_before, split=0, truth=truth)[0])
    start = _START + num_before / 1e3
    since = add_file(events, "1", clicks(num_after, split=1, truth=truth + 1, start=start)[0])
    late = _START + (num_before + num_after) / 1e3 + _GAP_SECONDS
    rows, best = clicks(num, split=2, truth=truth + 1, start=late)
    window = add_file(events, "2", rows)
    options = ("--runs", runs, "--quiet")
    meshrec("follow", _WIDE, events, "--time", "ts", "--stop-when-idle", 0.2, "--name", "live", *options)
    check_trained(runs / "live", num_before + num_after + num)
    line = last_line(runs / "live")
    assert line["samples@hour"] == num
    figures = {"best AUC": best, "AUC, follow": line["auc@hour"]}
    for name, trained, epochs in (("before", before, 1), ("since", since, 4)) if truth == 0 else ():
        words = ("--data.train", trained, "--data.test", window, "--schedule.decay", "linear")
        meshrec("train", _WIDE, *words, "--training.epochs", epochs, "--name", name, *options)
        summary = json.loads((runs / name / "summary.json").read_text())
        figures[f"AUC, trained on the events {name} the drift"] = summary["test"]["auc"]
    return best - line["auc@hour"], figures


def write_live(folder: Path, rate: int, seconds: int) -> None:
    """Add files of events to a folder at a steady rate; the events of a file are those since the last one."""
    num = rate // _FILES_PER_SECOND
    rows, _ = clicks(8 * num, split=2, truth=0)
    start = time.time()
    for number in range(seconds * _FILES_PER_SECOND):
        due = start + (number + 1) / _FILES_PER_SECOND
        time.sleep(max(0.0, due - time.time()))
        times = due - np.arange(num)[::-1] / rate
        part = rows.slice(number % 8 * num, num)
        add_file(folder, f"2-{number:06d}", part.set_column(len(part.schema) - 1, "ts", pa.array(times)))


if __name__ == "__main__":
    write_live(Path(sys.argv[1]), *map(int, sys.argv[2:]))
