import numpy as np
import pyarrow as pa
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.cli import inspect
from meshrec.cli.predict import main as predict
from meshrec.cli.train import main as train
from meshrec.data import DataError
from meshrec.export import Predictor
from meshrec.runs.export import export_run
from meshrec.train import RunFolder
from tests.browser import drawn, needs_browser
from tests.train.shop import shop, write_shop


def ratings(num: int) -> pa.Table:
    """A user's taste and an item's quality, in stars."""
    rng = np.random.default_rng(0)
    users, items = rng.integers(0, 60, num), rng.integers(0, 90, num)
    taste, quality = rng.normal(size=60), rng.normal(size=90)
    liking = 3 + taste[users] + quality[items] + 0.3 * rng.normal(size=num)
    stars = np.clip(np.round(2 * liking) / 2, 0.5, 5)
    return pa.table({"user": users, "item": items, "stars": stars, "time": np.arange(num) + 1_600_000_000})


def two_commands(folder, data, label, *more) -> dict:
    out = folder / "recipe.py"
    assert inspect.main([*map(str, data), "--label", label, "--out", str(out), *more]) == 0
    args = [f"{out}:recipe", "--runs", str(folder), "--name", "r", "--quiet"]
    assert train(args) == 0
    return RunFolder(folder / "r").read_json("summary.json")


def test_ratings_become_a_model_in_two_commands(tmp_path, capsys):
    data = ratings(6000)
    for number in range(2):
        pq.write_table(data.slice(3000 * number, 3000), tmp_path / f"{number}.parquet")
    files = [tmp_path / "0.parquet", tmp_path / "1.parquet"]
    summary = two_commands(tmp_path, files, "stars", "--time", "time")
    assert summary["test"]["auc"] > 0.7
    assert "meshrec train" in capsys.readouterr().out
    assert "Columns" in (tmp_path / "recipe.html").read_text()


def test_clicks_with_strings_nulls_and_lists_become_a_model_in_two_commands(tmp_path):
    write_shop(tmp_path, 3000)
    summary = two_commands(tmp_path, [tmp_path], "clicked", "--time", "time", "--rows", "2000")
    assert summary["test"]["auc"] > 0.6
    assert 'Number(name="price"' in (tmp_path / "recipe.py").read_text()


def test_csv_is_looked_at_too(tmp_path):
    csv.write_csv(shop(500).drop_columns(["tags"]), tmp_path / "all.csv")
    out = tmp_path / "r.py"
    assert inspect.main([str(tmp_path / "all.csv"), "--label", "clicked", "--out", str(out)]) == 0
    assert "data=Csv(" in out.read_text()
    assert 'split_by="random"' in out.read_text()


