import json

import pytest

from meshrec.cli.arguments import UsageError
from meshrec.cli.runs import CompareOptions, RemoveOptions, RunsOptions, main, run
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder
from tests.browser import drawn, needs_browser


@pytest.fixture
def runs(tmp_path):
    for name, auc, lr in (("a", 0.7, 0.1), ("b", 0.75, 0.2)):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write_json(
            CONFIG,
            {
                "recipe": {"name": "small", "lr": lr, "data": {}, "model": {}},
                "ranks": 2,
                "began": f"2026-01-0{name}",
            },
        )
        folder.write_json(SUMMARY, {"state": "finished", "step": 20, "validation": {"auc": auc}})
        line = {"phase": "lookup", "rank": 0, "seconds": 0.001 if name == "a" else 0.003, "step": 1}
        folder.phases.write_text(json.dumps(line) + "\n")
    return tmp_path


def test_runs_are_listed(runs, capsys):
    run(RunsOptions(runs=runs))
    out = capsys.readouterr().out
    assert "0.7000" in out
    assert "0.7500" in out
    assert "finished" in out


def test_two_runs_side_by_side(runs, capsys):
    run(CompareOptions(names=("a", "b"), runs=runs))
    out = capsys.readouterr().out
    assert "+0.05" in out
    assert "rank 0: lookup, ms" in out
    assert "recipe.lr" in out
    assert "recipe.name" not in out  # the same in both


def test_three_runs_are_compared_with_the_first(runs, capsys):
    worse = RunFolder(runs / "c")
    worse.path.mkdir()
    worse.write_json(CONFIG, {"recipe": {"name": "other", "lr": 0.1}, "ranks": 2})
    worse.write_json(SUMMARY, {"state": "finished", "step": 20, "validation": {"auc": 0.6}})
    run(CompareOptions(names=("a", "b", "c"), runs=runs))
    line = next(text for text in capsys.readouterr().out.splitlines() if "validation auc" in text)
    assert "+0.05" in line
    assert "better" in line
    assert "-0.1" in line
    assert "worse" in line


def test_runs_are_chosen_and_sorted(runs, capsys):
    stopped = RunFolder(runs / "c")
    stopped.path.mkdir()
    stopped.write_json(CONFIG, {"recipe": {"name": "other"}, "ranks": 1})
    stopped.write_state("stopped", step=7)

    def listed(**options):
        run(RunsOptions(runs=runs, **options))
        lines = capsys.readouterr().out.splitlines()
        found = [line.replace("│", " ").split()[:1] for line in lines]
        return [words[0] for words in found if words and words[0] in "abc"]

    assert listed(state="stopped") == ["c"]
    assert listed(recipe="small") == ["a", "b"]
    assert listed(sort="validation") == ["c", "a", "b"]  # what has none comes first
    with pytest.raises(ValueError, match=r"3 runs.*--state.*--recipe"):
        listed(state="failed")


def test_runs_are_removed_unless_they_are_running(runs):
    RunFolder(runs / "b").write_state("running", step=3)
    with pytest.raises(ValueError, match="running"):
        run(RemoveOptions(names=("b",), runs=runs))
    run(RemoveOptions(names=("a",), runs=runs))
    assert [path.name for path in runs.iterdir()] == ["b"]


def test_mistakes_are_named(runs, tmp_path):
    with pytest.raises(ValueError, match="'c'"):
        run(CompareOptions(names=("a", "c"), runs=runs))
    with pytest.raises(UsageError, match="'compair'"):
        main(["compair", "a"])
    with pytest.raises(UsageError, match="compare"):
        main(["compare", "a", "--runs", str(runs)])
    with pytest.raises(ValueError, match="RECIPE"):
        run(RunsOptions(runs=tmp_path / "nowhere"))


def test_each_run_shows_its_own_leading_metric(runs, capsys):
    folder = RunFolder(runs / "ranking")
    folder.path.mkdir()
    folder.write_json(CONFIG, {"recipe": {"name": "sasrec"}, "ranks": 1})
    folder.write_json(
        SUMMARY, {"validation": {"loss": 5.0, "ndcg@10": 0.0876}, "samples_per_second": 83.1955}
    )
    assert main(["--runs", str(runs)]) == 0
    out = capsys.readouterr().out
    assert "NDCG@10 0.0876" in out
    assert "AUC 0.7000" in out
    assert " 83.2 " in out


def test_a_comparison_of_runs_on_other_data_is_warned_of(runs, capsys):
    def compared():
        assert main(["compare", "a", "b", "--runs", str(runs)]) == 0
        return capsys.readouterr().out

    assert "differ" not in compared().split("options that differ")[0]
    folder = RunFolder(runs / "b")
    folder.write_json(CONFIG, folder.read_json(CONFIG) | {"data": {"samples": {"test": 7}}})
    assert "the data of a and b differ (samples.test None and 7)" in compared()


@pytest.mark.parametrize(("command", "word"), [("compare", "RUN ..."), ("rm", "RUN ...")])
def test_the_help_of_a_command_shows_its_arguments(command, word, capsys):
    with pytest.raises(SystemExit):
        main([command, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: meshrec runs {command} ")
    assert word in out


@needs_browser
def test_a_page_compares_the_binary_curves_runs(runs, tmp_path, capsys):
    curves = {
        "positive": 3.0,
        "negative": 7.0,
        "roc": [[0, 0], [0.2, 0.6], [1, 1]],
        "precision_recall": [[0.6, 0.56], [1, 0.3]],
        "gains": [[0, 0], [0.32, 0.6], [1, 1]],
        "calibration": [[0.1, 0.12, 5]],
    }
    for name in "ab":
        folder = RunFolder(runs / name)
        for step in (10, 20):
            folder.append_metrics({"kind": "train", "step": step, "epoch": step / 10, "loss": 1 / step})
            line = {"kind": "validation", "step": step, "epoch": step / 10, "seconds": step / 7, "auc": 0.7}
            folder.append_metrics(line)
        folder.write_json(SUMMARY, (folder.read_json(SUMMARY) or {}) | {"curves": {"validation": curves}})
    out = tmp_path / "comparison.html"
    command = ["compare", "a", "b", "--runs", str(runs), "--out", str(out)]
    assert main(command) == 0
    assert f"the page: {out}" in capsys.readouterr().out.replace("\n", "")
    page = drawn(f"file://{out}").split("<noscript>")[0]
    for text in ("0.7500 (+0.05) better", "recipe.lr", "loss, train", "AUC, validation", ">Gains<"):
        assert text in page, text
    for text in ("b, step 20: 0.70000", "Curves over training time", "b, seconds 2.9: 0.70000"):
        assert text in page, text
    # Two lines in each of the three charts, and in the four of ranking and calibration.
    assert page.count("<path") == 2 * (3 + 4)
    with pytest.raises(ValueError, match="--force"):
        main(command)
    assert main([*command, "--force"]) == 0
