import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from meshrec.cli.__main__ import main
from meshrec.cli.train import RecipeCommand, _make_job, parse, table_optimizer
from meshrec.optim.optimizers import SGD, SPECS
from meshrec.train import resolve
from meshrec.train.run_folder import CONFIG, RunFolder
from tests.hostile.sockets import beyond_loopback, watched

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


@contextlib.contextmanager
def started(*arguments, more=None, **options):
    """The command in the foreground: what is started in the background has Ctrl-C ignored, by its shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(
            command(*arguments),
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**environment(), **(more or {})},
            **options,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        yield process


@pytest.fixture
def train(monkeypatch, capfd):
    """``train(*arguments)``: here, in this process; its exit code, output and errors, the ranks' too."""
    monkeypatch.chdir(ROOT)
    for name, value in environment().items():
        monkeypatch.setenv(name, value)

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["meshrec", "train", *map(str, arguments)])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def launching(train):
    """``train`` in a thread, a future: ranks can be disturbed meanwhile, and no handlers of signals stay."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda *arguments: thread.submit(train, *arguments)


def summary(folder):
    return json.loads((folder / "summary.json").read_text())


def test_the_launcher_of_ranks_imports_little(run_code):
    """Ranks wait for it: checkpoints and their sharded tensors take as long as all that it needs."""
    code = "import json, sys, meshrec.cli.train; print(json.dumps(sorted(sys.modules)))"
    done = run_code(code)
    heavy = ("torch.distributed.checkpoint", "torch.distributed.tensor", "meshrec.runs.worker")
    assert [name for name in json.loads(done.stdout) if name.startswith(heavy)] == []


@pytest.mark.parametrize("launcher", ["meshrec", "torchrun"])
def test_two_ranks_from_the_command_line(launching, tmp_path, launcher):
    options = ("--runs", tmp_path, "--name", "mine", "--training.epochs", "2", "--tables.lr=0.2")
    if launcher == "meshrec":
        code, output, errors = launching(SMALL, "--nproc", 2, *options, "--baselines").result(timeout=300)
    else:
        torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "meshrec")
        done = run(*map(str, options), launcher=torchrun)
        code, output, errors = done.returncode, done.stdout, done.stderr
    assert code == 0, errors
    found = summary(tmp_path / "mine")
    assert (found["state"], found["ranks"], found["step"]) == ("finished", 2, 20)
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["recipe"]["tables"]["lr"] == 0.2
    for text in ("plan:", "rank 1:", "report.html", "finished at step 20"):
        assert text in output, output
    assert ("logistic regression" in output) == (launcher == "meshrec")
    assert "Traceback" not in errors


def test_ctrl_c_stops_all_ranks_which_listened_on_loopback_only(train, tmp_path):
    endless = ("--nproc", "2", "--runs", str(tmp_path), "--training.epochs", "100000")
    # A user's own choice of an interface is for several machines.
    with started(*endless, more={"GLOO_SOCKET_IFNAME": "eth0"}, stderr=subprocess.PIPE) as process:
        metrics = tmp_path / "small-001" / "metrics.jsonl"
        listened = watched(process, until=metrics.exists)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=240)
    if sys.platform == "linux":  # it looks into /proc
        assert listened  # gloo's sockets
        assert beyond_loopback(listened) == set()
    assert process.returncode == 128 + signal.SIGINT, errors
    assert summary(tmp_path / "small-001")["state"] == "stopped"
    assert "stopped as requested, with a checkpoint" in output
    assert "Traceback" not in errors
    stopped = summary(tmp_path / "small-001")["step"]
    further = ("--training.epochs", "100000", "--training.max-steps", stopped + 5)
    code, _, errors = train(SMALL, "--nproc", "1", "--runs", tmp_path, "--resume", *further)
    assert code == 0, errors
    assert summary(tmp_path / "small-001")["step"] == stopped + 5


def test_a_mistake_that_ranks_find_ends_with_one_line(launching, tmp_path):
    options = ("--placement.memory-gib", "1e-6", "--runs", tmp_path)
    code, _, errors = launching(SMALL, "--nproc", 2, *options).result(timeout=300)
    assert code == 1
    assert "no plan fits" in errors
    assert errors.startswith("meshrec: ")
    assert errors.count("meshrec: ") == 1
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("nproc", "message"),
    [
        (3, "training.batch_size 100 cannot be divided among 3 ranks; take 99 or 102."),
        (0, "--nproc is 0; it must be at least 1."),
    ],
)
def test_mistakes_end_with_one_line(train, tmp_path, nproc, message):
    code, _, errors = train(SMALL, "--nproc", nproc, "--runs", tmp_path)
    assert code == 1
    assert errors == f"meshrec: {message}\n"


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--training.batch-size", "training.batch_size is 0; it must be at least 1."),
        ("--training.bach-size", "training.batch-size"),
    ],
)
def test_options_that_cannot_be_read_are_named(train, option, message):
    code, _, errors = train(SMALL, option, "0")
    assert code == 2
    assert message in errors


def test_unknown_recipes_and_help(train):
    code, _, errors = train("nothing")
    assert code == 1
    assert errors.startswith("meshrec: there is no recipe 'nothing'; there are")
    code, output, _ = train(SMALL, "--help")
    assert code == 0
    for option in (
        "--nproc",
        "--training.epochs",
        "--tables.lr",
        "--data.num-samples",
        "--placement.memory-gib",
    ):
        assert option in output


@pytest.mark.parametrize("spec", SPECS)
def test_every_fused_optimizer_can_be_chosen(spec):
    assert table_optimizer(spec.__name__, SGD(lr=0.3)) == spec(lr=0.3)


def test_an_argument_too_many_is_named(train, tmp_path):
    options = ["--runs", tmp_path, "--nproc", "1", "--training.max-steps", "2"]
    code, _, errors = train(SMALL, *options, "leftover")
    assert code == 2
    assert "leftover" in errors
    code, _, errors = train(*options, SMALL)
    assert code == 2
    assert "RECIPE" in errors or "recipe" in errors


def test_a_resumed_run_keeps_its_configuration(train, tmp_path):
    options = ("--runs", tmp_path, "--name", "mine")
    code, _, errors = train(SMALL, *options, "--training.epochs", "3", "--training.max-steps", "4")
    assert code == 0, errors
    resume = ("--resume", *options)
    code, output, errors = train(*resume, "--training.max-steps", "8", "--tables.lr", "0.5")
    assert code == 0, errors
    assert f"resuming {tmp_path / 'mine'} from step 4" in output
    assert "tables.lr 0.1 -> 0.5" in output
    config = json.loads((tmp_path / "mine" / "config.json").read_text())
    assert config["recipe"]["training"]["epochs"] == 3
    assert config["recipe"]["tables"]["lr"] == 0.5
    assert [start["from_step"] for start in config["starts"]] == [0, 4]
    assert config["starts"][1]["changes"] == [["tables.lr", 0.1, 0.5], ["training.max_steps", 4, 8]]
    code, _, errors = train(*resume, "--model.embedding-dim", "16")
    assert code == 1
    assert "model.embedding_dim was 8 in this run and cannot become 16" in errors


def test_a_rank_that_is_lost_is_named(launching, tmp_path):
    """One that stops; ``tests/hostile/test_ranks.py`` kills others, at other moments."""
    message = "rank 1 stopped answering"
    options = ("--runs", tmp_path, "--name", "mine", "--training.checkpoint-every", "20")
    run = launching(SMALL, "--nproc", 2, *options, "--training.epochs", "100000", "--rank-timeout", "3")
    folder = tmp_path / "mine"
    deadline = time.monotonic() + 240
    while not list(folder.glob("checkpoints/*/manifest.json")) and time.monotonic() < deadline:
        assert not run.done(), run.result()
        time.sleep(0.1)
    os.kill(int((folder / ".process_rank1").read_text()), signal.SIGSTOP)
    code, _, errors = run.result(timeout=100)
    assert code == 1
    assert message in errors
    assert f"Its log is {folder / 'log_rank1.txt'}" in errors
    assert f"meshrec train --resume --name mine --runs {tmp_path}" in errors
    assert "Traceback" not in errors
    state = json.loads((folder / "state.json").read_text())
    assert state["state"] == "failed"
    assert message in state["error"]
    assert (folder / "report.html").is_file()


# While modules are imported, and with MESHREC_THOROUGH also while ranks start.
@pytest.mark.parametrize("seconds", [1.0, 2.0, 3.0] if "MESHREC_THOROUGH" in os.environ else [1.0])
def test_ctrl_c_in_the_first_seconds_leaves_no_traceback(tmp_path, seconds):
    arguments = ("--nproc", "2", "--runs", str(tmp_path))
    with started(*arguments, stderr=subprocess.STDOUT, start_new_session=True) as process:
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the server of forks gets it, too
        output, _ = process.communicate(timeout=240)
    assert "Traceback" not in output
    # On a busy machine it comes before Python has taken the signal over; to a shell both are 130.
    assert process.returncode in (128 + signal.SIGINT, -signal.SIGINT)


def test_a_resumed_run_keeps_its_baselines(tmp_path):
    folder, recipe = RunFolder(tmp_path), resolve("synthetic_clicks")
    folder.write_json(CONFIG, {"baselines": True})
    options, _ = parse("synthetic_clicks", [], recipe)
    for resumed, expected in ((folder, True), (None, False)):
        job = _make_job(RecipeCommand("synthetic_clicks", recipe, [], resumed), options, recipe)
        assert job.baselines is expected
