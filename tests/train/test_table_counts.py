"""The lines of metrics about hashed tables, and their charts in the report."""

import json

import pytest

from meshrec.data import drifting_clicks
from meshrec.optim import RowWiseAdagrad
from meshrec.runs.report import report_data
from meshrec.train import (
    DenseOptimizer,
    DLRMConfig,
    Recipe,
    RunFolder,
    SyntheticClicks,
    Trainer,
    Training,
    join,
)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = RunFolder(tmp_path_factory.mktemp("runs") / "run")
    folder.path.mkdir()
    dataset = drifting_clicks(
        num_samples=3000, num_test=500, num_values=60, lifetime=1000, max_rows=100, num_features=1
    )
    recipe = Recipe(
        name="drift",
        data=SyntheticClicks(),
        model=DLRMConfig(embedding_dim=4, bottom=(4,), top=(4,)),
        tables=RowWiseAdagrad(lr=0.1),
        dense=DenseOptimizer(lr=0.01),
        training=Training(batch_size=100, epochs=1, log_every=10),
    )
    trainer = Trainer(recipe, dataset, join("cpu"))
    found = []
    trainer._observer = lambda event: found.append(getattr(event, "line", None))
    trainer.run()
    for each in found:
        if isinstance(each, dict):
            folder.append_metrics(each)
    return folder


def test_lines_tell_who_lives_comes_and_goes(lines):
    train = [json.loads(line) for line in lines.path.joinpath("metrics.jsonl").read_text().splitlines()]
    train = [line for line in train if line["kind"] == "train"]
    assert len(train) == 3
    live = [line["hashed/f0/live"] for line in train]
    assert 90 < live[-1] <= 100  # full: 60 items, each replaced three times
    new, evicted = (sum(line[f"hashed/f0/{what}"] for line in train) for what in ("new", "evicted"))
    assert new - evicted == live[-1]
    assert evicted > 20
    assert all(line["hashed/f0/refused"] == 0 for line in train)
    assert all(0.5 < line["hashed/f0/hit_rate"] < 1 for line in train)


def test_the_report_has_them(lines):
    shown = report_data(lines)["metrics"]
    live = [line["hashed/f0/live"] for line in shown if line["kind"] == "train"]
    assert len(live) == 3
    assert 90 < live[-1] <= 100
