"""An alarm takes the run and its servers back to weights from before, whatever interrupts it."""

import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from meshrec.checkpoint import (
    CheckpointError,
    CheckpointManager,
    DeltaPublisher,
    find_checkpoint,
    read_hold,
    verify_deltas,
)
from meshrec.data.label_options import LabelOptions
from meshrec.runs.following import follow_rank
from meshrec.runs.job import Job
from meshrec.serve.fresh import apply_deltas
from meshrec.testing.rank_pool import RankError
from meshrec.train import progress, stream_trainer
from meshrec.train.alarms import Alarms
from meshrec.train.observers import Logged, Reported
from meshrec.train.run_folder import DELTAS
from meshrec.train.stream_options import check_roll_back
from meshrec.train.stream_saver import StreamSaver
from tests.cli.test_follow import checksums as checksums_of_run
from tests.cli.test_follow_labels import add_to_redis, write_streams
from tests.data.broker_servers import redis_server  # noqa: F401 - a fixture
from tests.train.events import events as table_of
from tests.train.events import recipe, write_events
from tests.train.test_held_deltas import FIXED, package, weights
from tests.train.test_stream_trainer import OFTEN, ONCE, checksums, make

# A checkpoint after every step of 20 events, a second apart.
ROLL_BACK = replace(OFTEN, checkpoint_minutes=1e-9, calibration_limit=1.5, on_alarm="roll-back")
ALARM, GOOD = 12, 7
"""Step of the alarm, and the step to which it returns: that of the newest checkpoint 100 seconds before."""


def check(self, line, drifts, **_):
    self._set("calibration@hour", line["step"] >= ALARM, "bad records", line["step"], {})


@contextmanager
def short_window(check=check):
    with (
        patch.object(stream_trainer, "_ALARM_SECONDS", 100),
        patch.object(progress, "_POINT_SECONDS", 40),
        patch.object(Alarms, "check", check),
    ):
        yield


@pytest.fixture(autouse=True)
def alarm():
    with short_window():
        yield


def fixed(recipe):
    return replace(recipe, data=replace(recipe.data, features=FIXED))


def follow(folder, out, choice=None, *, options=ROLL_BACK, observer=None, is_fixed=False):
    changes = {"changed": fixed, "features": FIXED} if is_fixed else {}
    trainer = make(folder, out, options=options, observer=observer, after_roll_back=choice, **changes)
    trainer.resume()
    trainer.run()
    return trainer


@pytest.fixture
def events(tmp_path):
    write_events(tmp_path / "events", 0, 60)
    return tmp_path / "events"


def good_weights(folder, out, *, is_fixed=False):
    """A run without an alarm of the steps up to the one to return to."""
    write_events(folder, 0, 20 * GOOD)
    return train_good(folder, out, is_fixed=is_fixed)


def train_good(folder, out, *, is_fixed=True):
    follow(folder, out, options=ONCE, is_fixed=is_fixed)
    return out


def test_an_alarm_takes_run_and_servers_back_to_a_checkpoint_from_before(events, tmp_path):
    out, reported = tmp_path / "run", []
    follow(events, out, is_fixed=True)
    server = package(out)

    def observe(event):
        reported.append(event)
        apply_deltas(server.deltas)

    write_events(events, 60, 260)
    # Only needed deltas are kept.
    options = replace(ROLL_BACK, keep_delta_hours=1e-9)
    trainer = follow(events, out, options=options, observer=observe, is_fixed=True)
    hold, last = read_hold(out), verify_deltas(out / DELTAS)[-1]
    assert (trainer.progress.step, trainer.stopped) == (GOOD, False)
    assert (hold.step, hold.reason, hold.delta, last.step) == (GOOD, "bad records", last.number, GOOD)
    assert verify_deltas(out / DELTAS)[-2].step == ALARM - 1
    assert hold.position["row"] == 20 * ALARM - 60
    # Only what is needed: checkpoints 40 seconds apart, and the newest.
    assert CheckpointManager(out / "checkpoints").steps() == [5, 7, 9, 10, 11]
    bad = package(out, last=True)
    assert bad.about["step"] == ALARM - 1
    expected = package(good_weights(tmp_path / "good", tmp_path / "whole", is_fixed=True))
    assert expected.about["step"] == GOOD
    for served in (server, bad, package(out)):
        after = weights(served)
        assert served.deltas.freshness[:2] == (last.number, GOOD)
        assert all(torch.equal(after[name], expected.weights[name]) for name in after)
    lines = [event.line for event in reported if isinstance(event, Logged)]
    (line,) = [line for line in lines if line["kind"] == "roll-back"]
    assert (line["step"], line["delta"]) == (GOOD, last.number)
    for part in ("step 7", "2023-11-14 22:15:39 UTC", "bad records", f"Delta {last.number}", "run --after"):
        assert part in trainer.rolled_back_because
    assert trainer.rolled_back_because == trainer.ended_because


