"""A rank of `meshrec train` is killed: all start anew, and end with the bits of a run that was left alone."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.train.worker import Job, work

ROOT = Path(__file__).parents[2]


def start(folder, *options):
    command = [sys.executable, "-m", "meshrec", "train", "tests/train/small.py:small", "--nproc", "2"]
    command += ["--runs", str(folder), "--name", "mine", "--quiet"]
    command += ["--training.epochs", "20", "--training.checkpoint-every", "10", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def undisturbed(folder, recipe):
    """The same on a rank that is there already."""
    work(Job(recipe=recipe, name="mine", runs=folder, device="cpu"), lambda _: lambda _: None)


def ranks_of(process):
    """The processes that the launcher has started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == process.pid and b"train" in command:
            found.append(int(path.parent.name))
    return found


def finished(process):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output.decode()


def checksums(folder):
    manifest = read_manifest(CheckpointManager(folder / "mine" / "checkpoints").path(200))
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
    before, ranks = checkpoints.steps()[-1], ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    process.communicate(timeout=240)  # until nobody holds its output: the ranks are gone
    assert checkpoints.steps()[-1] > before


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_killed_rank_does_not_change_the_result(tmp_path, ranks, small):
    ranks(2).run(undisturbed, tmp_path / "undisturbed", small(epochs=20, checkpoint_every=10))
    process = start(tmp_path / "disturbed", "--max-restarts", "2")
    checkpoints = CheckpointManager(tmp_path / "disturbed" / "mine" / "checkpoints")
    until(checkpoints.steps)
    started = ranks_of(process)
    assert len(started) == 2
    os.kill(started[1], signal.SIGKILL)
    finished(process)
    assert checksums(tmp_path / "disturbed") == checksums(tmp_path / "undisturbed")
    assert not [pid for pid in started if Path(f"/proc/{pid}").exists()]
