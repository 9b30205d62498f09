"""Accuracy under wire formats: AUC and normalised entropy of trainings over two ranks, seed by seed."""

import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Bar, Result, table

FORMATS = (
    *("fp32", "fp16", "bf16", "int8/bf16", "int8"),
    *("int8+stochastic/int8+stochastic+feedback", "int4/int8"),
)
SEEDS = (1, 2, 3, 4, 5)
RECIPES: dict[str, list[str]] = {
    "movielens_dlrm": [],
    "synthetic_clicks": ["--data.num-samples", "100000", "--data.num-validation", "20000"],
}
TINY = ["--training.max-steps", "5"]
_SPLIT = ["--placement.sharding-types", "table_wise", "row_wise", "column_wise"]
"""Tables that every rank holds would not travel."""


def trained(folder: Path, recipe: str, wire: str, seed: int, *, tiny: bool) -> dict[str, float]:
    """Train over two ranks; return the figures on test data, or on validation data where there is none."""
    name = f"{recipe}-{wire.replace('/', '_')}-{seed}"
    if not (folder / name / "summary.json").exists():
        command = [sys.executable, "-m", "meshrec", "train", recipe, "--nproc", "2", "--runs", str(folder)]
        command += ["--name", name, "--quiet", "--placement.wire", wire, "--training.seed", str(seed)]
        command += [*_SPLIT, *RECIPES[recipe], *(TINY if tiny else [])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{name} was not trained: {done.stderr[-2000:]}")
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    found = [line for line in lines if line["kind"] == "test"] or [
        line for line in lines if line["kind"] == "validation"
    ]
    last = found[-1] if found[-1]["kind"] == "test" else max(found, key=lambda line: line["auc"])
    return {"auc": last["auc"], "entropy": last["normalized_entropy"]}


def run(*, tiny: bool = False, folder: Path | None = None) -> Result:
    """Train every recipe with every format and seed; ``folder`` has runs that are done already."""
    with tempfile.TemporaryDirectory() as made:
        return _run(Path(made) if folder is None else folder, tiny=tiny)


def _run(folder: Path, *, tiny: bool) -> Result:
    figures: dict[str, Any] = {}
    bars = []
    for recipe in RECIPES:
        by_format = {
            wire: [trained(folder, recipe, wire, seed, tiny=tiny) for seed in SEEDS[: 1 if tiny else None]]
            for wire in FORMATS
        }
        figures[recipe] = by_format
        rows = []
        for wire, found in by_format.items():
            pairs = list(zip(found, by_format["fp32"], strict=True))
            lost = [exact["auc"] - own["auc"] for own, exact in pairs]
            more = [own["entropy"] - exact["entropy"] for own, exact in pairs]
            aucs = [own["auc"] for own in found]
            spread = statistics.stdev(aucs) if len(aucs) > 1 else 0.0
            means = statistics.mean(aucs), spread, statistics.mean(lost), statistics.mean(more)
            auc, spread_text, loss, entropy = (f"{mean:+.5f}" for mean in means)
            by_seed = f"{min(lost):+.5f} to {max(lost):+.5f}"
            rows.append([wire, auc.lstrip("+"), spread_text.lstrip("+"), loss, by_seed, entropy])
            if wire == "int8/bf16":
                text = f"{recipe}, int8/bf16, AUC lost, mean of {len(found)} seeds, over 0.0005"
                bars.append(Bar(text, abs(statistics.mean(lost)) / 5e-4, 1.0, at_most=True))
        header = [recipe, "AUC", "spread of seeds", "lost", "by seed", "entropy more"]
        print(table(header, rows), end="\n\n", flush=True)
    return Result(figures, bars)