def test_a_resumed_run_needs_a_choice_and_reads_the_records_again(events, tmp_path):
    out = tmp_path / "run"
    write_events(events, 60, 260)
    follow(events, out)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"rolled back to step 7: bad records.*reread.*skip"):
            follow(events, out)
    with short_window(lambda *_, **__: None):
        trainer = follow(events, out, "reread")
    assert trainer.progress.step == 16
    assert read_hold(out) is None
    follow(events, tmp_path / "whole", options=ONCE)
    assert checksums(out) == checksums(tmp_path / "whole")
    assert verify_deltas(out / DELTAS)[-1].step == 16
    with pytest.raises(ValueError, match="'skip', and run was not rolled back"):
        follow(events, out, "skip")


def test_a_resumed_run_skips_the_records_until_the_alarm(events, tmp_path):
    out = tmp_path / "run"
    write_events(events, 60, 260)
    follow(events, out)
    with short_window(lambda *_, **__: None):
        assert follow(events, out, "skip").progress.step == 11
    good_weights(tmp_path / "good", tmp_path / "whole")
    write_events(tmp_path / "good", 20 * ALARM, 320 - 20 * ALARM)
    follow(tmp_path / "good", tmp_path / "whole", options=ONCE)
    assert checksums(out)[0] == checksums(tmp_path / "whole")[0]


class Killed(Exception):
    """In place of a signal."""


@contextmanager
def killed_in(owner, name, *, after=True, when=lambda *_: True):
    """A kill before or after the next call of a method with arguments for which ``when`` is true."""
    method = getattr(owner, name)

    def call(self, *args, **options):
        kills = when(self, *args)
        if after or not kills:
            method(self, *args, **options)
        if kills:
            raise Killed

    with patch.object(owner, name, call), pytest.raises(Killed):
        yield


def is_delta_back(publisher, step):
    return read_hold(publisher._folder.parent) is not None


@pytest.mark.parametrize(
    "kill",
    [
        {"owner": StreamSaver, "name": "_load_step", "after": False},
        {"owner": StreamSaver, "name": "_load_step"},
        {"owner": DeltaPublisher, "name": "publish", "when": is_delta_back},
        {"owner": StreamSaver, "name": "roll_back"},
    ],
    ids=["decided", "loaded", "published", "done"],
)
def test_a_killed_roll_back_is_completed(events, tmp_path, kill):
    out = tmp_path / "run"
    follow(events, out, is_fixed=True)
    early = package(out)
    write_events(events, 60, 260)
    with killed_in(**kill):
        follow(events, out, is_fixed=True)
    hold = read_hold(out)
    assert (hold.step, hold.delta is None) == (GOOD, kill["name"] != "roll_back")
    if hold.delta is None:
        with pytest.raises(ValueError, match="'skip', and run is not rolled back yet"):
            follow(events, out, "skip", is_fixed=True)
        assert follow(events, out, is_fixed=True).progress.step == GOOD
    last, expected = verify_deltas(out / DELTAS)[-1], package(out).weights
    assert (read_hold(out).delta, last.step) == (last.number, GOOD)
    after = weights(early)
    assert all(torch.equal(after[name], expected[name]) for name in after)


@pytest.mark.parametrize("choice", ["reread", "skip"])
@pytest.mark.parametrize("name", ["save", "remove_after", "show_hold"])
def test_a_killed_resume_after_a_roll_back_continues_with_its_choice(events, tmp_path, choice, name):
    out = tmp_path / "run"
    write_events(events, 60, 260)
    follow(events, out)
    owner = StreamSaver if name == "show_hold" else CheckpointManager
    with short_window(lambda *_, **__: None):
        if (choice, name) != ("reread", "save"):
            with killed_in(owner, name):
                follow(events, out, choice)
            other = {"reread": "skip", "skip": "reread"}[choice]
            with pytest.raises(ValueError, match=f"'{other}', and run continues with '{choice}'"):
                follow(events, out, other)
            choice, expected = None, choice
        trainer = follow(events, out, choice)
    assert trainer.progress.step == 11 if (choice or expected) == "skip" else 16


def test_without_an_old_checkpoint_deltas_are_held_back(events, tmp_path):
    out, reported = tmp_path / "run", []
    with patch.object(stream_trainer, "_ALARM_SECONDS", 1000):
        write_events(events, 60, 260)
        trainer = follow(events, out, observer=reported.append)
    assert trainer.progress.step == 16
    hold = read_hold(out)
    assert (hold.step, hold.is_roll_back) == (ALARM - 1, False)
    assert verify_deltas(out / DELTAS)[-1].step == ALARM - 1
    texts = [event.text for event in reported if isinstance(event, Reported)]
    assert [text for text in texts if "not rolled back" in text]
    assert not trainer.progress.restore_points or trainer.progress.restore_points[-1].step < ALARM


def test_a_checkpoint_that_could_not_be_saved_is_not_returned_to(events, tmp_path):
    out, save = tmp_path / "run", CheckpointManager.async_save

    def async_save(self, step, state):
        if step in (7, 8):
            raise CheckpointError(f"no space for step {step}")
        return save(self, step, state)

    write_events(events, 60, 260)
    with patch.object(CheckpointManager, "async_save", async_save):
        assert follow(events, out).progress.step == 5
    assert find_checkpoint(out).name == "step-0000000005"


