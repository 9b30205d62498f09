"""From a log of one's own to recommendations, by the commands."""

import datetime
import json
import os

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq
import pytest

from meshrec.cli.evaluate import main as evaluate
from meshrec.cli.inspect import main as inspect
from meshrec.cli.quantize import main as quantize
from meshrec.cli.recommend import main as recommend
from meshrec.cli.screen import closing_lines
from meshrec.cli.train import main as train
from meshrec.data import item_trends, synthetic_log
from meshrec.export import Predictor, check_package
from meshrec.runs.export import export_run
from meshrec.train import RunFolder
from tests.export.conftest import torchs_own_warnings
from tests.serve.conftest import Client, running
from tests.serve.toys import open_with

NUM_USERS, LENGTH = 300, 12
IS_THOROUGH = "MESHREC_THOROUGH" in os.environ
COLUMNS = ["--user", "visitor", "--item", "sku", "--time", "seen at"]


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    """A log with other names, texts for numbers, and times as people write them."""
    found = synthetic_log(num_users=NUM_USERS, num_items=60, num_groups=4, length=LENGTH)
    users, items, times = (found.table[name].to_pylist() for name in ("user", "item", "time"))
    moments = [datetime.datetime.fromtimestamp(each, datetime.timezone.utc) for each in times]
    table = pa.table(
        {
            "sku": [f"s{item}" for item in items],
            "visitor": [f"v{user}" for user in users],
            "seen at": [each.strftime("%Y-%m-%d %H:%M:%S") for each in moments],
        }
    )
    path = tmp_path_factory.mktemp("log") / "log.csv"
    csv.write_csv(table, path)
    return found, table, path


@pytest.fixture(scope="module")
def runs(log):
    """The folder of a run of the recipe that `inspect` wrote, unedited."""
    folder = log[2].parent
    assert inspect([str(log[2]), *COLUMNS, "--out", str(folder / "recipe.py")]) == 0
    options = ["--training.epochs", "9", "--baselines"]
    assert (
        train([f"{folder}/recipe.py:recipe", "--runs", str(folder), "--name", "r", "--quiet", *options]) == 0
    )
    return folder


def recommended(runs, *more, run="r"):
    out = runs / "recs.parquet"
    assert recommend([run, "--runs", str(runs), "--out", str(out), "--force", *more]) == 0
    return pq.read_table(out)


def test_the_unedited_recipe_comes_near_the_best(log, runs):
    summary = RunFolder(runs / "r").read_json("summary.json")
    assert summary["test"]["recall@10"] >= 0.9 * log[0].best_hit_rate
    assert summary["test"]["recall@10"] > summary["baselines_test"]["item popularity"]["recall@10"]
    assert set(summary["baselines_test"]) == {"item popularity", "item-kNN", "last-item Markov chain"}


