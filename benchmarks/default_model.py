"""The recipe that ``meshrec inspect`` writes, unedited, beside logistic regression and LightGBM.

Twelve tables from packages, three seeds each. A seed draws the split, or only the weights where rows are
split by time. All three models learn from the same training rows and choose on the same validation rows: the
recipe its weights, the regression its penalty, LightGBM its number of trees. The test rows are read once.

Both commands and LightGBM run in processes of their own, with one thread, whose CPU seconds are compared.
"""

import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.default_rivals import logistic, plain_fields
from benchmarks.default_tables import LABEL, REPORTED, TUNED, Table, write
from benchmarks.harness import Bar, Result, selected, table

_BATCH = 8192
_SEEDS = 3
_HAS_LIGHTGBM = importlib.util.find_spec("lightgbm") is not None


def cpu_seconds(*command: str) -> tuple[float, str]:
    """Run a Python module with one thread; return the CPU seconds of its process, and its output."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *command], env=one_thread, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stdout[-1000:]}{done.stderr[-3000:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def split_rows(recipe: Path, seed: int) -> dict[str, Any]:
    """Return the row numbers of each part of a recipe's data."""
    from dataclasses import replace

    from meshrec.train import resolve

    dataset = replace(resolve(f"{recipe}:recipe").data, seed=seed).load()
    parts = {"train": dataset.train, "validation": dataset.validation, "test": dataset.test}
    return {
        name: np.sort(np.concatenate([batch.rows.numpy() for batch in reader.batches(_BATCH)]))
        for name, reader in parts.items()
    }


def compared(data: Path, asked: Table, seed: int, folder: Path) -> dict[str, float]:
    """Return test AUCs and CPU seconds of the default recipe and its rivals on one table.

    Args:
        data: the table.
        asked: names the column that orders its rows, if there is one.
        seed: draws the split and the initial weights.
        folder: folder for recipe, run and scores.
    """
    import pandas
    from sklearn.metrics import roc_auc_score

    recipe, runs = folder / "recipe.py", folder / "runs"
    by_time = [] if asked.time is None else ["--time", asked.time]
    inspect, _ = cpu_seconds(
        "meshrec", "inspect", str(data), "--label", LABEL, "--out", str(recipe), "--force", *by_time
    )
    seeds = ["--data.seed", str(seed), "--training.seed", str(seed)]
    run = f"{data.stem}-{seed}"
    train, _ = cpu_seconds(
        *["meshrec", "train", f"{recipe}:recipe", "--quiet", "--runs", str(runs), "--name", run, *seeds]
    )
    summary = json.loads((runs / run / "summary.json").read_text())
    figures = {"ours": summary["test"]["auc"], "inspect": inspect, "train": train}
    frame, rows = pandas.read_parquet(data), split_rows(recipe, seed)
    labels = frame[LABEL].to_numpy()
    fields = plain_fields(frame.drop(columns=[LABEL, *by_time[1:]]))
    figures["logistic"] = roc_auc_score(labels[rows["test"]], logistic(fields, labels, rows))
    if _HAS_LIGHTGBM:
        parts, scores = folder / "rows.npz", folder / "scores.npy"
        np.savez(parts, **rows, time=np.array(asked.time or ""))
        whole, told = cpu_seconds("benchmarks.default_rivals", str(data), str(parts), str(seed), str(scores))
        figures["lightgbm"] = roc_auc_score(labels[rows["test"]], np.load(scores))
        figures |= {"lightgbm whole": whole, "lightgbm fit": json.loads(told)["fit"]}
    figures["gap"] = figures["ours"] - max(figures["logistic"], figures.get("lightgbm", 0.0))
    return {name: float(value) for name, value in figures.items()}


def run(*, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Run the benchmark. Without LightGBM, logistic regression is the only rival, and one line says so.

    Args:
        tiny: whether to try one table and one seed only.
        only: names of tables, also of those on which the recipe's options were chosen; by default the
            others.
    """
    if not _HAS_LIGHTGBM:
        print("LightGBM is not installed: the rival is logistic regression alone")
    names = ["spam"] if tiny else selected(list(TUNED | REPORTED), only) if only else list(REPORTED)
    figures: dict[str, Any] = {}
    rows, gaps, ratios, fit_ratios = [], [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            data, asked = write(name, Path(folder)), (TUNED | REPORTED)[name]
            by_seed = [compared(data, asked, seed, Path(folder)) for seed in range(1 if tiny else _SEEDS)]
            figures[name] = by_seed
            means = {key: float(np.mean([seed[key] for seed in by_seed])) for key in by_seed[0]}
            gaps.append(means["gap"])
            shown = [f"{means[key]:.4f}" if key in means else "-" for key in ("ours", "logistic", "lightgbm")]
            cpu = ["-", "-", "-"]
            if _HAS_LIGHTGBM:
                ours = means["inspect"] + means["train"]
                ratios.append(ours / means["lightgbm whole"])
                fit_ratios.append(ours / means["lightgbm fit"])
                cpu = [f"{ours:.1f}", f"{ratios[-1]:.1f}x", f"{fit_ratios[-1]:.1f}x"]
            rows.append([name, *shown, f"{means['gap']:+.4f}", *cpu])
            print(*rows[-1], flush=True)
    titles = ["test AUC", "ours", "logistic regression", "LightGBM", "gap"]
    titles += ["CPU seconds", "over LightGBM's process", "over its fit"]
    print(table(titles, rows), end="\n\n", flush=True)
    bars = [
        Bar("mean gap of the test AUC to the better rival", float(np.mean(gaps)), 0.0, unit=""),
        Bar("worst table's gap", min(gaps), -0.006, unit=""),
    ]
    if ratios:
        bars.append(
            Bar("median CPU seconds over LightGBM's process", statistics.median(ratios), 8.0, at_most=True)
        )
    return Result(figures, bars)