def roll_back_here(folder, out):
    with short_window():
        trainer = follow(folder, out, is_fixed=True)
    return trainer.progress.step, trainer.progress.hold


def test_two_ranks_roll_back(ranks, events, tmp_path):
    out = tmp_path / "run"
    ranks(2).run(roll_back_here, events, out)
    early = package(out)
    write_events(events, 60, 260)
    (step, hold), other = ranks(2).run(roll_back_here, events, out)
    assert other == (step, hold)
    last = verify_deltas(out / DELTAS)[-1]
    assert (step, hold.step) == (GOOD, GOOD)
    assert (last.number, last.step) == (hold.delta, GOOD)
    write_events(tmp_path / "good", 0, 20 * GOOD)
    ranks(2).run(train_good, tmp_path / "good", tmp_path / "whole")
    expected, after = package(tmp_path / "whole").weights, weights(early)
    assert all(torch.equal(after[name], expected[name]) for name in after)


STATES = {
    "decided": lambda hold: hold is not None,
    "rolled back": lambda hold: hold is not None and hold.delta is not None,
    # A run in the second state becomes one without a hold.
    "left": lambda hold: hold is None or hold.choice is not None,
}


def train_here(folder, out, choice, alarms):
    with short_window(check if alarms else lambda *_, **__: None):
        follow(folder, out, choice, is_fixed=True)


def train_and_die(folder, out, choice, state, seconds):
    """Train until all ranks are killed, some time after the roll-back gets a state."""
    pids = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())

    def kill():
        while not STATES[state](read_hold(out)):
            time.sleep(1e-4)
        time.sleep(seconds)
        for pid in (*pids[1:], pids[0]):
            os.kill(pid, signal.SIGKILL)

    if dist.get_rank() == 0:
        threading.Thread(target=kill, daemon=True).start()
    train_here(folder, out, choice, choice is None)
    # The kill may come after the end.
    time.sleep(60)


def test_a_roll_back_survives_kills_of_all_ranks(ranks, events, tmp_path):
    out = tmp_path / "run"
    ranks(2).run(train_here, events, out, None, True)
    early = package(out)
    write_events(events, 60, 260)
    for state, choice in (("decided", None), ("rolled back", None), ("left", "reread")):
        hold = read_hold(out)
        # The kill before may have come late.
        if hold is None or hold.delta is None or choice is not None:
            seconds = random.uniform(0, 0.02)
            with pytest.raises(RankError, match="exit code -9"):
                ranks(2).run(train_and_die, events, out, choice, state, seconds)
    ranks(2).run(train_here, events, out, "reread" if read_hold(out) else None, False)
    ranks(2).run(train_here, events, tmp_path / "whole", None, False)
    assert checksums(out) == checksums(tmp_path / "whole")
    after, expected = weights(early), package(out, last=True).weights
    assert all(torch.equal(after[name], expected[name]) for name in after)


def test_what_can_be_resumed_after_a_roll_back():
    check_roll_back("run", None, None)
    with pytest.raises(ValueError, match="'reread', and run was not rolled back"):
        check_roll_back("run", None, "reread")


@pytest.mark.parametrize("kind", ["redis", "joined", "joined from redis"])
def test_other_streams_return_to_the_records_of_the_checkpoint(request, tmp_path, kind):
    options = replace(ROLL_BACK, time="ts")
    if kind == "redis":
        server = request.getfixturevalue("redis_server")
        server.add("a", table_of(0, 320).to_pylist())
        source = {"stream": server.address("a")}
    else:
        write_streams(tmp_path, 320)
        labels = LabelOptions(key="number", window_seconds=60)
        folders = {"stream": tmp_path / "shown", "actions": tmp_path / "clicks"}
        if kind == "joined":
            source = {name: str(folder) for name, folder in folders.items()}
        else:
            server = request.getfixturevalue("redis_server")
            source = {name: add_to_redis(server, folder) for name, folder in folders.items()}
        source["label_options"] = labels

    def train(name, options=options, **changes):
        job = Job(recipe=recipe(), name=name, runs=tmp_path, device="cpu", **source, **changes)
        return follow_rank(replace(job, stream_options=options), lambda _: lambda _: None)

    summary, hold = train("run"), read_hold(tmp_path / "run")
    assert (summary["state"], summary["step"]) == ("failed", hold.step)
    assert hold.delta == verify_deltas(tmp_path / "run" / DELTAS)[-1].number
    assert 0 < hold.step < ALARM - 4
    with short_window(lambda *_, **__: None):
        assert train("run", resume=True, after_roll_back="reread")["state"] == "finished"
        train("whole", options=replace(options, on_alarm="log", calibration_limit=None))
    step, tensors = checksums_of_run(tmp_path / "run")
    assert step > ALARM
    assert (step, tensors) == checksums_of_run(tmp_path / "whole")
