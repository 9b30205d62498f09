"""Whose code a run executes."""

import json
import logging
import os
import shutil
import sys
from pathlib import Path

import pytest

from meshrec.cli.evaluate import main as evaluate
from meshrec.runs import load_recipe
from meshrec.runs.job import Job
from meshrec.runs.source import copy_source, key_path
from meshrec.runs.worker import run_rank
from meshrec.train import RunFolder, find_run, resolve
from meshrec.train.run_folder import CONFIG, to_json

MINE = """
from pathlib import Path

from kept_helpers.sizes import BATCH
from kept_neighbour import EPOCHS
from tests.train.small import small

Path(__file__).with_name("executed").write_text(__file__)


def mine():
    return small(epochs=EPOCHS, batch_size=BATCH)
"""
SPY = """
from tests.train.small import small as mine

open({!r}, "w").write(__file__)
"""


@pytest.fixture(autouse=True)
def _own_key(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield
    for name in [name for name in sys.modules if name.startswith(("kept_", "meshrec_recipe_mine"))]:
        del sys.modules[name]


def forget_modules():
    """As in a new process."""
    for name in [name for name in sys.modules if name.startswith(("kept_", "meshrec_recipe_mine"))]:
        del sys.modules[name]


@pytest.fixture
def origin(tmp_path):
    """A folder with a recipe that imports its neighbours."""
    folder = tmp_path / "origin"
    (folder / "kept_helpers").mkdir(parents=True)
    (folder / "mine.py").write_text(MINE)
    (folder / "kept_neighbour.py").write_text("EPOCHS = 1\n")
    (folder / "kept_helpers" / "sizes.py").write_text("BATCH = 100\n")
    return folder


@pytest.fixture
def run(origin, tmp_path):
    """A run as training leaves it, without the training."""
    folder = RunFolder(tmp_path / "runs" / "mine")
    folder.path.mkdir(parents=True)
    keep(folder, f"{origin / 'mine.py'}:mine")
    (origin / "executed").unlink()
    forget_modules()
    return folder


def keep(folder, source):
    recipe = resolve(source)
    config = {"recipe": to_json(recipe), "source": source, "code": copy_source(folder, source)}
    folder.write_json(CONFIG, config)


def test_a_run_keeps_its_source_and_executes_the_original_while_it_is_the_same(run, origin):
    copy = run.path / "source"
    for name in ("mine.py", "kept_neighbour.py", "kept_helpers/sizes.py"):
        assert (copy / name).read_bytes() == (origin / name).read_bytes()
    assert set(run.read_json(CONFIG)["code"]["files"]) == {
        "mine.py",
        "kept_neighbour.py",
        "kept_helpers/sizes.py",
    }
    assert load_recipe(run).training.batch_size == 100
    assert (origin / "executed").read_text() == str(origin / "mine.py")
    assert key_path().stat().st_mode & 0o777 == 0o600
    assert key_path().parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("change", ["the recipe", "a neighbour", "all is gone"])
def test_the_copy_is_executed_where_the_original_has_changed(run, origin, change, caplog):
    if change == "all is gone":
        shutil.rmtree(origin)
    else:
        name = "mine.py" if change == "the recipe" else "kept_helpers/sizes.py"
        (origin / name).write_text("raise RuntimeError('this is not what was trained')")
    # Nothing else in the copy's folder is looked at, such as modules that hide others.
    (run.path / "source" / "kept_helpers" / "__pycache__").mkdir()
    (run.path / "source" / "json.py").write_text("raise RuntimeError")
    with caplog.at_level(logging.WARNING):
        recipe = load_recipe(run)
    assert recipe.training.batch_size == 100
    assert "has changed: the run's own copy in" in caplog.text
    assert (run.path / "source" / "executed").read_text() == str(run.path / "source" / "mine.py")
    assert not list(run.path.rglob("*.pyc"))


def test_a_copy_that_was_changed_is_refused(run, origin):
    shutil.rmtree(origin)
    (run.path / "source" / "kept_neighbour.py").write_text("raise RuntimeError")
    with pytest.raises(ValueError, match="changed"):
        load_recipe(run)


def test_code_of_others_is_not_executed(run, origin, tmp_path):
    """Each of these names or holds other code than this user trained with."""
    spied = tmp_path / "spied"
    evil = tmp_path / "evil.py"
    evil.write_text(SPY.format(str(spied)))
    config = run.read_json(CONFIG)
    code = config["code"]
    other = {"origin": str(tmp_path), "files": {"evil.py": "00"}, "seal": code["seal"]}
    forged = [
        {**config, "source": f"{evil}:mine"},
        {**config, "source": "antigravity:fly"},
        {**config, "source": f"{evil}:mine", "code": other},
        {**config, "source": f"{evil}:mine", "code": {**other, "seal": None}},
        {**config, "source": f"{evil}:mine", "code": None},
        {**config, "source": f"{evil}:mine", "code": "words"},
        {**config, "code": {**code, "origin": str(tmp_path)}},
        {**config, "code": {**code, "files": {**code["files"], "mine.py": "00"}}},
        {**config, "code": {**code, "seal": "00" * 32}},
    ]
    for each in forged:
        run.write_json(CONFIG, each)
        with pytest.raises(ValueError, match="--trust"):
            load_recipe(run)
    assert not spied.exists()
    assert not (origin / "executed").exists()
    assert "antigravity" not in sys.modules


def test_a_run_of_another_user_is_executed_once_that_is_confirmed(run, origin, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    with pytest.raises(ValueError, match="trained") as told:
        load_recipe(find_run(run.path))
    assert str(run.path / "source" / "mine.py") in str(told.value)  # what is to be read
    recipe = load_recipe(find_run(run.path, trust=True))
    assert recipe.training.batch_size == 100
    assert not (origin / "executed").exists()  # the copy was read, so the copy is executed
    # A run that goes on then is this user's.
    config = run.read_json(CONFIG)
    config["code"] = copy_source(run, config["source"], config["code"])
    run.write_json(CONFIG, config)
    assert config["code"]["origin"] == str(origin)
    assert load_recipe(find_run(run.path)).training.batch_size == 100


def test_a_key_that_others_can_read_seals_nothing(run, origin, caplog):
    key_path().chmod(0o644)
    with pytest.raises(ValueError, match="chmod 600"):
        load_recipe(run)
    with caplog.at_level(logging.WARNING):
        entry = copy_source(run, f"{origin / 'mine.py'}:mine")
    assert entry["seal"] is None
    assert "gets no seal, so that commands which read this run will ask for --trust" in caplog.text
    key_path().chmod(0o600)
    key_path().write_bytes(b"short")
    with pytest.raises(ValueError, match="damaged"):
        load_recipe(run)


def test_recipes_that_come_along_need_no_trust(tmp_path):
    folder = RunFolder(tmp_path)
    assert copy_source(folder, "dlrm_benchmark") is None
    assert copy_source(folder, None) is None
    folder.write_json(CONFIG, {"recipe": to_json(resolve("dlrm_benchmark")), "source": "dlrm_benchmark"})
    assert load_recipe(folder).name == "dlrm_benchmark"


def test_modules_are_kept_to_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    keep(folder, "tests.train.small:small")
    assert (tmp_path / "source" / "tests" / "train" / "small.py").is_file()
    assert load_recipe(folder).name == "small"
    config = json.loads((tmp_path / CONFIG).read_text())
    folder.write_json(CONFIG, {**config, "code": None})
    with pytest.raises(ValueError, match=r"source/tests/train/small.py"):
        load_recipe(folder)


def test_training_keeps_the_source(tmp_path, small, monkeypatch):
    source = f"{Path(__file__).parents[1] / 'train' / 'small.py'}:small"
    job = Job(recipe=small(max_steps=1), source=source, name="x", runs=tmp_path, device="cpu")
    run_rank(job, lambda _: lambda _: None)
    assert load_recipe(find_run("x", tmp_path)).training.max_steps == 1
    assert (tmp_path / "x" / "source" / "small.py").is_file()
    assert os.listdir(tmp_path / "x" / "source") == ["small.py"]
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another"))
    arguments = [str(tmp_path / "x"), "--data", "x.parquet"]
    with pytest.raises(ValueError, match="executed"):
        evaluate(arguments)
    with pytest.raises(ValueError, match="SyntheticClicks"):  # it was, and tells what is next
        evaluate([*arguments, "--trust"])
