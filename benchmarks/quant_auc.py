"""Cost of quantisation: AUC on the MovieLens demo and on synthetic clicks, and error of rows."""

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.harness import Bar, Result, table

RECIPES = {
    "movielens_dlrm": ["--training.epochs", "1"],
    "synthetic_clicks": ["--data.num-samples", "20000", "--data.num-validation", "5000"],
}
"""Options that shorten a run for a quick try."""
WAYS = {"int8": ("INT8", "minmax"), "int4": ("INT4", "minmax"), "int4, search": ("INT4", "search")}


def squared_errors(model: nn.Module, small: nn.Module) -> float:
    """Return the mean squared error over the rows of all tables."""
    from meshrec.modules.embedding_modules import TableCollection
    from meshrec.ops import nbit

    total = 0.0
    for one, other in zip(model.modules(), small.modules(), strict=False):
        if isinstance(one, TableCollection) and isinstance(other, TableCollection):
            pairs = zip(one.tables().values(), other.tables().values(), strict=True)
            for (_, numbers), (config, rows) in pairs:
                found = nbit.dequantize(rows, config.data_type.bits, config.embedding_dim)
                total += float((found - numbers.detach()).double().square().sum())
    return total


def measured(recipe: str, folder: str, *, tiny: bool) -> dict[str, Any]:
    """Train, quantise and evaluate on the test data."""
    from meshrec import DataType
    from meshrec.cli.train import main as train
    from meshrec.quant import quantize
    from meshrec.runs.quantize import trained_model
    from meshrec.train import join
    from meshrec.train.evaluation import evaluate
    from meshrec.train.run_folder import find_run

    more = RECIPES[recipe] if tiny else []
    with contextlib.redirect_stdout(io.StringIO()) as told:
        failed = train([recipe, "--runs", folder, "--name", recipe, "--quiet", *more])
    if failed:
        raise RuntimeError(f"{recipe} was not trained: {told.getvalue()}")
    model, _, dataset, _ = trained_model(find_run(recipe, Path(folder)))
    ranks, reader = join("cpu"), dataset.test or dataset.validation
    assert reader is not None
    auc = evaluate(model, reader, ranks)["auc"]
    found: dict[str, Any] = {"auc": auc}
    for name, (data_type, rounding) in WAYS.items():
        made = quantize(model, DataType[data_type], output_dtype=DataType.FP32, rounding=rounding)  # type: ignore[arg-type]
        moved = evaluate(made, reader, ranks)["auc"] - auc
        found[name] = {"moved": moved, "squared_error": squared_errors(model, made)}
    return found


def bars_of(recipe: str, found: dict[str, Any]) -> list[Bar]:
    search, minmax = found["int4, search"], found["int4"]
    return [
        Bar(
            name=f"{recipe}, {name}, AUC moves by",
            figure=abs(found[name]["moved"]) / asked,
            asked=1.0,
            unit=f" of {asked:g}",
            at_most=True,
        )
        for name, asked in (("int8", 1e-4), ("int4, search", 1e-3))
    ] + [
        Bar(
            name=f"{recipe}, int4, squared error of rows, search over min-max",
            figure=search["squared_error"] / minmax["squared_error"],
            asked=0.9,
            at_most=True,
        )
    ]


def run(*, tiny: bool = False) -> Result:
    """Run each recipe once with its own seed; ``tiny``: short runs."""
    torch.manual_seed(0)
    figures, bars = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for recipe in RECIPES:
            found = figures[recipe] = measured(recipe, folder, tiny=tiny)
            rows = [[name, f"{found[name]['moved']:+.1e}"] for name in WAYS]
            print(table([f"{recipe}: AUC {found['auc']:.6f}", "moved by"], rows), end="\n\n", flush=True)
            bars += bars_of(recipe, found)
    return Result(figures, bars)
