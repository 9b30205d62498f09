"""``meshrec follow``: ranks, signals, kills, resuming, and a start from a trained run."""

import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.checkpoint.delta_files import verify_deltas
from meshrec.cli.__main__ import main
from meshrec.data.features.values import kind_of
from meshrec.export import Predictor
from meshrec.runs.fitting import store_columns, stored_columns
from meshrec.runs.following import follow_rank
from meshrec.runs.job import Job
from meshrec.train.run_folder import RunFolder
from meshrec.train.stream_options import StreamOptions
from tests.data.broker_servers import redis_server  # noqa: F401 - a fixture
from tests.forked import ForkedProgram
from tests.train.events import events, recipe, write_events

ROOT = Path(__file__).parents[2]
RECIPE = "tests/train/events.py:recipe"
FITTED = "tests/train/events.py:fitted"


@pytest.fixture
def meshrec(monkeypatch, capfd, tmp_path):
    """``meshrec(*words)``: the command here, with runs in a folder of the test; exit code, output, errors."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT}/src")

    def call(*words):
        monkeypatch.setattr("sys.argv", ["meshrec", *map(str, words), "--runs", str(tmp_path / "runs")])
        try:
            code = main()
        except SystemExit as ended:
            code = ended.code
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def follow(meshrec, tmp_path):
    """``follow(name, *words)``: follow the folder ``in`` until no events come any more."""

    def call(name, *words, source=True):
        named = [RECIPE, tmp_path / "in", "--time", "ts"] if source else []
        idle = ("--name", name, "--stop-when-idle", "0.2", "--quiet")
        return meshrec("follow", *named, *idle, *words)

    return call


@pytest.fixture
def runs(tmp_path):
    for first in range(0, 1200, 400):
        write_events(tmp_path / "in", first, 400)
    return tmp_path / "runs"


def checksums(run):
    manifest = read_manifest(CheckpointManager(run / "checkpoints").latest())
    assert manifest.values["progress"]["content"]["num_samples"] == 20 * manifest.step
    return manifest.step, {
        name: [piece.checksums for piece in record.pieces]
        for name, record in manifest.tensors.items()
        if record.entry not in ("random", "windows")
    }


def until(condition):
    deadline = time.monotonic() + 240
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def state(run):
    return json.loads((run / "summary.json").read_text())["state"]


OFTEN = ("--checkpoint-minutes", "0.001", "--delta-seconds", "0.02", "--log-seconds", "0.05")


def undisturbed(events, folder):
    """The same on ranks that are there already."""
    options = StreamOptions(time="ts", stop_when_idle=0.2)
    job = Job(recipe=recipe(), name="whole", runs=folder, device="cpu", stream=events, stream_options=options)
    follow_rank(job, lambda _: lambda _: None)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_killed_run_ends_with_the_weights_of_an_uninterrupted_one(follow, ranks, runs, num_ranks):
    if num_ranks == 1:
        undisturbed(str(runs.parent / "in"), runs)
    else:
        ranks(2).run(undisturbed, str(runs.parent / "in"), runs)
    # A single rank is a process of its own only with restarts.
    restarts = 1 if num_ranks == 1 else 0
    with ThreadPoolExecutor(1) as thread:  # where the launcher takes over no signals
        run = thread.submit(follow, "killed", "--nproc", num_ranks, "--max-restarts", restarts, *OFTEN)
        steps = CheckpointManager(runs / "killed" / "checkpoints").steps
        first = random.randrange(1, 40)
        until(lambda: run.done() or (steps() or [0])[-1] >= first)
        rank = random.randrange(num_ranks)
        if not run.done():
            os.kill(int(RunFolder(runs / "killed").process(rank).read_text()), signal.SIGKILL)
        code, _, errors = run.result(timeout=300)
    if num_ranks == 2:
        assert code == 0 or "meshrec follow --resume --name killed" in errors
        assert follow("killed", "--resume", source=False)[0] == 0
    assert checksums(runs / "killed") == checksums(runs / "whole")
    assert verify_deltas(runs / "killed" / "deltas")[-1].step == 60
    lines = [line for line in RunFolder(runs / "killed").metrics() if line["kind"] == "train"]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    # Windows count each event once, too.
    assert lines[-1]["samples@day"] == 1200


def test_ctrl_c_saves_and_a_run_continues_on_another_number_of_ranks(follow, runs, tmp_path):
    command = ["follow", RECIPE, tmp_path / "in", "--time", "ts", "--runs", runs, "--name", "mine", "--quiet"]
    program = ForkedProgram("meshrec.cli.__main__:main", [*command, "--nproc", "2", *OFTEN], cwd=ROOT)
    until(lambda: CheckpointManager(runs / "mine" / "checkpoints").steps()[-1:] == [60])
    program.send_signal(signal.SIGINT)
    assert program.wait(240) == 128 + signal.SIGINT
    assert state(runs / "mine") == "stopped"
    # A stream has no end, so it writes no files that only grow.
    assert not [*(runs / "mine").glob("events.out.*")]
    write_events(tmp_path / "in", 1200, 200)
    code, output, _ = follow("mine", "--resume", "--nproc", "1", source=False)
    assert code == 0
    assert "resuming" in output
    # The options of the first start still hold: the delta has come by the clock, and the column has the time.
    assert checksums(runs / "mine")[0] == 70
    config = RunFolder(runs / "mine").read_json("config.json")
    assert config["stream_options"]["delta_seconds"] == 0.02
    lines = [line for line in RunFolder(runs / "mine").metrics() if line["kind"] == "train"]
    assert lines[-1]["event_time"] == 1_700_001_399


def test_a_trained_run_continues_on_a_stream(meshrec, follow, runs, tmp_path):
    pq.write_table(events(5000, 800), tmp_path / "past.parquet")
    trained = (f"{FITTED}", "--data.train", tmp_path / "past.parquet")
    assert meshrec("train", *trained, "--name", "past", "--quiet")[0] == 0
    code, output, errors = meshrec(
        *("follow", FITTED, tmp_path / "in", "--from", "past", "--name", "now", "--time", "ts"),
        *("--stop-when-idle", "0.2", "--quiet"),
    )
    assert code == 0, errors
    assert "starting from" in output
    assert (runs / "now" / "features.json").read_bytes() == (runs / "past" / "features.json").read_bytes()
    assert checksums(runs / "now")[0] == 60
    write_events(tmp_path / "in", 1200, 40)
    resumed = ("follow", "--resume", "--name", "now", "--stop-when-idle", "0.2", "--quiet")
    assert meshrec(*resumed)[0] == 0
    assert checksums(runs / "now")[0] == 62
    without = (
        "follow",
        "tests/train/events.py:without_city",
        tmp_path / "in",
        "--from",
        "past",
        "--name",
        "other",
    )
    code, _, errors = meshrec(*without)
    assert code == 1
    assert "['city']" in errors
    shrinking = (
        "follow",
        FITTED,
        tmp_path / "in",
        "--data.train",
        tmp_path / "past.parquet",
        "--name",
        "new",
    )
    code, _, errors = meshrec(*shrinking)
    assert code == 1
    assert "model.shrinkage is 3.0" in errors
    code, _, errors = meshrec("follow", "--resume", "--name", "past")
    assert code == 1
    assert "--from past" in errors
    code, _, errors = meshrec("train", "--resume", "--name", "now")
    assert code == 1
    assert "meshrec follow --resume" in errors


def test_a_run_without_events_yet_is_exported_without_data_files(meshrec, tmp_path):
    past = tmp_path / "past.parquet"
    pq.write_table(events(5000, 800), past)
    assert meshrec("train", FITTED, "--data.train", past, "--name", "past", "--quiet")[0] == 0
    (tmp_path / "in").mkdir()
    past.unlink()
    idle = ("--from", "past", "--name", "idle", "--time", "ts", "--stop-when-idle", "0.2", "--quiet")
    code, _, errors = meshrec("follow", FITTED, tmp_path / "in", *idle)
    assert code == 0, errors
    code, _, errors = meshrec("export", "idle", "--no-compile", "--out", tmp_path / "package")
    assert code == 0, errors
    types = [stored_columns(RunFolder(tmp_path / "runs" / name)) for name in ("past", "idle")]
    assert types[0].equals(types[1])


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        ((RECIPE,), 2, "SOURCE is missing"),
        ((RECIPE, "no/such/folder"), 1, "no/such/folder is not a folder"),
        ((RECIPE, "redis://localhost/0"), 1, "stream"),
        (("synthetic_clicks", "."), 1, "SyntheticClicks"),
        ((RECIPE, ".", "--delta-seconds", "0"), 2, "delta_seconds is 0"),
        ((RECIPE, ".", "--schedule.decay", "linear"), 1, "'linear'"),
        (("--name", "x"), 2, "RECIPE and SOURCE are missing"),
    ],
)
def test_what_cannot_be_followed_is_said(meshrec, tmp_path, words, code, text):
    ended, _, errors = meshrec("follow", *words)
    assert ended == code, errors
    assert text in errors
    assert not [*tmp_path.glob("runs/*")]


def test_redis_streams_are_followed_and_continued(meshrec, redis_server, tmp_path):  # noqa: F811
    rows = events(0, 600).to_pylist()
    redis_server.add("a", rows[:250])
    redis_server.add("b", rows[250:450])
    address = redis_server.address("a", "b")
    idle = ("--time", "ts", "--stop-when-idle", "1", "--name", "mine", "--quiet")
    code, _, errors = meshrec("follow", RECIPE, address, *idle)
    assert code == 0, errors
    assert checksums(tmp_path / "runs" / "mine")[0] == 22
    redis_server.add("b", rows[450:])
    code, _, errors = meshrec("follow", "--resume", "--name", "mine", "--quiet")
    assert code == 0, errors
    assert checksums(tmp_path / "runs" / "mine")[0] == 30
    assert (tmp_path / "runs" / "mine" / "steps.jsonl").is_file()
    types = stored_columns(RunFolder(tmp_path / "runs" / "mine"))
    kinds = {"price": "number", "user": "integer", "item": "integer", "ts": "number", "clicked": "integer"}
    assert {field.name: kind_of(field.type) for field in types} == kinds


def test_an_export_needs_no_data_files(meshrec, follow, runs, tmp_path):
    past, columns = tmp_path / "past.parquet", runs / "a" / "columns.json"
    pq.write_table(events(0, 400), past)
    assert follow("a", "--data.train", past)[0] == 0

    def scores(name):
        """Scores of the exported run."""
        code, _, errors = meshrec("export", "a", "--no-compile", "--out", tmp_path / name)
        assert code == 0, errors
        predictor = Predictor(tmp_path / name)
        dense, ids, lengths = predictor.raw.encode(events(300, 50).select(["price", "user", "item"]))[:3]
        values, lengths = ({k: torch.from_numpy(v) for k, v in one.items()} for one in (ids, lengths))
        return predictor(torch.from_numpy(dense), values, lengths)

    columns.rename(tmp_path / "columns.json")
    with_files = scores("with")
    past.unlink()
    code, _, errors = meshrec("export", "a", "--no-compile", "--out", tmp_path / "neither")
    assert code == 1
    assert "past.parquet" in errors
    (tmp_path / "columns.json").rename(columns)
    assert scores("without").tolist() == with_files.tolist()
    types = stored_columns(RunFolder(runs / "a"))
    store_columns(
        RunFolder(runs / "a"), types.set(types.get_field_index("user"), pa.field("user", pa.null()))
    )
    code, _, errors = meshrec("export", "a", "--no-compile", "--out", tmp_path / "untyped")
    assert code == 1
    assert "['user']" in errors
    columns.write_text(columns.read_text().replace("double", "int64"))
    code, _, errors = meshrec("export", "a", "--no-compile", "--out", tmp_path / "damaged")
    assert code == 1
    assert "columns.json" in errors


def test_the_help_lists_the_options_of_command_and_recipe(meshrec):
    code, output, _ = meshrec("follow", "--help")
    assert code == 0
    assert "--checkpoint-minutes" in output
    code, output, _ = meshrec("follow", RECIPE, "--help")
    assert code == 0
    for option in ("--training.batch-size", "--delta-seconds", "--from FROM", "--nproc"):
        assert option in output
