"""The fit on all rows, `meshrec train --final all`."""

import json
import os
import signal
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors import safe_open

from meshrec.checkpoint import export_safetensors, find_checkpoint, load, read_manifest
from meshrec.cli import checkpoint, evaluate, export, quantize
from meshrec.cli.train import main as train
from meshrec.data.features import Features, Label, Number, Vocabulary
from meshrec.export import Predictor
from meshrec.models import SampledSoftmax
from meshrec.models.repeats import RepeatScores
from meshrec.optim import Adam
from meshrec.runs.fitting import features_of
from meshrec.runs.job import Job
from meshrec.runs.removing import remove_run
from meshrec.runs.saved_recipe import load_recipe
from meshrec.runs.scoring import load_scorer
from meshrec.runs.worker import run_rank
from meshrec.train import (
    DenseOptimizer,
    Frame,
    Log,
    NextItem,
    Parquet,
    Recipe,
    SASRecConfig,
    Training,
    WideDeepConfig,
    join,
)
from meshrec.train.observers import Progressed
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder, finished_refit
from tests.export.conftest import torchs_own_warnings
from tests.train import raw_ids
from tests.train.raw_ids import visits, write_visits

NUM = 1000


def quiet(_):
    return lambda event: None


def visits_recipe(folder, **training) -> Recipe:
    write_visits(folder, NUM)
    recipe = raw_ids.recipe()
    data = replace(recipe.data, train=(str(folder / "all.parquet"),))
    options = {"epochs": 2, "evaluate_every": 4} | training
    return replace(recipe, data=data, training=replace(recipe.training, **options))


def fitted(recipe, runs, **options):
    options = {"final": "all", "name": "r"} | options
    summary = run_rank(Job(recipe=recipe, runs=runs, device="cpu", source="recipe.yaml", **options), quiet)
    return summary, RunFolder(runs / "r")


@pytest.fixture(scope="module")
def fitted_twice(tmp_path_factory):
    """Return summary and folder of a run with a second fit, beside its data. Tests do not change it."""
    folder = tmp_path_factory.mktemp("fitted-twice")
    return fitted(visits_recipe(folder), folder)


def test_the_second_fit_makes_as_many_passes_and_the_figures_stay_those_of_the_first(tmp_path, fitted_twice):
    first, _ = fitted(visits_recipe(tmp_path), tmp_path / "alone", final=None)
    summary, run = fitted_twice
    for name in ("validation", "test", "weights_step", "step"):
        assert summary[name] == first[name], name
    assert first["held_back"] == summary["held_back"] == 200
    assert "final" not in first
    about, final = summary["final"], finished_refit(run)
    assert (about["rows"], about["first_rows"]) == (NUM, 800)
    assert about["step"] == round(summary["weights_step"] * NUM / 800)
    assert f"test AUC {summary['test']['auc']:.4f}" in about["text"]
    assert final.read_json(SUMMARY)["test"] == final.read_json(SUMMARY)["validation"] == {}
    assert run.read_json(SUMMARY) == summary


def test_the_schedule_of_the_second_fit_spans_as_many_passes(tmp_path):
    _, run = fitted(visits_recipe(tmp_path, max_steps=12), tmp_path)
    training = load_recipe(finished_refit(run)).training
    assert (training.max_steps, training.evaluate_every) == (15, None)
    assert training.end_step <= 15


def latest_items(num: int = 400) -> pa.Table:
    """Return rows of which the latest have an item that no earlier row has, and a label that it tells."""
    rng = np.random.default_rng(0)
    item = np.where(np.arange(num) < 0.8 * num, rng.integers(0, 5, num), 7)
    number = rng.normal(size=num)
    clicked = rng.random(num) < 1 / (1 + np.exp(-number - 2 * (item == 7)))
    return pa.table({"clicked": clicked, "item": item, "number": number, "time": np.arange(num)})


def wide(data, **model) -> Recipe:
    features = Features(
        labels=(Label(column="clicked"),), features=(Vocabulary(name="item"), Number(name="number"))
    )
    return Recipe(
        name="wide",
        data=Frame(train=data, features=features, split_by="time", split_column="time"),
        model=WideDeepConfig(fit_wide=True, **model),
        tables=Adam(lr=0.0),
        dense=DenseOptimizer(lr=0.0),
        training=Training(batch_size=40, epochs=2, chance_patience=2, evaluate_every=2),
    )


def in_memory():
    return wide(latest_items())


def test_vocabulary_and_regression_learn_from_all_rows(tmp_path):
    pytest.importorskip("lightgbm")
    recipe = wide(latest_items(), fit_trees=20)
    source = "tests/runs/test_refit.py:in_memory"
    job = Job(recipe=recipe, runs=tmp_path, device="cpu", name="r", source=source, final="all")
    summary = run_rank(job, quiet)
    run = RunFolder(tmp_path / "r")
    final = finished_refit(run)
    assert summary["weights_step"] == summary["final"]["step"] == 0
    known = [features_of(each)["item"].vocabulary.to_pylist() for each in (run, final)]
    assert 7 not in known[0]
    assert 7 in known[1]
    model = final.read_json(CONFIG)["recipe"]["model"]
    assert model["fit_penalty"] > 0
    assert sum(model["fit_tree_counts"]) <= 20
    rows = pa.table({"item": [1, 7], "number": [0.0, 0.0], "time": [0, 0], "clicked": [0, 0]})
    scores = []
    for each in (run, final):
        scorer = load_scorer(each, join("cpu"), rows, labelled=True)
        batch = next(iter(scorer.dataset.train.batches(2)))
        scores.append(scorer.model.eval()(batch.dense, batch.sparse).flatten())
    assert scores[1][1] - scores[1][0] > scores[0][1] - scores[0][0] + 0.2


