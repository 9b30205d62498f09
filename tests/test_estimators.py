"""Estimators train as the command line does, and keep the rules of scikit-learn."""

import copy
import gc
import pickle
import random

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from sklearn.base import clone

import meshrec
from meshrec.cli import explain, inspect, predict, train
from meshrec.cli import similar as similar_command
from meshrec.data.faults import DataError
from meshrec.runs.contributions import contributions
from meshrec.train.run_folder import RunFolder

N = 300
STEPS = {"training.max_steps": 4, "training.evaluate_every": 2}
QUICK = STEPS | {"model.fit_trees": 5}
WORDS = ["--training.max-steps", "4", "--training.evaluate-every", "2", "--model.fit-trees", "5"]


def clicks() -> pa.Table:
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30, N)
    return pa.table(
        {
            "user": user,
            "item": [f"i{each}" for each in rng.integers(0, 9, N)],
            "price": rng.normal(size=N).round(3),
            "clicked": np.where((user % 3 == 0) ^ (rng.random(N) < 0.1), "yes", "no"),
        }
    )


@pytest.fixture(scope="module")
def scores_of_commands(tmp_path_factory):
    """Return the folder of the data, and the scores that the command line writes for it."""
    folder = tmp_path_factory.mktemp("commands")
    pq.write_table(clicks(), folder / "clicks.parquet")
    data, recipe, runs = str(folder / "clicks.parquet"), folder / "r.py", str(folder / "runs")
    assert inspect.main([data, "--label", "clicked", "--out", str(recipe)]) == 0
    words = [f"{recipe}:recipe", "--name", "a", "--runs", runs, "--quiet", *WORDS]
    assert train.main(words) == 0
    out = folder / "scores.parquet"
    assert predict.main(["a", "--runs", runs, "--data", data, "--out", str(out)]) == 0
    return folder, pq.read_table(out)["score"].to_numpy()


@pytest.mark.parametrize("library", ["pandas", "polars", "arrow", "path", "fit(X, y)"])
def test_scores_are_those_of_the_command_line_to_the_bit(library, scores_of_commands):
    folder, expected = scores_of_commands
    table = clicks()
    data = {
        "pandas": table.to_pandas(),
        "polars": pl.from_arrow(table),
        "arrow": table,
        "path": str(folder / "clicks.parquet"),
        "fit(X, y)": table.drop_columns("clicked").to_pandas(),
    }[library]
    before = sorted(folder.iterdir())
    if library == "fit(X, y)":
        model = meshrec.Classifier(label="clicked", options=QUICK).fit(data, table["clicked"].to_pylist())
    else:
        model = meshrec.Classifier(label="clicked", options=QUICK).fit(data)
    assert model.classes_.tolist() == ["no", "yes"]
    np.testing.assert_array_equal(model.predict_proba(data)[:, 1], expected)
    assert sorted(folder.iterdir()) == before


@pytest.fixture(scope="module")
def fitted():
    return meshrec.Classifier(label="clicked", options=QUICK).fit(clicks())


def test_copies_of_an_estimator_predict_alike(fitted, tmp_path):
    data = clicks().to_pandas()
    expected = fitted.predict_proba(data)
    fitted.save(tmp_path / "model")
    loaded = meshrec.Classifier.load(tmp_path / "model")
    for model in (pickle.loads(pickle.dumps(fitted)), copy.deepcopy(fitted), loaded):
        np.testing.assert_array_equal(model.predict_proba(data), expected)
        assert model.predict(data).tolist() == fitted.predict(data).tolist()
    assert loaded.evaluate(data) == fitted.evaluate(data)
    assert clone(fitted).get_params() == fitted.get_params()
    with pytest.raises(ValueError, match="Classifier"):
        meshrec.Regressor.load(tmp_path / "model")
    with pytest.raises(FileExistsError, match="model"):
        fitted.save(tmp_path / "model")


