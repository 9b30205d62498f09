import sys
from pathlib import Path

import pytest

from meshrec.cli.__main__ import main
from meshrec.runs.lock import RunLock
from meshrec.train.run_folder import RunFolder

ROOT = Path(__file__).parents[2]
SMALL = f"{ROOT}/tests/train/small.py:small"


@pytest.fixture
def type_in(monkeypatch, capfd, tmp_path):
    """``type_in(*words)``: an exit code and what was printed, in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def call(*words):
        monkeypatch.setattr(sys, "argv", ["meshrec", *words])
        return main(), *capfd.readouterr()

    return call


def test_a_finished_run_is_left_as_it_is(type_in, tmp_path):
    code, output, errors = type_in("train", SMALL, "--baselines", "--quiet")
    assert code == 0, errors
    for command in ("evaluate runs/small-001", "predict runs/small-001", "export runs/small-001", "serve "):
        assert f"meshrec {command}" in output
    summary = tmp_path / "runs" / "small-001" / "summary.json"
    before = summary.read_text()
    code, output, _ = type_in("train", SMALL, "--resume")
    assert code == 0
    assert output == "runs/small-001 is finished, at step 10: give more --training.epochs to train longer.\n"
    assert summary.read_text() == before
    code, output, _ = type_in("train", SMALL, "--resume", "--quiet", "--training.epochs", "2")
    assert code == 0
    assert "finished at step 20" in output
    code, output, _ = type_in("checkpoint", "inspect", "small-001")
    assert code == 0
    assert "saved by 1 ranks" in output


def test_a_worker_of_ray_can_lock_the_run_that_it_resumes(type_in, tmp_path, monkeypatch):
    def train_on_ray(job, *_):
        locked.append(RunLock(RunFolder(job.runs / job.name)).release())
        return 0

    locked = []
    monkeypatch.setattr("meshrec.cli.on_ray.train_on_ray", train_on_ray)
    code, _, errors = type_in("train", SMALL, "--quiet", "--training.max-steps", "2")
    assert code == 0, errors
    more = ("--training.max-steps", "4", "--on", "ray", "--num-workers", "2")
    code, _, errors = type_in("train", SMALL, "--name", "small-001", "--resume", *more)
    assert (code, len(locked)) == (0, 1), errors
