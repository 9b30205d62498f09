"""``meshrec follow --actions``: labels that come later, kills, and options that do not fit."""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.checkpoint import CheckpointManager
from meshrec.cli import follow
from meshrec.data import LabelJoin
from meshrec.runs.removing import remove_run
from meshrec.train.run_folder import RunFolder
from tests.cli.test_follow import OFTEN, RECIPE, checksums, meshrec, undisturbed, until  # noqa: F401 - a fixture
from tests.data.broker_servers import redis_server  # noqa: F401 - a fixture
from tests.train.events import events

OPTIONS = ("--time", "ts", "--key", "number", "--window-seconds", "60")


def write_streams(folder, num=1500):
    """Write impressions and clicks up to 90 seconds later, and the rows that a join of all of them gives."""
    table = events(0, num)
    clicks = table.filter(table["clicked"]).select(["number", "ts"])
    delays = np.random.default_rng(0).integers(0, 90, clicks.num_rows)
    clicks = clicks.set_column(1, "ts", pa.array(clicks["ts"].to_numpy() + delays)).sort_by("ts")
    shown, clicks = (as_seconds(part) for part in (table.drop_columns(["clicked"]), clicks))
    for name, part, size in (("shown", shown, 100), ("clicks", clicks, 70)):
        (folder / name).mkdir()
        for first in range(0, part.num_rows, size):
            pq.write_table(part.slice(first, size), folder / name / f"{first:06d}.parquet")
    rows = LabelJoin(key="number", time="ts", label="clicked", window_seconds=60).add(shown, clicks)
    (folder / "joined").mkdir()
    pq.write_table(rows, folder / "joined" / "0.parquet")
    return rows.num_rows


def as_seconds(table):
    index = table.column_names.index("ts")
    return table.set_column(index, "ts", pa.array(table["ts"].to_numpy().astype(np.int64)))


def add_to_redis(server, folder):
    """Add the rows of a folder to two streams in turns, with IDs in the order of rows. Return the address."""
    rows = pq.read_table(folder).to_pylist()
    names = [f"{folder.name}{number}" for number in range(2)]
    for first, name in enumerate(names):
        server.add(name, rows[first::2], [f"{number + 1}-1" for number in range(first, len(rows), 2)])
    return server.address(*names)


@pytest.mark.parametrize(("num_ranks", "source"), [(1, "folder"), (2, "folder"), (1, "redis")])
def test_a_killed_run_ends_with_the_weights_of_a_run_on_joined_rows(
    meshrec,  # noqa: F811
    ranks,
    redis_server,  # noqa: F811
    tmp_path,
    num_ranks,
    source,
):
    num_rows, runs = write_streams(tmp_path), tmp_path / "runs"
    shown, clicks = tmp_path / "shown", tmp_path / "clicks"
    if source == "redis":
        shown, clicks = add_to_redis(redis_server, shown), add_to_redis(redis_server, clicks)
    if num_ranks == 1:
        undisturbed(str(tmp_path / "joined"), runs)
    else:
        ranks(2).run(undisturbed, str(tmp_path / "joined"), runs)
    words = ("--stop-when-idle", "0.2", "--quiet", "--name", "killed")
    sources = (RECIPE, shown, "--actions", clicks, *OPTIONS)
    restarts = 1 if num_ranks == 1 else 0
    with ThreadPoolExecutor(1) as thread:  # where the launcher takes over no signals
        start = ("follow", *sources, *words, "--nproc", num_ranks, "--max-restarts", restarts, *OFTEN)
        run = thread.submit(meshrec, *start)
        steps = CheckpointManager(runs / "killed" / "checkpoints").steps
        first = random.randrange(1, 40)
        until(lambda: run.done() or (steps() or [0])[-1] >= first)
        if not run.done():
            os.kill(int(RunFolder(runs / "killed").process(0).read_text()), signal.SIGKILL)
        run.result(timeout=300)
    if num_ranks == 2:
        code, _, errors = meshrec("follow", "--resume", *words)
        assert code == 0, errors
    assert checksums(runs / "killed") == checksums(runs / "whole")
    lines = [line for line in RunFolder(runs / "killed").metrics() if line["kind"] == "train"]
    assert lines[-1]["samples@day"] == num_rows // 20 * 20
    skipped = RunFolder(runs / "killed").read_json("summary.json")["skipped"]["label join"]
    assert skipped["unmatched actions"] > 50
    code, _, errors = meshrec("follow", "--resume", *words, "--window-seconds", 30)
    assert code == 1
    assert "window" in errors
    assert remove_run(RunFolder(runs / "killed")) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--key", "number"), "--actions"),
        (("--on-full", "decide", "--clock-lag-seconds", "30"), "--clock-lag-seconds and --on-full"),
        (("--actions", "clicks", "--key", "number"), "--window-seconds"),
        (("--actions", "nowhere", *OPTIONS), "nowhere is not a folder"),
        (("--actions", "redis://localhost/0?streams=a", *OPTIONS), "must name each stream once"),
        (("--actions", "clicks", *OPTIONS, "--negatives", "at_once"), "--loss.fake-negative-weighting"),
        (("--actions", "clicks", *OPTIONS, "--loss.fake-negative-weighting"), "at_window_end"),
        (("--actions", "clicks", *OPTIONS, "--allowed-lateness-seconds", "-1"), "allowed_lateness_seconds"),
    ],
)
def test_labels_that_cannot_be_joined_are_named(meshrec, tmp_path, words, text):  # noqa: F811
    for name in ("shown", "clicks"):
        (tmp_path / name).mkdir()
    words = [str(tmp_path / word) if word == "clicks" else word for word in words]
    code, _, errors = meshrec(
        "follow", RECIPE, tmp_path / "shown", *words, "--stop-when-idle", "0.2", "--quiet"
    )
    assert code == 1, errors
    assert text in errors
    assert not [*tmp_path.glob("runs/*")]


def test_options_of_runs_of_earlier_versions_are_read(tmp_path):
    options = {"type": "StreamOptions", "time": "ts", "key": "number", "window_seconds": 60.0}
    (tmp_path / "config.json").write_text(json.dumps({"stream_options": options}))
    saved = follow._saved_options(RunFolder(tmp_path))
    assert (saved.time, saved.key, saved.window_seconds, saved.negatives) == (
        "ts",
        "number",
        60.0,
        "at_window_end",
    )
