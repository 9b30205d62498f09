import logging
import sys
from types import SimpleNamespace

import pytest

from meshrec.train import RunFolder
from meshrec.train.observers import Evaluated, Finished, Logged, Reported, Started
from meshrec.train.trackers import WandbObserver, find_trackers, make_trackers, named_metrics

LINE = {"kind": "train", "step": 3, "seconds": 1.5, "loss": 0.5, "lr": 0.1, "ndcg@10": 0.2}
TEST = {"kind": "test", "step": 2, "seconds": 2.5, "auc": 0.7, "loss": float("inf")}
SUMMARY = {"state": "finished", "best_step": 2}


def started(recipe, folder, first_step=0):
    values = dict.fromkeys(Started._fields, 0)
    return Started(**{**values, "recipe": recipe, "folder": folder, "first_step": first_step})


def tell(observer, recipe, folder, first_step=0):
    begin = started(recipe, folder, first_step)
    for event in (begin, Logged(LINE), Reported("x"), Evaluated(TEST, False), Finished(SUMMARY)):
        observer(event)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small-001").mkdir()
    return RunFolder(tmp_path / "small-001")


def test_only_finite_metrics_with_their_kind():
    assert named_metrics(TEST) == {"test/auc": 0.7, "test/seconds": 2.5}


@pytest.mark.filterwarnings("ignore")
def test_mlflow_keeps_a_run(folder, small, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    for first_step in (0, 3):  # the second is the first one resumed
        (observer,) = make_trackers("mlflow", folder)
        tell(observer, small(), folder, first_step)
    client = mlflow.tracking.MlflowClient(f"sqlite:///{folder.path.parent / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("small").experiment_id])
    assert run.info.run_name == "small-001"
    assert run.info.status == "FINISHED"
    assert run.data.params["training.batch_size"] == "100"
    assert run.data.metrics["train/loss"] == 0.5
    assert run.data.metrics["train/ndcg_at_10"] == 0.2
    assert run.data.metrics["test/auc"] == 0.7


class Wandb:
    """What is used of its API, remembered."""

    def __init__(self):
        self.begun, self.logged, self.summary, self.finished = {}, [], {}, False

    def init(self, **options):
        self.begun = options
        return self

    def log(self, values):
        self.logged.append(values)

    def finish(self):
        self.finished = True


def test_a_run_keeps_its_own_id_in_wandb(folder, small, monkeypatch, tmp_path):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=wandb.init))
    tell(WandbObserver(folder), small(), folder)
    assert wandb.begun["name"] == "small-001"
    first = wandb.begun["id"]
    tell(WandbObserver(folder), small(), folder, 3)  # resumed
    assert wandb.begun["id"] == first
    folder = RunFolder(tmp_path / "elsewhere" / "small-001")
    folder.path.mkdir(parents=True)
    tell(WandbObserver(folder), small(), folder)
    assert wandb.begun["id"] != first


def test_wandb_is_told_options_and_metrics(folder, small, monkeypatch):
    wandb = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=wandb.init))
    tell(WandbObserver(folder), small(), folder)
    assert wandb.begun["project"] == "small"
    assert wandb.begun["config"]["training.batch_size"] == 100
    assert [each["trained_step"] for each in wandb.logged] == [3, 2]
    assert wandb.logged[1]["test/auc"] == 0.7
    assert wandb.summary == SUMMARY
    assert wandb.finished


@pytest.mark.filterwarnings("ignore")
def test_wandb_offline(folder, small, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tell(WandbObserver(folder), small(), folder)
    assert list((folder.path.parent / "wandb").glob("offline-run-*"))


MINE = """
def observer(folder):
    def observe(event):
        with (folder.path / "told").open("a") as told:
            print(type(event).__name__, file=told)
    return observe
def broken(folder):
    def observe(event):
        raise OSError("no more room")
    return observe
"""


def test_observers_of_users_and_faulty_ones(folder, small, tmp_path, caplog):
    (tmp_path / "mine.py").write_text(MINE)
    own, broken = make_trackers(f"{tmp_path}/mine.py:observer, {tmp_path}/mine.py:broken", folder)
    with caplog.at_level(logging.WARNING, "meshrec"):
        for each in (own, broken):
            tell(each, small(), folder)
    told = (folder.path / "told").read_text().split()
    assert told == ["Started", "Logged", "Reported", "Evaluated", "Finished"]
    (line,) = [record.message for record in caplog.records]
    assert line.endswith("broken failed and gets no more events: OSError: no more room")


def test_unknown_names(folder):
    with pytest.raises(ValueError, match="--track"):
        make_trackers("neptune", folder)
    assert make_trackers("", folder) == []


def test_packages_that_are_not_there_are_named_before_the_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ModuleNotFoundError, match=r"\[wandb\]"):
        find_trackers("wandb")