def test_contributions_add_up_and_name_the_column_that_decides(fitted, tmp_path, capsys, monkeypatch):
    rows = clicks().slice(0, 3)
    found = fitted.explain(rows, num_orders=8)
    assert found.column_names == ["user", "item", "price", "(base)", "(output)"]
    values = np.stack([found[name].to_numpy() for name in found.column_names], 1)
    np.testing.assert_allclose(values[:, :-1].sum(1), values[:, -1], rtol=1e-5)
    chances = fitted.predict_proba(rows)[:, 1]
    np.testing.assert_allclose(values[:, -1], np.log(chances / (1 - chances)), rtol=1e-4)
    assert np.abs(values[:, 0]).sum() > np.abs(values[:, 1:3]).sum()
    same = fitted.explain(rows, background=rows.slice(0, 1), num_orders=1)
    # Processors differ in how the position of a row in a batch changes its rounding.
    zeros = [same[name][0].as_py() for name in ("user", "item", "price")]
    np.testing.assert_allclose(zeros, 0, atol=1e-5)
    pq.write_table(rows, tmp_path / "rows.parquet")
    words = [str(fitted.run_), "--data", str(tmp_path / "rows.parquet"), "--orders", "8"]
    monkeypatch.setattr("meshrec.runs.contributions._LONG_SECONDS", 0.0)
    assert explain.main(words) == 0
    output, errors = capsys.readouterr()
    assert f"user{'':21}{values[0, 0]:+.4f}" in output
    assert errors.startswith("3 rows take about ")
    run, without = RunFolder(fitted.run_), rows.drop_columns("price")
    for data, background in ((without, rows), (rows, without)):
        with pytest.raises(DataError, match=r"'price'.*\['user', 'item', 'clicked'\]"):
            contributions(run, data, background=background)


def test_calibrated_probabilities_keep_the_order_and_those_of_the_command(tmp_path):
    data = clicks()
    model = meshrec.Classifier(label="clicked", options=QUICK, calibration="platt").fit(data)
    plain = clone(model).set_params(calibration=None).fit(data).predict_proba(data)[:, 1]
    slope, intercept = model.curve_[1][0], model.curve_[2][0]
    expected = 1 / (1 + np.exp(-(slope * np.log(plain / (1 - plain)) + intercept)))
    np.testing.assert_allclose(model.predict_proba(data)[:, 1], expected, rtol=1e-4)
    pq.write_table(data, tmp_path / "data.parquet")
    words = [str(model.run_), "--data", str(tmp_path / "data.parquet"), "--calibration", "platt"]
    assert predict.main([*words, "--out", str(tmp_path / "scores.parquet")]) == 0
    scores = pq.read_table(tmp_path / "scores.parquet")["score"].to_numpy()
    np.testing.assert_array_equal(scores, model.predict_proba(data)[:, 1])
    model.save(tmp_path / "model")
    loaded = meshrec.Classifier.load(tmp_path / "model")
    np.testing.assert_array_equal(loaded.predict_proba(data), model.predict_proba(data))


def test_an_estimator_that_fits_again_keeps_the_figures_of_its_first_fit(fitted, tmp_path, caplog):
    again = meshrec.Classifier(label="clicked", options=QUICK, final="all").fit(clicks())
    assert again.summary_["test"] == fitted.summary_["test"]
    assert (again.summary_["final"]["rows"], again.run_.name) == (N, "final")
    found = again.predict_proba(clicks())
    assert not np.array_equal(found, fitted.predict_proba(clicks()))
    again.save(tmp_path / "saved")
    assert np.array_equal(meshrec.Classifier.load(tmp_path / "saved").predict_proba(clicks()), found)
    assert "too good" not in caplog.text
    again.evaluate(clicks())
    assert "figures on these rows are too good" in caplog.text


def test_the_folder_ends_with_the_estimator_and_the_random_numbers_of_the_program_stay(capsys):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    model = meshrec.Regressor(label="price", options=STEPS, verbose=True).fit(clicks())
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]
    assert torch.equal(torch.get_rng_state(), states[2])
    folder = model.run_.parent
    assert "step 4 of 4" in capsys.readouterr().err
    assert folder.is_dir()
    assert model.predict(clicks()).shape == (N,)
    del model
    gc.collect()
    assert not folder.exists()


def test_classes_of_any_type_have_a_probability_each():
    table = clicks().drop_columns("clicked").to_pandas()
    stars = np.arange(N) % 3 + 1
    model = meshrec.Classifier(options=STEPS).fit(table, stars)
    assert model.classes_.tolist() == [1, 2, 3]
    assert model.predict_proba(table).shape == (N, 3)
    np.testing.assert_allclose(model.predict_proba(table).sum(1), 1, rtol=1e-6)
    flags = np.arange(N) % 30 < 15
    model = meshrec.Classifier(options=STEPS).fit(table[["user"]], flags)
    assert model.classes_.tolist() == [False, True]
    assert set(model.predict(table[["user"]]).tolist()) <= {False, True}