@pytest.mark.parametrize("is_installed", [True, False])
def test_trees_are_proposed_where_lightgbm_is_installed_and_named_where_not(
    is_installed, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(inspect, "_has_lightgbm", lambda: is_installed)
    csv.write_csv(shop(500).drop_columns(["tags"]), tmp_path / "all.csv")
    out = tmp_path / "r.py"
    assert inspect.main([str(tmp_path / "all.csv"), "--label", "clicked", "--out", str(out)]) == 0
    assert ("fit_trees=300" in out.read_text()) == is_installed
    assert ('pip install "meshrec[lightgbm]"' in capsys.readouterr().out) != is_installed


def test_any_number_of_processes_writes_the_same_recipe_page_and_output(tmp_path, capsys):
    for number in range(6):
        pq.write_table(shop(700 + number), tmp_path / f"{number}.parquet")
    out = tmp_path / "r.py"
    results = []
    for nproc in (1, 2, 3):
        words = ["--time", "time", "--rows", "2100", "--nproc", str(nproc), "--force", "--out", str(out)]
        assert inspect.main([str(tmp_path / "*.parquet"), "--label", "clicked", *words]) == 0
        page = (tmp_path / "r.html").read_text()
        results.append((out.read_text(), page, capsys.readouterr().out))
    assert results[0] == results[1] == results[2]


def test_files_that_cannot_be_divided_are_told(tmp_path, capsys):
    write_shop(tmp_path, 400)
    words = ["--label", "clicked", "--nproc", "9", "--out", str(tmp_path / "r.py")]
    assert inspect.main([str(tmp_path), *words]) == 0
    assert "of 9 processes read the data" in capsys.readouterr().err
    csv.write_csv(shop(500).drop_columns(["tags"]), tmp_path / "all.csv")
    with pytest.raises(ValueError, match=r"--nproc 9.*all.csv"):
        inspect.main([str(tmp_path / "all.csv"), "--force", *words])
    with pytest.raises(ValueError, match=r"--nproc is 0"):
        inspect.main([str(tmp_path), "--force", *words, "--nproc", "0"])


def test_what_cannot_be_is_told(tmp_path):
    write_shop(tmp_path, 100)
    data = [str(tmp_path), "--label", "clicked", "--out", str(tmp_path / "r.py")]
    (tmp_path / "r.py").write_text("")
    with pytest.raises(ValueError, match="is there already"):
        inspect.main(data)
    with pytest.raises(ValueError, match=r"--rows.*0"):
        inspect.main([*data, "--force", "--rows", "0"])
    pq.write_table(pa.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match="differ"):
        inspect.main([*data, "--force"])


def test_csv_files_of_two_forms_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("y,user\n0,1\n1,2\n")
    (tmp_path / "b.csv").write_text("y\n0\n")
    with pytest.raises(ValueError, match=r"b.csv.*a.csv.*\['user'\]"):
        inspect.main([str(tmp_path / "*.csv"), "--label", "y", "--out", str(tmp_path / "r.py")])


@pytest.mark.parametrize(
    ("label", "said"),
    [
        (np.arange(4000) % 3, "values from 0 to 2, not 0 and 1: rows with 1 or more count as positive"),
        (
            (np.arange(4000) % 200 == 0).astype(int),
            "only 0.50% of the rows are positive, about 20 rows, and 2 of",
        ),
        ((np.arange(4000) % 200 != 0).astype(int), "only 0.50% of the rows are negative"),
    ],
)
def test_what_is_decided_about_a_label_is_told(label, said, tmp_path, capsys):
    table = pa.table({"user": np.arange(4000) % 91, "y": label})
    pq.write_table(table, tmp_path / "a.parquet")
    out = tmp_path / "r.py"
    assert inspect.main([str(tmp_path / "a.parquet"), "--label", "y", "--out", str(out)]) == 0
    assert said in " ".join(capsys.readouterr().out.split())
    assert said in " ".join(out.read_text().split())


@needs_browser
def test_the_page_shows_times_as_dates(tmp_path):
    num = 600
    table = {"user": [f"u{n % 9}" for n in range(num)], "y": np.arange(num) % 7 % 2}
    pq.write_table(pa.table(table | {"when": 1_600_000_000 + np.arange(num)}), tmp_path / "a.parquet")
    args = [str(tmp_path / "a.parquet"), "--label", "y", "--time", "when", "--out", str(tmp_path / "r.py")]
    assert inspect.main(args) == 0
    page = drawn(f"file://{tmp_path}/r.html").split("<noscript>")[0]
    assert ">2020-09-13 12:26:40<" in page


def test_texts_become_classes_with_a_probability_each(tmp_path):
    table = ratings(3000)
    stars = np.asarray(table["stars"])
    names = np.array(["bad", "fair", "good"])[np.digitize(stars, [2.5, 3.5])]
    table = table.drop_columns("stars").append_column("verdict", pa.array(names))
    pq.write_table(table, tmp_path / "data.parquet")
    summary = two_commands(tmp_path, [tmp_path / "data.parquet"], "verdict", "--time", "time")
    assert summary["test"]["auc"] > 0.65
    assert summary["test"]["accuracy"] > 0.4
    out = tmp_path / "scores.parquet"
    data = ["--data", str(tmp_path / "data.parquet"), "--runs", str(tmp_path), "--out", str(out)]
    assert predict(["r", *data]) == 0
    scores = pq.read_table(out)
    chance = np.stack([np.asarray(scores[f"score_{name}"]) for name in ("bad", "fair", "good")], 1)
    assert np.allclose(chance.sum(1), 1, atol=1e-5)
    assert (names == np.array(["bad", "fair", "good"])[chance.argmax(1)]).mean() > 0.4


def test_rows_are_ranked_within_a_query(tmp_path):
    rng = np.random.default_rng(0)
    num, queries = 4000, 400
    item, query = rng.integers(0, 50, num), np.sort(rng.integers(0, queries, num))
    quality = rng.normal(size=50)
    grade = np.clip(np.round(quality[item] + 0.5 * rng.normal(size=num) + 1.5), 0, 4).astype(int)
    pq.write_table(pa.table({"session": query, "item": item, "grade": grade}), tmp_path / "data.parquet")
    summary = two_commands(tmp_path, [tmp_path / "data.parquet"], "grade", "--query", "session")
    assert summary["test"]["ndcg@10"] > 0.85
    text = (tmp_path / "recipe.py").read_text()
    assert 'split_by="hash"' in text
    assert 'loss=Ranking(kind="listwise")' in text


def test_the_proposed_model_is_exported_as_it_predicts(tmp_path):
    table = shop(1200)
    pq.write_table(table, tmp_path / "shop.parquet")
    two_commands(tmp_path, [tmp_path / "shop.parquet"], "clicked", "--force")
    data = ["--data", str(tmp_path / "shop.parquet"), "--runs", str(tmp_path)]
    assert predict(["r", *data, "--out", str(tmp_path / "scores.parquet")]) == 0
    scores = np.asarray(pq.read_table(tmp_path / "scores.parquet")["score"])
    export_run(RunFolder(tmp_path / "r"), tmp_path / "package", compile=False)
    predictor = Predictor(tmp_path / "package")
    assert predictor.num_dense > 0
    encoded = predictor.raw.encode(table.select(list(predictor.raw.columns)))
    values, lengths = (
        {name: torch.from_numpy(own) for name, own in each.items()}
        for each in (encoded.values, encoded.lengths)
    )
    found = predictor(torch.from_numpy(encoded.dense), values, lengths)
    assert np.allclose(found.numpy(), scores, atol=1e-5)


def test_times_of_another_format_split_the_rows(tmp_path):
    days = [f"{1 + n % 28:02}/{1 + n // 28 % 12:02}/2024" for n in range(400)]
    rng = np.random.default_rng(0)
    columns = {"user": rng.integers(0, 9, 400), "day": days, "y": rng.integers(0, 2, 400)}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    more = ["--label", "y", "--time", "day", "--out", str(tmp_path / "r.py"), "--time-format"]
    assert inspect.main([str(tmp_path / "a.parquet"), *more, "%d/%m/%Y"]) == 0
    assert 'split_time_format="%d/%m/%Y"' in (tmp_path / "r.py").read_text()
    with pytest.raises(DataError, match="'01/01/2024'"):
        inspect.main([str(tmp_path / "a.parquet"), *more, "%Y-%m-%d", "--force"])


def test_bytes_that_are_not_utf_8_are_refused(tmp_path):
    (tmp_path / "a.csv").write_bytes(b"user,y\n" + "é,1\nb,0\n".encode("latin-1") * 20)
    with pytest.raises(DataError, match=r"a\.csv.*'user'.*UTF-8"):
        inspect.main([str(tmp_path / "a.csv"), "--label", "y", "--out", str(tmp_path / "r.py")])
