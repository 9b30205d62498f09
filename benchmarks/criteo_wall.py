"""Wall-clock time from a Criteo TSV file to a trained model, beside the training within it.

The input is 200,000 generated lines in Criteo's format; the run is one epoch of the step benchmark's DLRM on
2 ranks. The difference is start-up, counting lines, planning, read-ahead, saving and report pages. The
samples that were trained on are compared with those that were written before the times count.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Bar, Effort, Result, table

_RECIPE = """
from meshrec.train import Criteo, DenseOptimizer, DLRMConfig, Recipe, Training

def recipe():
    return Recipe(
        name="criteo",
        data=Criteo(train=({path!r},), num_embeddings={rows}),
        model=DLRMConfig(embedding_dim={dim}, bottom={bottom}, top={top}),
        dense=DenseOptimizer(kind="adagrad", lr=0.02),
        training=Training(batch_size=2048, epochs=1),
    )
"""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the file and of the model."""

    lines: int = 200_000
    rows: int = 100_000
    dim: int = 64
    bottom: tuple[int, ...] = (512, 256)
    top: tuple[int, ...] = (512, 512, 256)


TINY = Shape(lines=3000, rows=100, dim=8, bottom=(8,), top=(8,))


def run(effort: Effort, *, tiny: bool = False) -> Result:
    """Write, train, verify and compare the best round with the bar."""
    shape = TINY if tiny else Shape()
    found = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder / "day_0", shape.lines)
        options = {key: getattr(shape, key) for key in ("rows", "dim", "bottom", "top")}
        (folder / "criteo.py").write_text(_RECIPE.format(path=str(folder / "day_0"), **options))
        for number in range(1 if tiny else min(effort.rounds, 3)):
            found.append(train(folder, f"round-{number}", shape.lines, num_ranks=1 if tiny else 2))
    rows = [[f"{wall:.1f}", f"{training:.1f}", f"{wall / training:.2f}"] for wall, training in found]
    print(table(["the command, s", "its training, s", "ratio"], rows))
    ratio = statistics.median(wall / training for wall, training in found)
    bar = Bar(name="a Criteo TSV: the command against its training", figure=ratio, asked=2.0, at_most=True)
    return Result({"wall": [each[0] for each in found], "training": [each[1] for each in found]}, [bar])


def train(folder: Path, name: str, lines: int, *, num_ranks: int = 2) -> tuple[float, float]:
    """Return the seconds of the command, and of the training within it.

    Raises:
        AssertionError: the run trained on other samples than were written.
    """
    command = [sys.executable, "-m", "meshrec", "train", f"{folder / 'criteo.py'}:recipe", "--quiet"]
    start = time.perf_counter()
    subprocess.run(
        [*command, "--nproc", str(num_ranks), "--name", name, "--runs", str(folder / "runs")],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    wall = time.perf_counter() - start
    summary: dict[str, Any] = json.loads((folder / "runs" / name / "summary.json").read_text())
    if summary["state"] != "finished" or summary["samples"] != lines or summary["skipped"]:
        raise AssertionError(f"of {lines} lines {summary['samples']} were trained on: {summary['state']}")
    return wall, summary["train_seconds"]


def write(path: Path, lines: int, seed: int = 0) -> None:
    """Write lines in Criteo's format: counts and categories, some of them missing, and a click in every
    fourth line.
    """
    rng = np.random.default_rng(seed)
    counts = rng.geometric(0.02, (lines, 13)) - 2
    names = (rng.zipf(1.2, (lines, 26)) % 1_000_000 * 2_654_435_761) & 0xFFFFFFFF
    no_count, no_name = rng.random((lines, 13)) < 0.2, rng.random((lines, 26)) < 0.05
    clicks = rng.random(lines) < 0.25
    with path.open("w") as file:
        for row in range(lines):
            fields = ["1" if clicks[row] else "0"]
            fields += [
                "" if gone else str(each) for each, gone in zip(counts[row], no_count[row], strict=True)
            ]
            fields += [
                "" if gone else f"{each:08x}" for each, gone in zip(names[row], no_name[row], strict=True)
            ]
            file.write("\t".join(fields) + "\n")