def test_a_ranker_scores_rows_of_queries():
    table = clicks().append_column("query", pa.array(np.arange(N) // 6))
    table = table.append_column("grade", pa.array(np.arange(N) % 3))
    model = meshrec.Ranker(label="grade", query="query", options=STEPS).fit(table.drop_columns("clicked"))
    assert model.predict(table).shape == (N,)
    assert "ndcg@10" in model.evaluate(table)


def log() -> pa.Table:
    row = np.arange(200)
    return pa.table({"user": row // 8, "item": [f"i{each}" for each in (row + row // 8) % 12], "time": row})


def test_a_recommender_recommends_and_finds_similar_items(tmp_path, monkeypatch):
    options = {"training.max_steps": 2, "training.epochs": 1}
    model = meshrec.Recommender(options=options).fit(log().to_pandas())
    best = model.recommend([3, 0], k=2)
    assert isinstance(best, pd.DataFrame)
    assert best["user"].tolist() == [3, 3, 0, 0]
    assert best["rank"].tolist() == [1, 2, 1, 2]
    had = set(log().to_pandas().query("user == 3")["item"])
    assert not had & set(best["item"][:2])
    similar = model.similar("i4", k=3)
    assert similar["item"].tolist() == ["i4"] * 3
    assert "i4" not in similar["similar"].tolist()
    assert similar["score"].is_monotonic_decreasing
    with pytest.raises(DataError, match="nowhere"):
        model.similar(["i4", "nowhere"])
    with pytest.raises(DataError, match=r"^the table of users.*'user' holds text"):
        model.recommend(["u3"])
    with pytest.raises(ValueError, match="k is 0"):
        model.recommend([3], k=0)
    five = ["i1", "i4", "i5", "i2", "i3"]
    of_five = model.similar(five, k=3)
    monkeypatch.setattr("meshrec.runs.recommending._ITEMS_PER_BLOCK", 2)
    pd.testing.assert_frame_equal(model.similar(five, k=3), of_five)
    out = tmp_path / "similar.csv"
    assert similar_command.main([str(model.run_), "--items", "i4", "-k", "3", "--out", str(out)]) == 0
    assert pd.read_csv(out)["similar"].tolist() == similar["similar"].tolist()
    assert model.recommend(k=1, data=log().slice(0, 16))["user"].tolist() == [0, 1]
    assert "ndcg@10" in model.evaluate(log())
    model.save(tmp_path / "model")
    loaded = meshrec.Recommender.load(tmp_path / "model")
    pd.testing.assert_frame_equal(loaded.similar("i4", k=3), similar)


def test_items_of_a_user_stay_candidates_where_the_recipe_says_so():
    options = {"training.max_steps": 1, "data.exclude_seen": False}
    model = meshrec.Recommender(options=options).fit(log())
    had = {(row["user"], row["item"]) for row in log().to_pylist()}
    for keep_seen, num_seen in ((None, 8), (True, 8), (False, 0)):
        best = model.recommend([0], k=12, keep_seen=keep_seen).to_pylist()
        assert sum((row["user"], row["item"]) in had for row in best) == num_seen


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (lambda: meshrec.Classifier().fit(clicks()), "label"),
        (lambda: meshrec.Classifier(label="clicked").fit(clicks(), [0, 1] * (N // 2)), "clicked"),
        (lambda: meshrec.Classifier(label="clicked", options={"training.epoch": 1}).fit(clicks()), "epochs"),
        (lambda: meshrec.Regressor(label="clicked").fit(clicks()), "clicked"),
        (lambda: meshrec.Ranker(label="clicked", query="user").fit(clicks(), [1]), "y"),
        (lambda: meshrec.Classifier(label=3).fit(clicks()), "label is 3"),
        (lambda: meshrec.Classifier(label="clicked", calibration="beta").fit(clicks()), "beta"),
        (
            lambda: meshrec.Classifier(label="clicked", options={"training.batch_size": "many"}).fit(
                clicks()
            ),
            r"training.batch_size is 'many'.*such as \d",
        ),
        (lambda: meshrec.Classifier.load("nowhere"), "nowhere"),
    ],
)
def test_mistakes_are_named(call, value):
    with pytest.raises(ValueError, match=value):
        call()
