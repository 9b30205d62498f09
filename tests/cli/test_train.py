import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshrec.cli.train import recipe_at

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
    options = (
        "--runs",
        str(tmp_path),
        "--name",
        "mine",
        "--training.epochs",
        "2",
        "--tables.lr=0.2",
        "--baselines",
    )
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


@pytest.mark.parametrize(
    ("words", "at"),
    [
        (["--nproc", "2", "mine.py:f", "--quiet"], 2),
        (["--quiet", "movielens_dlrm"], 1),
        (["--nproc=2", "--training.epochs", "3", "a.b:f"], 3),
        (["--training.bf16", "movielens_dlrm", "--name", "x"], 1),
        (["--placement.sharding-types", "row_wise", "table_wise", "movielens_dlrm"], 3),
        (["--name", "movielens_dlrm", "--resume"], None),
        (["--help"], None),
    ],
)
def test_the_recipe_is_found_wherever_it_stands(words, at):
    assert recipe_at(words) == at


def test_options_stand_before_the_recipe_and_what_is_left_over_is_named(tmp_path):
    options = ["--runs", str(tmp_path), "--nproc", "1", "--training.max-steps", "2"]
    launcher = [sys.executable, "-m", "meshrec", "train"]
    done = subprocess.run(
        [*launcher, *options, SMALL], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert summary(tmp_path / "small-001")["step"] == 2
    done = subprocess.run(
        [*launcher, *options, SMALL, "leftover"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(),
        timeout=300,
    )
    assert done.returncode == 2
    assert "leftover" in done.stderr


def test_a_resumed_run_keeps_its_configuration(tmp_path):
    options = ("--runs", str(tmp_path), "--name", "mine")
    done = run(*options, "--training.epochs", "3", "--training.max-steps", "4")
    assert done.returncode == 0, done.stderr
    command = [sys.executable, "-m", "meshrec", "train", "--resume", *options]

    def resumed(*changes):
        return subprocess.run(
            [*command, *changes], capture_output=True, text=True, cwd=ROOT, env=environment(), timeout=300
        )

    done = resumed("--training.max-steps", "8", "--tables.lr", "0.5")
    assert done.returncode == 0, done.stderr
    assert f"resuming {tmp_path / 'mine'} from step 4" in done.stdout
    assert "tables.lr 0.1 -> 0.5" in done.stdout
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["recipe"]["training"]["epochs"] == 3
    assert config["recipe"]["tables"]["lr"] == 0.5
    assert [start["from_step"] for start in config["starts"]] == [0, 4]
    assert config["starts"][1]["changes"] == [["tables.lr", 0.1, 0.5], ["training.max_steps", 4, 8]]
    done = resumed("--model.embedding-dim", "16")
    assert done.returncode == 1
    assert "model.embedding_dim was 8 in this run and cannot become 16" in done.stderr


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGKILL, "rank 1 was killed by signal 9 (SIGKILL)"),
        (signal.SIGSTOP, "rank 1 did not answer any more"),
    ],
)
def test_a_rank_that_is_lost_is_named(tmp_path, number, message):
    options = ("--runs", str(tmp_path), "--name", "mine", "--training.checkpoint-every", "20")
    process = subprocess.Popen(
        command("--nproc", "2", *options, "--training.epochs", "100000", "--rank-timeout", "8"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    folder = tmp_path / "mine"
    deadline = time.monotonic() + 240
    while not list(folder.glob("checkpoints/*/manifest.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    os.kill(int((folder / ".process_rank1").read_text()), number)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 1
    assert message in errors
    assert f"Its log is {folder / 'log_rank1.txt'}" in errors
    assert f"meshrec train --resume --name mine --runs {tmp_path}" in errors
    assert "Traceback" not in errors
    state = json.loads((folder / "state.json").read_text())
    assert state["state"] == "failed"
    assert message in state["error"]
    assert (folder / "report.html").is_file()


def test_ctrl_c_in_the_first_seconds_leaves_no_traceback(tmp_path):
    for seconds in (0.3, 2.0):
        process = subprocess.Popen(
            command("--nproc", "2", "--runs", str(tmp_path)),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(),
        )
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=240)
        assert "Traceback" not in output
        assert process.returncode == 128 + signal.SIGINT
