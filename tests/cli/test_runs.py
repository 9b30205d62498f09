import json

import pytest

from meshrec.cli.runs import RunsOptions, run
from meshrec.train.run_folder import CONFIG, SUMMARY, RunFolder


@pytest.fixture
def runs(tmp_path):
    for name, auc, lr in (("a", 0.7, 0.1), ("b", 0.75, 0.2)):
        folder = RunFolder(tmp_path / name)
        folder.path.mkdir()
        folder.write_json(
            CONFIG, {"recipe": {"name": "small", "lr": lr}, "ranks": 2, "began": f"2026-01-0{name}"}
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
    run(RunsOptions(words=("compare", "a", "b"), runs=runs))
    out = capsys.readouterr().out
    assert "+0.05" in out
    assert "rank 0: lookup, ms" in out
    assert "recipe.lr" in out
    assert "recipe.name" not in out  # the same in both


def test_mistakes_are_named(runs, tmp_path):
    with pytest.raises(ValueError, match=r"there is no run 'c' in /.*; there are: a, b"):
        run(RunsOptions(words=("compare", "a", "c"), runs=runs))
    with pytest.raises(ValueError, match=r"write `meshrec runs`, `meshrec runs compare A B ...`"):
        run(RunsOptions(words=("delete",), runs=runs))
    with pytest.raises(ValueError, match=r"holds no run; start one: meshrec train RECIPE"):
        run(RunsOptions(runs=tmp_path / "nowhere"))
