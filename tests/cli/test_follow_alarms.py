"""A server keeps good weights while bad records raise alarms, or gets them back."""

import json
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.checkpoint import CheckpointManager, read_hold, verify_deltas
from meshrec.train.run_folder import RunFolder
from tests.cli.test_follow import RECIPE, meshrec  # noqa: F401 - a fixture
from tests.hostile.second.programs import serving
from tests.train.events import events

PER_HOUR = 1200
"""Events in six steps."""


def write_hour(folder, hour, *, is_bad=False):
    """Add the events of an hour to a followed folder; a bad hour has the same price all the time."""
    table = events(PER_HOUR * hour, PER_HOUR)
    seconds = 1_700_000_100.0 + 3 * np.arange(PER_HOUR * hour, PER_HOUR * (hour + 1))
    table = table.set_column(table.column_names.index("ts"), "ts", [seconds])
    if is_bad:
        table = table.set_column(table.column_names.index("price"), "price", [np.full(PER_HOUR, 0.5)])
    folder.mkdir(exist_ok=True)
    pq.write_table(table, folder / f"_{hour:02d}.parquet")
    (folder / f"_{hour:02d}.parquet").rename(folder / f"{hour:02d}.parquet")


SAMPLES = [{"price": n / 40, "user": 1000 * n, "item": n} for n in range(40)]


@pytest.fixture
def follow(meshrec, tmp_path):  # noqa: F811
    """``follow(*words)``: continue the run ``live`` until no events come any more."""

    def call(*words):
        first = [RECIPE, tmp_path / "in", "--time", "ts", "--training.batch-size", "200"]
        named = ["--resume"] if (tmp_path / "runs").exists() else first
        often = ("--checkpoint-minutes", "1e-6", "--delta-seconds", "1e-6", "--log-seconds", "1e-6")
        limits = ("--drift-limit", "0.25")
        return meshrec(
            *("follow", *named, "--name", "live", "--stop-when-idle", "0.1", "--quiet", *often, *limits),
            *words,
        )

    return call


def test_a_server_keeps_good_weights_in_a_hold_and_gets_them_back_in_a_roll_back(
    meshrec,  # noqa: F811
    follow,
    tmp_path,
):
    run, package = tmp_path / "runs" / "live", tmp_path / "model"

    def steps():
        return [line["step"] for line in RunFolder(run).metrics() if line["kind"] == "alarm"]

    for hour in range(3):
        write_hour(tmp_path / "in", hour)
    code, _, errors = follow("--on-alarm", "hold")
    assert code == 0, errors
    assert CheckpointManager(run / "checkpoints").steps()[-1] == 18
    code, _, errors = meshrec("export", "live", "--no-compile", "--out", package)
    assert code == 0, errors
    with serving(tmp_path, package, "--deltas", f"model={run}") as server:

        def served(delta):
            """Scores and step of the server, once it has a delta."""
            deadline = time.monotonic() + 120
            while True:
                freshness = json.loads(server.ask("GET", "/v2/models/model/freshness")[1])
                if freshness["delta"] == delta or time.monotonic() > deadline:
                    break
                time.sleep(0.01)
            assert (freshness["delta"], freshness["reason"]) == (delta, "")
            answer = json.loads(server.ask("POST", "/predict", SAMPLES)[1])
            assert answer["version"].endswith(f"+{delta}")
            return freshness["step"], answer["scores"]

        def last():
            return verify_deltas(run / "deltas")[-1].number

        write_hour(tmp_path / "in", 3, is_bad=True)
        assert follow()[0] == 0
        (alarm,) = steps()
        assert read_hold(run).step < alarm < 24
        held = served(last())
        assert held[0] < alarm
        # The alarm ends, and the server gets all changes.
        write_hour(tmp_path / "in", 4)
        write_hour(tmp_path / "in", 5)
        assert follow()[0] == 0
        assert read_hold(run) is None
        assert len(steps()) == 2
        before = served(last())
        assert before[0] == 36

        write_hour(tmp_path / "in", 6)
        write_hour(tmp_path / "in", 7)
        assert follow("--on-alarm", "roll-back")[0] == 0
        write_hour(tmp_path / "in", 8, is_bad=True)
        code, output, errors = follow()
        assert code == 1
        assert (output + errors).count("rolled back to step") == 1
        assert (output + errors).count("features have drifted") == 2
        hold = read_hold(run)
        assert steps()[-1] > 48
        # The newest one an hour before, of those that are half an hour apart.
        assert 36 < hold.step <= 45
        assert hold.delta == last() > before[0]
        assert RunFolder(run).state().name == "failed"
        step, scores = served(hold.delta)
        assert step == hold.step
        pq.write_table(pa.Table.from_pylist(SAMPLES), tmp_path / "samples.parquet")
        predict = (
            "predict",
            "live",
            "--data",
            tmp_path / "samples.parquet",
            "--out",
            tmp_path / "out.parquet",
        )
        code, _, errors = meshrec(*predict)
        assert code == 0, errors
        assert scores == pytest.approx(pq.read_table(tmp_path / "out.parquet")["score"].to_pylist(), rel=1e-5)
        assert scores != pytest.approx(before[1], rel=1e-3)

        code, _, errors = follow()
        assert code == 1
        assert "--after-roll-back skip" in errors
        code, _, errors = follow("--after-roll-back", "skip")
        assert code == 0, errors
        step, scores = served(last())
        assert step > hold.step
        code, _, errors = follow("--after-roll-back", "skip")
        assert code == 1
        assert "'skip'" in errors
