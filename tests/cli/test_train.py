import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SMALL = "tests/train/small.py:small"
ROOT = Path(__file__).parents[2]


def command(*arguments, launcher=("-m", "meshrec")):
    return [sys.executable, *launcher, "train", SMALL, *arguments]


def environment():
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}


def run(*arguments, **options):
    return subprocess.run(
        command(*arguments, **options),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=300,
    )


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


@pytest.mark.parametrize("launcher", ["meshrec", "torchrun"])
def test_two_ranks_from_the_command_line(tmp_path, launcher):
    options = ("--runs", str(tmp_path), "--name", "mine", "--training.epochs", "2", "--tables.lr", "0.2")
    if launcher == "meshrec":
        done = run("--nproc", "2", *options)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshrec")
        done = run(*options, launcher=torchrun)
    assert done.returncode == 0, done.stderr
    found = summary(tmp_path / "mine")
    assert (found["state"], found["ranks"], found["step"]) == ("finished", 2, 20)
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["recipe"]["tables"]["lr"] == 0.2
    for text in ("plan:", "rank 1:", "logistic regression", "report.html", "finished at step 20"):
        assert text in done.stdout, done.stdout
    assert "Traceback" not in done.stderr


def test_ctrl_c_stops_all_ranks(tmp_path):
    process = subprocess.Popen(
        command("--nproc", "2", "--runs", str(tmp_path), "--training.epochs", "100000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    metrics = tmp_path / "small-001" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while not metrics.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGINT, errors
    assert summary(tmp_path / "small-001")["state"] == "stopped"
    assert "stopped as asked, with a checkpoint" in output
    assert "Traceback" not in errors
    stopped = summary(tmp_path / "small-001")["step"]
    further = ("--training.epochs", "100000", "--training.max-steps", str(stopped + 5))
    done = run("--nproc", "1", "--runs", str(tmp_path), "--resume", *further)
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "small-001")["step"] == stopped + 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--nproc", "3"), "training.batch_size 100 cannot be divided among 3 ranks; take 99 or 102."),
        (("--nproc", "0"), "--nproc is 0; it must be at least 1."),
        (("--nproc", "2", "--placement.memory-gib", "1e-6"), "no plan fits"),
    ],
)
def test_mistakes_end_with_one_line(tmp_path, arguments, message):
    done = run(*arguments, "--runs", str(tmp_path))
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("meshrec: ")
    assert done.stderr.count("meshrec: ") == 1
    assert "Traceback" not in done.stderr


def test_options_that_cannot_be_read_are_named():
    done = run("--training.batch-size", "0")
    assert done.returncode == 2
    assert "training.batch_size is 0; it must be at least 1." in done.stderr
    done = run("--training.bach-size", "0")
    assert done.returncode == 2
    assert "training.batch-size" in done.stderr
    assert "Traceback" not in done.stderr


def test_unknown_recipes_and_help():
    done = subprocess.run(
        [sys.executable, "-m", "meshrec", "train", "nothing"],
        capture_output=True,
        text=True,
        env=environment(),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("meshrec: there is no recipe 'nothing'; there are")
    done = run("--help")
    assert done.returncode == 0
    for option in (
        "--nproc",
        "--training.epochs",
        "--tables.lr",
        "--data.num-samples",
        "--placement.memory-gib",
    ):
        assert option in done.stdout