def weights_of(run) -> dict:
    recipe = load_recipe(run)
    dataset = recipe.data.dataset(features_of(run))
    state = {"model": recipe.model.build(dataset).to_empty(device="cpu")}
    load(find_checkpoint(run.path), state)
    return state["model"].state_dict()


def test_two_ranks_fit_again_as_one(tmp_path, ranks):
    recipe = wide(latest_items())
    recipe = replace(recipe, tables=Adam(lr=1e-2), dense=DenseOptimizer(lr=1e-2))
    pq.write_table(latest_items(), tmp_path / "d.parquet")
    data = Parquet(
        train=(str(tmp_path / "d.parquet"),),
        features=recipe.data.features,
        split_by="time",
        split_column="time",
    )
    recipe = replace(recipe, data=data, model=replace(recipe.model, dropout=0.0, id_dropout=0.0))
    summary, run = fitted(recipe, tmp_path / "one")
    two = ranks(2).run(fitted, recipe, tmp_path / "two")
    assert [each["final"]["step"] for each, _ in two] == [summary["final"]["step"]] * 2
    for name, value in weights_of(finished_refit(run)).items():
        found = weights_of(finished_refit(RunFolder(tmp_path / "two" / "r")))[name]
        torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-4)


def test_an_interrupted_second_fit_goes_on(tmp_path):
    recipe = visits_recipe(tmp_path, epochs=3, evaluate_every=8)
    expected, _ = fitted(recipe, tmp_path / "whole")

    def interrupt(event):
        if isinstance(event, Progressed) and event.task == "the fit on all rows" and event.share >= 0.5:
            os.kill(os.getpid(), signal.SIGTERM)

    stopped, run = fitted(recipe, tmp_path / "parts", on_event=interrupt)
    assert stopped["state"] == "stopped"
    assert finished_refit(run) is None
    resumed = {"folder": run, "resume": True}
    summary, run = fitted(recipe, tmp_path / "parts", **resumed)
    assert summary["state"] == "finished"
    assert summary["final"]["step"] == expected["final"]["step"]
    assert summary["test"] == expected["test"]
    scores = []
    for name in ("whole", "parts"):
        found = load_scorer(
            finished_refit(RunFolder(tmp_path / name / "r")), join("cpu"), visits(50), labelled=True
        )
        batch = next(iter(found.dataset.train.batches(50)))
        scores.append(found.model.eval()(batch.dense, batch.sparse).detach())
    assert torch.equal(*scores)


def test_the_export_proposes_the_second_fit_and_then_takes_it(tmp_path, capsys):
    write_visits(tmp_path, NUM)
    source = ["tests/train/raw_ids.py:recipe", "--data.train", str(tmp_path)]
    runs = ["--runs", str(tmp_path)]
    assert train([*source, *runs, "--name", "r", "--quiet"]) == 0
    assert f"meshrec train --resume --name r --runs {tmp_path} --final all" in capsys.readouterr().out
    with torchs_own_warnings():
        assert export.main(["r", *runs, "--out", str(tmp_path / "first"), "--no-compile"]) == 0
    told = capsys.readouterr().out
    assert "has not learned from 200 of 1,000 samples" in told
    assert f"meshrec train --resume --name r --runs {tmp_path} --final all" in told
    assert train(["--resume", "--name", "r", *runs, "--final", "all", "--quiet"]) == 0
    assert "second fit" in capsys.readouterr().out
    with torchs_own_warnings():
        assert export.main(["r", *runs, "--out", str(tmp_path / "second"), "--no-compile"]) == 0
        assert export.main(["r", *runs, "--first", "--out", str(tmp_path / "again"), "--no-compile"]) == 0
    told = capsys.readouterr()
    assert "has not learned" not in told.out.split("again")[0]
    assert "figures on them are too good" in told.err
    about = [Predictor(tmp_path / name).about for name in ("first", "second", "again")]
    assert [each["run"] for each in about] == ["r", "r/final", "r"]
    assert [each["step"] for each in about] == [8, 10, 8]
    assert train(["--resume", "--name", "r", *runs, "--quiet"]) == 0
    assert "is finished" in capsys.readouterr().out


def tensor_in(file, name):
    with safe_open(file, "pt") as opened:
        return opened.get_tensor(next(key for key in opened.keys() if name in key))  # noqa: SIM118


