"""While an alarm lasts, servers keep their weights, also those that start; then they get all changes."""

import os
import signal
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from meshrec.checkpoint import find_checkpoint, read_hold, verify_deltas
from meshrec.data import Follow
from meshrec.data.features import Hashed, TimedFeatures
from meshrec.data.open_stream import stream_dataset
from meshrec.serve.fresh import apply_deltas
from meshrec.train.alarms import Alarms
from meshrec.train.observers import Stepped
from meshrec.train.run_folder import DELTAS, RunFolder
from tests.train.events import FEATURES, recipe, write_events
from tests.train.events import events as table_of
from tests.train.test_fresh_runs import Package
from tests.train.test_stream_trainer import OFTEN, run

HOLD = replace(OFTEN, calibration_limit=1.5, on_alarm="hold")


def check(self, line, drifts, **_):
    """An alarm from step 6 until before step 14."""
    self._set("calibration@hour", 6 <= line["step"] < 14, "bad records", line["step"], {})


@pytest.fixture(autouse=True)
def alarm(monkeypatch):
    monkeypatch.setattr(Alarms, "check", check)


USER = Hashed(name="user", num_embeddings=50)
FIXED = replace(FEATURES, features=(*FEATURES.features[:1], USER)).fit([table_of(0, 100)])


@pytest.fixture
def events(tmp_path):
    write_events(tmp_path / "events", 0, 320)
    return tmp_path / "events"


def follow(events, out, observer=None, options=HOLD):
    def fixed(recipe):
        return replace(recipe, data=replace(recipe.data, features=FIXED))

    return run(events, out, options=options, observer=observer, changed=fixed, features=FIXED)


def killed(events, out, step):
    """Train in another process, which is killed after a step."""
    pid = os.fork()
    if not pid:
        try:

            def observe(event):
                if isinstance(event, Stepped) and event.step == step:
                    os.kill(os.getpid(), signal.SIGKILL)

            follow(events, out, observe)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def package(run_folder, **selection):
    """A new package of the run's weights."""
    features = TimedFeatures(FIXED, "ts")
    data = stream_dataset(Follow(run_folder, features), features)
    checkpoint = find_checkpoint(run_folder, **selection)
    return Package(
        replace(recipe(), data=replace(recipe().data, features=FIXED)),
        checkpoint,
        RunFolder(run_folder),
        data,
    )


def weights(served):
    apply_deltas(served.deltas)
    assert served.deltas.freshness.reason == ""
    return {name: weight.clone() for name, weight in served.weights.items()}


def test_servers_keep_their_weights_during_a_hold_and_get_all_changes_after_it(events, tmp_path):
    out = tmp_path / "run"
    killed(events, out, 4)
    server = package(out)
    for step in (9, 11):
        killed(events, out, step)
        assert read_hold(out).reason == "bad records"
        assert verify_deltas(out / DELTAS)[-1].step == 5
        old, new = weights(server), weights(package(out))
        assert server.deltas.freshness.step == 5
        assert all(torch.equal(old[name], new[name]) for name in old)
    held = package(out, last=True)
    assert held.about["step"] > 5
    trainer = follow(events, out)
    assert read_hold(out) is None
    assert verify_deltas(out / DELTAS)[-1].step == trainer.progress.step == 16
    for served in (server, held, package(out)):
        assert served.is_the_model(trainer.built.model)


def follow_and_end_held(events, out):
    with patch.object(Alarms, "check", check):
        trainer = follow(events, out)
    return trainer.progress.step, trainer.progress.hold


def test_two_ranks_hold_back_and_one_rank_publishes(ranks, events, tmp_path):
    out, late = tmp_path / "run", tmp_path / "late"
    write_events(late, 0, 160)
    (late / "00000000.parquet").rename(events / "00000000.parquet")
    ((step, hold), *_) = ranks(2).run(follow_and_end_held, events, out)
    assert step == 8
    assert hold.reason == "bad records"
    assert hold.step <= verify_deltas(out / DELTAS)[-1].step <= 5
    server = package(out)
    write_events(events, 160, 160)
    assert server.is_the_model(follow(events, out).built.model)


def test_a_hold_ends_if_the_run_continues_without_it(events, tmp_path):
    out = tmp_path / "run"
    killed(events, out, 9)
    server = package(out)
    trainer = follow(events, out, options=replace(HOLD, on_alarm="log"))
    assert read_hold(out) is None
    assert server.is_the_model(trainer.built.model)


def test_a_run_without_a_checkpoint_from_before_the_hold_names_none(events, tmp_path):
    out = tmp_path / "run"
    write_events(tmp_path / "few", 0, 160)
    follow(tmp_path / "few", out, options=replace(HOLD, checkpoint_minutes=60))
    assert read_hold(out).step is None
    with pytest.raises(ValueError, match="bad records"):
        find_checkpoint(out)
    assert find_checkpoint(out, step=8) == find_checkpoint(out, last=True)
