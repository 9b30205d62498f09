import logging

import pytest

from meshrec.cli import tune
from meshrec.train.tuning import Choices, Range, read_space, with_options
from tests.train.small import small

RECIPE = "tests/train/small.py:small"


def test_trials_are_kept_and_go_on_and_seeds_spread(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as for users: Optuna would configure logging
    args = [RECIPE, "--runs", str(tmp_path), "--space", "tables.lr=1e-3..1e-1:log", "model.embedding_dim=4,8"]
    assert tune.main([*args, "--trials", "2"]) == 0
    assert not logging.getLogger("meshrec").disabled
    first = capsys.readouterr().out
    assert "trial 1:" in first
    assert "best of 2:" in first
    assert tune.main([*args, "--trials", "3", "--seeds", "2"]) == 0
    second = capsys.readouterr().out
    assert "trial 2:" in second
    assert "trial 1:" not in second
    assert "--model.embedding_dim" in second
    assert "seed 1:" in second
    assert "auc" in second
    assert "+-" in second


def test_options_of_the_recipe_hold_for_all_trials(tmp_path, capsys):
    args = [RECIPE, "--trials", "1", "--runs", str(tmp_path), "--space", "model.embedding_dim=4"]
    assert tune.main([*args, "--training.max-steps", "2"]) == 0
    out = capsys.readouterr().out
    assert f"meshrec train {RECIPE} --training.max-steps 2 --model.embedding_dim 4" in out
    assert tune.main([RECIPE, "--help"]) == 0
    assert "--training.max-steps" in capsys.readouterr().out


def test_trials_on_two_ranks(tmp_path, capfd):
    args = [RECIPE, "--trials", "1", "--runs", str(tmp_path), "--training.max-steps", "2", "--nproc", "2"]
    assert tune.main(args) == 0
    assert "best of 1:" in capfd.readouterr().out


def test_spaces_are_read():
    recipe = small()
    words = ["tables.lr=1e-3..0.1:log", "training.batch_size=50..200", "dense.kind=adam,sgd"]
    assert read_space(words, recipe) == {
        "tables.lr": Range(1e-3, 0.1, True),
        "training.batch_size": Range(50, 200, False),
        "dense.kind": Choices(("adam", "sgd")),
    }
    low, high, log = read_space([], recipe)["tables.lr"]
    assert (low, high, log) == (pytest.approx(0.01), pytest.approx(1.0), True)
    assert with_options(recipe, {"tables.lr": 0.5}).tables.lr == 0.5


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--space", "tables.lr"], "write"),
        (["--space", "tables.magic=1..2"], "'tables.magic'"),
        (["--space", "tables.lr=2..1"], "LOW.*HIGH"),
        (["--space", "tables.lr=0..1:log"], "LOW.*HIGH.*above 0"),
        (["--space", "tables.lr=a..b"], "LOW.*HIGH"),
        (["--trials", "0"], "nothing"),
        (["--trials", "0", "--seeds", "1"], "deviation.*2"),
    ],
)
def test_what_cannot_be_searched(tmp_path, more, message):
    with pytest.raises(ValueError, match=message):
        tune.main([RECIPE, "--runs", str(tmp_path), *more])


def test_a_storage_that_is_no_study_is_named_and_stays(tmp_path):
    storage = tmp_path / "notes.db"
    storage.write_text("notes, and not a study")
    with pytest.raises(ValueError, match=f"{storage}.*not a database"):
        tune.main([RECIPE, "--runs", str(tmp_path), "--trials", "1", "--storage", str(storage)])
    assert storage.read_text() == "notes, and not a study"