def test_an_exported_checkpoint_is_that_of_the_second_fit(tmp_path, capsys, fitted_twice):
    _, run = fitted_twice
    files = {name: tmp_path / f"{name}.safetensors" for name in ("second", "first", "last")}
    for name, file in files.items():
        option = [] if name == "second" else [f"--{name}"]
        assert checkpoint.main(["export", str(run.path), str(file), *option]) == 0
    told = capsys.readouterr()
    assert "figures on them are too good" in told.err
    for name, fit in {"second": finished_refit(run), "first": run, "last": run}.items():
        found = find_checkpoint(fit.path, last=name == "last")
        expected = tmp_path / f"{name}-expected.safetensors"
        export_safetensors(found, expected)
        assert torch.equal(tensor_in(files[name], "over_arch"), tensor_in(expected, "over_arch")), name
    assert not torch.equal(tensor_in(files["second"], "over_arch"), tensor_in(files["first"], "over_arch"))
    assert checkpoint.main(["inspect", str(run.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"].startswith(str(finished_refit(run).path))
    assert checkpoint.main(["verify", str(run.path)]) == 0
    assert str(finished_refit(run).path) in capsys.readouterr().out.replace("\n", "")


@pytest.mark.parametrize("budget", [["--max-loss", "50%"], ["--weights", "INT4"]])
def test_the_second_fit_is_quantised_and_its_package_says_so(tmp_path, capsys, budget, fitted_twice):
    _, run = fitted_twice
    runs = ["--runs", str(run.path.parent)]
    weights = {}
    for name, option in {"second": [], "first": ["--first"]}.items():
        out = tmp_path / f"{name}-small"
        assert quantize.main(["r", *runs, "--out", str(out), *budget, *option]) == 0
        with torchs_own_warnings():
            package = ["--out", str(tmp_path / name), "--quantised", str(out), "--no-compile"]
            assert export.main(["r", *runs, *package]) == 0
        predictor = Predictor(tmp_path / name)
        fit = finished_refit(run) if name == "second" else run
        assert predictor.about["run"] == fit.name
        assert predictor.about["step"] == read_manifest(find_checkpoint(fit.path)).step
        weights[name] = predictor.weights
    table = next(name for name, tensor in weights["first"].items() if tensor.dtype != torch.uint8)
    assert not torch.equal(weights["first"][table], weights["second"][table])


def test_the_evaluation_says_that_the_second_fit_saw_the_rows(capsys, fitted_twice):
    _, run = fitted_twice
    data = ["--data", str(run.path.parent / "all.parquet")]
    assert evaluate.main([str(run.path), *data]) == 0
    assert "all 1,000 rows" in capsys.readouterr().err
    assert evaluate.main([str(run.path), "--first", *data]) == 0
    assert not capsys.readouterr().err


def test_a_log_is_fitted_again_on_all_items(tmp_path):
    rng = np.random.default_rng(0)
    log = pa.table(
        {"user": np.repeat(np.arange(40), 6), "item": rng.integers(0, 12, 240), "time": np.arange(240)}
    )
    pq.write_table(log, tmp_path / "log.parquet")
    data = Log(log=(str(tmp_path / "log.parquet"),), history=5)
    whole = data.all_rows().load()
    assert whole.validation is None
    assert whole.test is None
    targets = next(iter(whole.train.batches(100))).sparse[whole.item].lengths()
    assert int(targets.sum()) == 240 - 40


def test_the_second_fit_keeps_the_settings_that_validation_data_selected(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    log = pa.table(
        {"user": np.repeat(np.arange(40), 6), "item": rng.integers(0, 12, 240), "time": np.arange(240)}
    )
    pq.write_table(log, tmp_path / "log.parquet")
    recipe = Recipe(
        name="again",
        data=Log(log=(str(tmp_path / "log.parquet"),), history=5, exclude_seen=False),
        model=SASRecConfig(embedding_dim=4, softmax=SampledSoftmax(num_negatives=4, repeats=True)),
        loss=NextItem(),
        tables=Adam(lr=0.01),
        training=Training(batch_size=16, epochs=1),
    )
    # As if the largest offset and the smallest factor were the best.
    best = torch.tensor([16.0, 0.0])
    monkeypatch.setattr(RepeatScores, "choose", lambda self, quality: self.chosen.copy_(best))
    _, run = fitted(recipe, tmp_path)
    for folder in (run, finished_refit(run)):
        weights = tmp_path / f"{folder.path.name}.safetensors"
        export_safetensors(find_checkpoint(folder.path), weights)
        assert tensor_in(weights, "repeats.chosen").tolist() == [16, 0]


def test_what_cannot_be_fitted_again_is_refused_before_training(tmp_path, small):
    with pytest.raises(ValueError, match=r"SyntheticClicks.*--final"):
        fitted(small(), tmp_path / "a")
    with pytest.raises(ValueError, match="--final all with --no-checkpoints"):
        fitted(visits_recipe(tmp_path), tmp_path / "b", keep=False)
    assert not (tmp_path / "b" / "r" / "metrics.jsonl").exists()


def test_removal_of_a_run_removes_its_second_fit(tmp_path):
    _, run = fitted(visits_recipe(tmp_path), tmp_path / "runs")
    assert remove_run(run) == []
    assert not run.path.exists()