def test_large_logs_are_sorted_into_a_folder_with_the_same_results(log, tmp_path, monkeypatch):
    results = []
    for name, share in (("memory", 1), ("disk", 0)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setattr("meshrec.cli.inspect_log._MAX_SHARE", share)
        assert inspect([str(log[2]), *COLUMNS, "--out", str(folder / "recipe.py")]) == 0
        options = ["--runs", str(folder), "--name", "r", "--quiet", "--training.epochs", "1"]
        assert train([f"{folder}/recipe.py:recipe", *options]) == 0
        assert (folder / "histories").exists() == (name == "disk")
        summary = RunFolder(folder / "r").read_json("summary.json")
        results.append((summary["test"]["recall@10"], recommended(folder).to_pydict()))
    assert results[0] == results[1]


def test_every_user_gets_items_that_are_new_to_them(log, runs):
    found = recommended(runs, "-k", "7")
    assert found.column_names == ["visitor", "rank", "item", "score"]
    assert found["rank"].to_pylist() == [*range(1, 8)] * NUM_USERS
    had = set(zip(log[1]["visitor"].to_pylist(), log[1]["sku"].to_pylist(), strict=True))
    pairs = set(zip(found["visitor"].to_pylist(), found["item"].to_pylist(), strict=True))
    assert len(pairs) == 7 * NUM_USERS
    assert not pairs & had
    scores = found["score"].to_numpy().reshape(NUM_USERS, 7)
    assert (np.diff(scores, axis=1) <= 0).all()


def draw_tastes(rng):
    """Draw a log in which 85 of 100 items of a user are of the user's group."""
    rows = []
    for user in range(NUM_USERS):
        left = rng.permutation(60).tolist()
        for place in range(8):
            is_own = rng.random() < 0.85
            item = next(each for each in left if (each % 4 == user % 4) == is_own)
            left.remove(item)
            rows.append((f"v{user}", f"s{item}", 1_700_000_000 + 60 * place, f"b{item % 4}"))
    return pa.table(dict(zip(("visitor", "sku", "seen at", "brand"), zip(*rows, strict=True), strict=True)))


def test_two_towers_learn_the_tastes_of_users_and_are_served(tmp_path, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    pq.write_table(draw_tastes(np.random.default_rng(0)), tmp_path / "log.parquet")
    out = str(tmp_path / "towers.py")
    data = [str(tmp_path / "log.parquet"), *COLUMNS]
    assert inspect([*data, "--model", "two_tower", "--item-features", "brand", "--out", out]) == 0
    options = ["--training.epochs", "4", "--baselines", "--quiet"]
    assert train([f"{out}:recipe", "--runs", str(tmp_path), "--name", "r", *options]) == 0
    summary = RunFolder(tmp_path / "r").read_json("summary.json")
    best = 0.85  # at least: no more than ten items of the user's group are left
    assert summary["test"]["recall@10"] >= 0.9 * best
    assert summary["test"]["recall@10"] > 2 * summary["baselines_test"]["item popularity"]["recall@10"]
    found = recommended(tmp_path, "-k", "5")
    assert found["rank"].to_pylist() == [*range(1, 6)] * NUM_USERS
    had = pq.read_table(tmp_path / "log.parquet").filter(pc.equal(pc.field("visitor"), "v7"))
    expected = found.filter(pc.equal(found["visitor"], "v7"))
    with torchs_own_warnings():
        export_run(RunFolder(tmp_path / "r"), tmp_path / "package", compile=False)
        with running({"next": tmp_path / "package"}) as server:
            client = Client(server.url)
            given = {"history": had["sku"].to_pylist(), "visitor": "v7", "seen": None}
            _, _, said = client("POST", "/recommend?k=5", given)
            assert said["items"][0] == expected["item"].to_pylist()
            assert said["scores"][0] == pytest.approx(expected["score"].to_pylist(), rel=1e-4)
            new = {"history": [], "visitor": "nobody", "seen": ["s1"]}
            _, _, said = client("POST", "/recommend?k=59", new)
            assert len({*said["items"][0]} - {"s1"}) == 59
            client.close()
    of_items = export_run(RunFolder(tmp_path / "r"), tmp_path / "items", tower="item", compile=False)
    assert {*Predictor(of_items).raw.columns} == {"sku", "brand"}


def test_some_users_and_their_seen_items(log, runs, capsys):
    pq.write_table(pa.table({"visitor": ["v7", "nobody", "v3"]}), runs / "users.parquet")
    few = recommended(runs, "--users", str(runs / "users.parquet"), "-k", "60", "--keep-seen")
    assert few["visitor"].to_pylist() == ["v7"] * 60 + ["nobody"] * 60 + ["v3"] * 60
    assert "1 user has no history" in capsys.readouterr().out
    fewer = recommended(runs, "--users", str(runs / "users.parquet"), "-k", "60")
    assert fewer.num_rows == 180 - 2 * LENGTH
    pq.write_table(pa.table({"visitor": [1]}), runs / "wrong.parquet")
    pq.write_table(pa.table({"who": ["v7"]}), runs / "nameless.parquet")
    with pytest.raises(ValueError, match="'visitor'"):
        recommended(runs, "--users", str(runs / "wrong.parquet"))
    with pytest.raises(ValueError, match="'visitor'"):
        recommended(runs, "--users", str(runs / "nameless.parquet"))
    pq.write_table(pa.table({"visitor": ["v7", None]}), runs / "missing.parquet")
    with pytest.raises(ValueError, match=r"'visitor'.*row 1"):
        recommended(runs, "--users", str(runs / "missing.parquet"))
    pq.write_table(pa.table({"visitor": ["v7", "v3", "v7"]}), runs / "repeated.parquet")
    found = recommended(runs, "--users", str(runs / "repeated.parquet"), "-k", "2")
    assert found["visitor"].to_pylist() == ["v7", "v7", "v3", "v3"]
    with pytest.raises(ValueError, match=r"k.*0.*1"):
        recommended(runs, "-k", "0")


def test_evaluation_of_a_log_has_intervals_over_users(log, runs):
    out = runs / "metrics.json"
    assert (
        evaluate(["r", "--runs", str(runs), "--data", str(log[2]), "--intervals", "50", "--json", str(out)])
        == 0
    )
    found = json.loads(out.read_text())
    summary = RunFolder(runs / "r").read_json("summary.json")
    assert found["metrics"] == pytest.approx(summary["test"], rel=1e-5)
    for name in ("recall@10", "ndcg@50", "mrr@200"):
        low, high = found["intervals"][name]
        assert low <= found["metrics"][name] <= high
    assert found["samples"] == NUM_USERS


# Without hashing, command and server are compared below.
@pytest.mark.parametrize("keys", ["", ", hashed=500"] if IS_THOROUGH else [", hashed=500"])
def test_the_server_recommends_what_the_command_does(log, runs, monkeypatch, keys):
    open_with(monkeypatch, Predictor, check_package)
    monkeypatch.setattr(item_trends, "_WEIGHTS", (1.0,))  # so that trends change scores
    recipe = (runs / "recipe.py").read_text().replace("HSTUConfig", "SASRecConfig")
    (runs / "sasrec.py").write_text(recipe.replace("columns=COLUMNS", f"columns=COLUMNS{keys}"))
    name = f"sasrec{keys.removeprefix(', ')}"
    options = ["--runs", str(runs), "--name", name, "--quiet", "--training.max-steps", "20"]
    assert train([f"{runs}/sasrec.py:recipe", *options]) == 0
    found = recommended(runs, "-k", "5", run=name)
    had = log[1].filter(pc.equal(log[1]["visitor"], "v7")).sort_by("seen at")
    expected = found.filter(pc.equal(found["visitor"], "v7"))
    with torchs_own_warnings():
        package = export_run(RunFolder(runs / name), runs / f"{name} package", compile=False)
        with running({"next": package}) as server:
            client = Client(server.url)
            given = {"history": had["sku"].to_pylist(), "seen": None}
            _, _, said = client("POST", "/recommend?k=5", [given, {"history": [], "seen": ["s1"]}])
            assert said["items"][0] == expected["item"].to_pylist()
            assert said["scores"][0] == pytest.approx(expected["score"].to_pylist(), rel=1e-4)
            assert "s1" not in said["items"][1]
            _, _, kept = client("POST", "/recommend/next?k=60&keep_seen=1", given)
            assert len(kept["items"][0]) == 60
            status, _, wrong = client("POST", "/recommend?k=0", given)
            assert (status, wrong["error"][:30]) == (400, "k must be a whole number from ")
            client.close()


@pytest.mark.parametrize("exclude_seen", [True, False] if IS_THOROUGH else [False])
def test_command_and_server_agree_on_seen_items(log, runs, monkeypatch, exclude_seen):
    open_with(monkeypatch, Predictor, check_package)
    monkeypatch.setattr(item_trends, "_WEIGHTS", (1.0,))  # so that trends change scores
    name = f"exclude_seen_{exclude_seen}"
    recipe = (runs / "recipe.py").read_text()
    recipe = recipe.replace("columns=COLUMNS", f"columns=COLUMNS, exclude_seen={exclude_seen}")
    if not exclude_seen:  # then history items can have additions to their scores, also with kept histories
        recipe = recipe.replace("temperature=0.05", "temperature=0.05, repeats=True")
    (runs / f"{name}.py").write_text(recipe)
    options = ["--runs", str(runs), "--name", name, "--quiet", "--training.max-steps", "2"]
    assert train([f"{runs}/{name}.py:recipe", *options]) == 0
    rows = log[1].filter(pc.equal(log[1]["visitor"], "v7")).sort_by("seen at")
    had = rows["sku"].to_pylist()
    moments = pc.strptime(rows["seen at"], format="%Y-%m-%d %H:%M:%S", unit="s")
    given = {"history": had, "times": pc.cast(moments, pa.int64()).to_pylist()}
    num_new = len({*log[1]["sku"].to_pylist()} - {*had})
    with torchs_own_warnings():
        package = export_run(RunFolder(runs / name), runs / f"{name} package", compile=False)
        assert np.abs(Predictor(package).items.trends_I).max() > 0.1
        with running({"next": package}, keep_histories=1 << 20) as server:
            client = Client(server.url)
            for flags, query, is_new in (
                ([], "", exclude_seen),
                (["--keep-seen"], "&keep_seen=1", False),
                (["--new-only"], "&keep_seen=0", True),
            ):
                table = recommended(runs, "-k", "60", *flags, run=name)
                table = table.filter(pc.equal(table["visitor"], "v7"))
                items, scores = table["item"].to_pylist(), table["score"].to_pylist()
                assert len(items) == (num_new if is_new else 60)
                assert bool({*items} & {*had}) != is_new
                for more in ({}, {"seen": None}, {"seen": [items[0]]}):
                    status, _, said = client("POST", f"/recommend?k=60{query}", {**given, **more})
                    assert status == 200, said
                    first = int(is_new and bool(more.get("seen")))
                    assert said["items"][0] == items[first:]
                    assert said["scores"][0] == pytest.approx(scores[first:], rel=1e-3, abs=1e-4)
            schema = client("GET", "/openapi.json")[2]["paths"]["/embed/next"]["post"]["requestBody"]
            (single, *_) = schema["content"]["application/json"]["schema"]["oneOf"]
            assert single["required"] == ["history", "times"]
            client.close()


def draw_repeats(rng):
    """Draw a log in which six of ten rows repeat an item of the user, recent ones more often."""
    rows = []
    for user in range(200):
        had = []
        for place in range(rng.integers(10, 25)):
            item = 50 * (user % 4) + int(rng.integers(50))
            if had and rng.random() < 0.6:
                weights = np.exp2(-np.arange(len(had))[::-1] / 10)
                item = int(rng.choice(had, p=weights / weights.sum()))
            had.append(item)
            rows.append((f"v{user}", f"s{item}", 1_700_000_000 + 60 * place))
    return pa.table(dict(zip(("visitor", "sku", "seen at"), zip(*rows, strict=True), strict=True)))


def test_repeats_are_proposed_and_learned_as_well_as_by_the_baselines(tmp_path, capsys):
    pq.write_table(draw_repeats(np.random.default_rng(0)), tmp_path / "log.parquet")
    assert inspect([str(tmp_path / "log.parquet"), *COLUMNS, "--out", str(tmp_path / "recipe.py")]) == 0
    assert "repeats" in capsys.readouterr().out
    options = ["--runs", str(tmp_path), "--name", "r", "--quiet", "--training.epochs", "8", "--baselines"]
    assert train([f"{tmp_path}/recipe.py:recipe", *options]) == 0
    summary = RunFolder(tmp_path / "r").read_json("summary.json")
    of_baselines = {name: metrics["ndcg@10"] for name, metrics in summary["baselines_test"].items()}
    best = max(of_baselines, key=of_baselines.get)
    assert best.startswith("own ")
    # 200 users: the 95 % interval of a difference is a few hundredths wide.
    assert summary["test"]["ndcg@10"] >= of_baselines[best] - 0.03, of_baselines


@pytest.mark.parametrize("keys", ["", ", hashed=500"] if IS_THOROUGH else [", hashed=500"])
def test_recommendations_are_those_of_training_after_the_log_has_grown(log, runs, monkeypatch, keys):
    monkeypatch.setattr(item_trends, "_WEIGHTS", (1.0,))  # so that trends change scores
    path = runs / "growing.csv"
    csv.write_csv(log[1], path)
    name = f"growing{keys.removeprefix(', ')}"
    recipe = (runs / "recipe.py").read_text().replace("HSTUConfig", "SASRecConfig")
    recipe = recipe.replace("log.csv", "growing.csv").replace("columns=COLUMNS", f"columns=COLUMNS{keys}")
    (runs / f"{name}.py").write_text(recipe)
    options = ["--runs", str(runs), "--name", name, "--quiet", "--training.max-steps", "2"]
    assert train([f"{runs}/{name}.py:recipe", *options]) == 0
    pq.write_table(pa.table({"visitor": ["nobody"]}), runs / "nobody.parquet")
    before = recommended(runs, "--users", str(runs / "nobody.parquet"), "-k", "60", run=name)
    pq.write_table(pa.table({"visitor": ["v7"]}), runs / "known.parquet")
    known = recommended(runs, "--users", str(runs / "known.parquet"), run=name)
    worst = before["item"].to_pylist()[-1]
    fans = pa.table(
        {
            "sku": [worst] * 600,
            "visitor": [f"fan {row // 6}" for row in range(600)],
            "seen at": [f"2030-01-01 00:00:{row % 6:02d}" for row in range(600)],
        }
    )
    csv.write_csv(pa.concat_tables([log[1], fans]), path)
    after = recommended(runs, "--users", str(runs / "nobody.parquet"), "-k", "60", run=name)
    assert after.equals(before)
    assert recommended(runs, "--users", str(runs / "known.parquet"), run=name).equals(known)
    with torchs_own_warnings():
        items = Predictor(export_run(RunFolder(runs / name), runs / f"{name} package", compile=False)).items
    order = np.argsort(-items.new_user_scores_I)
    assert items.new_user_scores_I[order].tolist() == before["score"].to_pylist()
    assert items.new_user_scores_I[items.values.to_pylist().index(worst)] == min(before["score"].to_pylist())


def test_histories_that_are_kept_change_no_recommendation(log, runs, monkeypatch):
    open_with(monkeypatch, Predictor, check_package)
    expected = recommended(runs, "-k", "5")
    expected = expected.filter(pc.equal(expected["visitor"], "v7"))
    had = log[1].filter(pc.equal(log[1]["visitor"], "v7")).sort_by("seen at")
    moments = (datetime.datetime.fromisoformat(f"{each}+00:00") for each in had["seen at"].to_pylist())
    items, times = had["sku"].to_pylist(), [int(each.timestamp()) for each in moments]
    with torchs_own_warnings():
        export_run(RunFolder(runs / "r"), runs / "hstu", compile=False)
        with running({"next": runs / "hstu"}, keep_histories=1 << 20) as server:
            client = Client(server.url)
            for length in range(LENGTH - 3, LENGTH + 1):
                given = {"history": items[:length], "times": times[:length], "seen": None}
                status, _, said = client("POST", "/recommend?k=5", given)
                assert status == 200, said
            assert said["items"][0] == expected["item"].to_pylist()
            assert said["scores"][0] == pytest.approx(expected["score"].to_pylist(), rel=1e-4)
            metrics = client("GET", "/metrics")[2].decode()
            assert 'meshrec_histories_total{model="next",outcome="hit"} 3.0' in metrics
            for wrong, message in (
                ([1000 * each for each in times], "after the year 5000. Give seconds since 1970"),
                (times[::-1], "after a later time. Give the oldest item first"),
            ):
                status, _, said = client("POST", "/recommend", {**given, "times": wrong})
                assert status == 400
                assert message in said["error"]
            client.close()


def test_what_comes_after_training_is_recommend(runs):
    run = RunFolder(runs / "r")
    lines = closing_lines(run, run.read_json("summary.json"))
    assert [line.partition(":")[0] for line in lines if "meshrec re" in line or "predict" in line] == [
        "recommend"
    ]


def test_quantised_items_with_hashed_keys_make_no_package(runs):
    recipe = (runs / "recipe.py").read_text().replace("columns=COLUMNS", "columns=COLUMNS, hashed=500")
    (runs / "hashed.py").write_text(recipe)
    options = ["--runs", str(runs), "--name", "h", "--quiet", "--training.max-steps", "2"]
    assert train([f"{runs}/hashed.py:recipe", *options]) == 0
    assert quantize(["h", "--runs", str(runs), "--out", str(runs / "codes")]) == 0
    with pytest.raises(ValueError, match="--quantised"):
        export_run(RunFolder(runs / "h"), runs / "no package", quantised=runs / "codes")


def test_features_of_items_need_a_model_that_reads_them(log, tmp_path):
    with pytest.raises(ValueError, match=r"--model.*two_tower.*--label"):
        inspect([str(log[2]), *COLUMNS, "--item-features", "sku", "--out", str(tmp_path / "recipe.py")])
