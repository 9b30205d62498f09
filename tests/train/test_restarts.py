"""A rank of `meshrec train` is killed: all start anew, and end with the bits of a run that was left alone."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.cli.train import main
from meshrec.runs.job import Job
from meshrec.runs.worker import run_rank
from meshrec.train.run_folder import RunFolder

ROOT = Path(__file__).parents[2]


RECIPE = "tests/train/small.py:small"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}


def arguments(folder, *options):
    options = ["--training.checkpoint-every", "10", *options]
    return [RECIPE, "--nproc", "2", "--runs", str(folder), "--name", "mine", "--quiet", *options]


def start(folder, *options):
    return subprocess.Popen(
        [sys.executable, "-m", "meshrec", "train", *arguments(folder, *options)],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def undisturbed(folder, recipe):
    """The same on a rank that is there already."""
    run_rank(Job(recipe=recipe, name="mine", runs=folder, device="cpu"), lambda _: lambda _: None)


def ranks_of(folder):
    """The process IDs of its two ranks."""
    return [int(RunFolder(folder / "mine").process(rank).read_text()) for rank in range(2)]


def checksums(folder):
    manifest = read_manifest(CheckpointManager(folder / "mine" / "checkpoints").path(100))
    return {
        name: [piece.checksums for piece in record.pieces]
        for name, record in manifest.tensors.items()
        if record.entry != "random"
    }


def until(condition):
    deadline = time.monotonic() + 240
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_ranks_save_and_end_when_their_launcher_is_killed(tmp_path):
    process = start(tmp_path, "--training.epochs", "100000")
    checkpoints = CheckpointManager(tmp_path / "mine" / "checkpoints")
    until(checkpoints.steps)
    before, ranks = checkpoints.steps()[-1], ranks_of(tmp_path)
    assert all(Path(f"/proc/{pid}").exists() for pid in ranks)
    process.kill()
    process.communicate(timeout=240)  # until nobody holds its output: the ranks are gone
    assert checkpoints.steps()[-1] > before


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_rank_does_not_change_the_result(tmp_path, ranks, small, monkeypatch):
    ranks(2).run(undisturbed, tmp_path / "undisturbed", small(epochs=10, checkpoint_every=10))
    monkeypatch.chdir(ROOT)
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    options = ("--training.epochs", "10", "--max-restarts", "2")
    with ThreadPoolExecutor(1) as thread:  # where the launcher takes over no signals
        run = thread.submit(main, arguments(tmp_path / "disturbed", *options))
        checkpoints = CheckpointManager(tmp_path / "disturbed" / "mine" / "checkpoints")
        until(lambda: checkpoints.steps() or run.done())
        started = ranks_of(tmp_path / "disturbed")
        os.kill(started[1], signal.SIGKILL)
        assert run.result(timeout=300) == 0
    assert checksums(tmp_path / "disturbed") == checksums(tmp_path / "undisturbed")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
