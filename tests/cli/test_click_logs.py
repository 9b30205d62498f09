"""From a log of clicks of one's own to scores with DIN, by the commands."""

import datetime
import json

import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli.evaluate import main as evaluate
from meshrec.cli.inspect import main as inspect
from meshrec.cli.predict import main as predict
from meshrec.cli.train import main as train
from meshrec.export import Predictor
from meshrec.metrics import binary_metrics
from meshrec.runs.export import export_run
from meshrec.runs.saved_recipe import load_recipe
from meshrec.train import RunFolder
from tests.export.conftest import torchs_own_warnings

NUM_USERS, NUM_ITEMS, NUM_GROUPS, LENGTH = 300, 40, 5, 30
COLUMNS = ["--user", "visitor", "--item", "sku", "--time", "shown at", "--label", "bought"]


def draw_clicks(seed=0):
    """Draw a log in which users click items of the groups of their last five clicks.

    Returns the log and the chance of each click.
    """
    rng = np.random.default_rng(seed)
    group_I = rng.permutation(NUM_ITEMS) % NUM_GROUPS
    every, last = np.arange(NUM_USERS), np.full((NUM_USERS, 5), -1)
    rows = []
    for step in range(LENGTH):
        item = rng.integers(0, NUM_ITEMS, NUM_USERS)
        same = ((last >= 0) & (group_I[last] == group_I[item][:, None])).sum(1)
        chance = 1 / (1 + np.exp(2.5 - 6 * same / np.maximum((last >= 0).sum(1), 1)))
        clicked = rng.random(NUM_USERS) < chance
        rows.append((every, item, 3600 * step + rng.integers(0, 3600, NUM_USERS), clicked, chance))
        last[clicked] = np.column_stack([last[:, 1:], item])[clicked]
    user, item, time, clicked, chance = (np.concatenate(each) for each in zip(*rows, strict=True))
    start = datetime.datetime(2024, 5, 1, tzinfo=datetime.timezone.utc)
    moments = [start + datetime.timedelta(seconds=int(each)) for each in time]
    table = pa.table(
        {
            "sku": [f"s{each}" for each in item],
            "bought": clicked.astype(np.int64),
            "shown at": [each.strftime("%Y-%m-%d %H:%M:%S") for each in moments],
            "visitor": [f"v{each}" for each in user],
        }
    )
    return table, chance, time


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The folder of a run of the recipe that `inspect` wrote, unedited."""
    folder = tmp_path_factory.mktemp("clicks")
    csv.write_csv(draw_clicks()[0], folder / "log.csv")
    assert inspect([str(folder / "log.csv"), *COLUMNS, "--out", str(folder / "recipe.py")]) == 0
    options = ["--training.epochs", "6", "--baselines", "--quiet"]
    assert train([f"{folder}/recipe.py:recipe", "--runs", str(folder), "--name", "r", *options]) == 0
    return folder


def auc(scores, labels):
    return binary_metrics(torch.as_tensor(scores).logit(), torch.as_tensor(labels).float())["auc"]


def test_the_unedited_recipe_comes_near_the_best(runs):
    table, chance, time = draw_clicks()
    late = time > np.quantile(time, 0.9)
    best = auc(chance[late], table["bought"].to_numpy()[late])
    summary = RunFolder(runs / "r").read_json("summary.json")
    assert summary["test"]["auc"] - 0.5 >= 0.8 * (best - 0.5)
    assert summary["test"]["auc"] > max(each["auc"] for each in summary["baselines_test"].values())


def test_other_logs_are_evaluated_and_scored(runs):
    table, chance, _ = draw_clicks(seed=1)  # other users and clicks, and groups that mean nothing
    pq.write_table(table.slice(0, 3000), runs / "other.parquet")
    out = runs / "metrics.json"
    assert (
        evaluate(["r", "--runs", str(runs), "--data", str(runs / "other.parquet"), "--json", str(out)]) == 0
    )
    found = json.loads(out.read_text())
    assert found["samples"] == 3000
    arguments = ["--data", str(runs / "log.csv"), "--out", str(runs / "scores.parquet"), "--force"]
    assert predict(["r", "--runs", str(runs), *arguments]) == 0
    scores = pq.read_table(runs / "scores.parquet")
    assert scores.num_rows == NUM_USERS * LENGTH
    assert scores.column_names == ["visitor", "sku", "score"]
    assert predict(["r", "--runs", str(runs), *arguments[:2], "--out", str(runs / "scores.csv")]) == 0
    assert csv.read_csv(runs / "scores.csv")["sku"].to_pylist() == scores["sku"].to_pylist()
    table, chance, _ = draw_clicks()
    assert np.corrcoef(scores["score"].to_numpy(), chance)[0, 1] > 0.7


def test_a_package_scores_users_items_and_histories(runs, tmp_path):
    arguments = ["--data", str(runs / "log.csv"), "--out", str(tmp_path / "scores.parquet")]
    assert predict(["r", "--runs", str(runs), *arguments]) == 0
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    run = RunFolder(runs / "r")
    with torchs_own_warnings():
        predictor = Predictor(export_run(run, tmp_path / "p", compile=False))
    assert {*predictor.raw.columns} == {"visitor", "sku", "history"}
    encoded = predictor.raw.encode(load_recipe(run).data.table().select(list(predictor.raw.columns)))
    values, lengths = (
        {name: torch.from_numpy(own) for name, own in each.items()}
        for each in (encoded.values, encoded.lengths)
    )
    found = predictor(torch.from_numpy(encoded.dense), values, lengths)
    assert np.allclose(found.numpy(), scores, atol=1e-5)


def test_options_that_do_not_fit(tmp_path):
    for more, message in (
        (
            ["--label", "bought", "--user", "visitor"],
            "with --user: a log of clicks also has --user",
        ),
        ([*COLUMNS, "--model", "sasrec"], "--label bought with --model: with a label, every row of the log"),
        ([*COLUMNS, "--query", "visitor"], "--query visitor is for other tables"),
    ):
        with pytest.raises(ValueError, match=message):
            inspect(["log.csv", *more, "--out", str(tmp_path / "recipe.py")])
