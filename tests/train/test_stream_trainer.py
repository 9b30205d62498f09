"""Training on a stream: every event once, whatever interrupts it, judged before it is trained."""

import os
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meshrec.checkpoint import CheckpointManager, read_manifest
from meshrec.checkpoint.delta_files import delta_numbers, verify_deltas
from meshrec.data import Follow
from meshrec.data.features import Hashed, TimedFeatures
from meshrec.data.open_stream import stream_dataset
from meshrec.train import Placement, Schedule
from meshrec.train.observers import Logged, Stepped
from meshrec.train.ranks import join
from meshrec.train.run_folder import DELTAS, METRICS, RunFolder
from meshrec.train.stopping import StopRequest
from meshrec.train.stream_options import StreamOptions
from meshrec.train.stream_trainer import StreamLines, StreamTrainer
from tests.train.events import FEATURES, recipe, write_events
from tests.train.events import events as table_of
from tests.train.test_fresh_runs import Package

OFTEN = StreamOptions(stop_when_idle=1e-3, delta_seconds=1e-6, checkpoint_minutes=1e-3, log_seconds=1e-6)
ONCE = StreamOptions(stop_when_idle=1e-3, delta_seconds=None)


def make(
    events,
    out=None,
    *,
    options=ONCE,
    observer=None,
    stop=None,
    changed=lambda recipe: recipe,
    features=FEATURES,
    after_roll_back=None,
):
    features = TimedFeatures(features, "ts")
    stream = Follow(events, features, poll_seconds=1e-3)
    return StreamTrainer(
        changed(recipe()),
        stream_dataset(stream, features),
        stream,
        join("cpu"),
        options=options,
        folder=None if out is None else RunFolder(out),
        observer=observer,
        stop=stop,
        after_roll_back=after_roll_back,
    )


def run(events, out=None, **options):
    """Train the events of a folder from the last checkpoint on, and return the trainer."""
    trainer = make(events, out, **options)
    if out is not None:
        trainer.resume()
    trainer.run()
    return trainer


def run_on_ranks(events, out, options):
    trainer = run(events, out, options=options)
    return trainer.progress.step, trainer.progress.num_samples


def checksums(out):
    """The checksums of all tensors in the last checkpoint, and the position."""
    manifest = read_manifest(CheckpointManager(out / "checkpoints").latest())
    values = {
        name: [piece.checksums for piece in record.pieces]
        for name, record in manifest.tensors.items()
        if record.entry != "random" and not name.startswith("windows")
    }
    return values, manifest.values["progress"]["content"]["position"]


@pytest.fixture
def events(tmp_path):
    for first in range(0, 1000, 250):
        write_events(tmp_path / "events", first, 250)
    return tmp_path / "events"


def test_windows_have_the_metrics_of_predictions_before_updates(events, monkeypatch):
    outputs, lines = [], []
    add = StreamLines.add
    monkeypatch.setattr(StreamLines, "add", lambda self, new: (add(self, new), outputs.extend(new))[0])
    options = replace(ONCE, log_seconds=1e-6)
    run(
        events, options=options, observer=lambda event: isinstance(event, Logged) and lines.append(event.line)
    )
    assert len(lines) > 5
    last = lines[-1]
    scores = torch.cat([output.logits for output in outputs]).sigmoid().numpy()
    labels = torch.cat([output.labels for output in outputs]).numpy()
    assert last["auc@hour"] == pytest.approx(roc_auc_score(labels, scores), abs=1e-3)
    assert last["loss@hour"] == pytest.approx(log_loss(labels, scores.astype(float)), rel=1e-5)
    assert last["calibration@hour"] == pytest.approx(scores.sum() / labels.sum(), rel=1e-5)
    assert last["samples@day"] == 1000
    assert last["event_time"] == 1_700_000_999


def killed(events, out, step):
    """Train in another process, which is killed after a step."""
    pid = os.fork()
    if not pid:
        try:
            run(
                events,
                out,
                options=OFTEN,
                observer=lambda event: (
                    isinstance(event, Stepped) and event.step == step and os.kill(os.getpid(), signal.SIGKILL)
                ),
            )
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_a_killed_run_continues_with_the_weights_of_an_uninterrupted_one(events, tmp_path):
    run(events, tmp_path / "whole")
    steps = sorted(np.random.default_rng().choice(np.arange(2, 49), 2, replace=False).tolist())
    for step in steps:
        killed(events, tmp_path / "killed", step)
    resumed = run(events, tmp_path / "killed")
    assert (resumed.progress.step, resumed.progress.num_samples) == (50, 1000), steps
    assert checksums(tmp_path / "killed") == checksums(tmp_path / "whole"), steps


def test_events_that_come_later_are_trained_as_if_they_had_been_there(tmp_path):
    early, late = tmp_path / "early", tmp_path / "late"
    write_events(early, 0, 530)
    write_events(early, 530, 470)
    write_events(late, 0, 530)
    os.utime(late / "00000000.parquet", ns=(0, (early / "00000000.parquet").stat().st_mtime_ns))
    run(early, tmp_path / "whole")

    def observe(event):
        if isinstance(event, Stepped) and event.step == 26:
            (early / "00000530.parquet").rename(late / "00000530.parquet")

    trainer = run(late, tmp_path / "parts", observer=observe, options=replace(ONCE, stop_when_idle=0.5))
    assert trainer.ended_because == "training ended at step 50: no records came for 0.5 seconds."
    assert checksums(tmp_path / "parts") == checksums(tmp_path / "whole")


def test_one_rank_continues_what_two_have_begun(ranks, events, tmp_path):
    ranks(2).run(run_on_ranks, events, tmp_path / "whole", ONCE)
    more = tmp_path / "more"
    more.mkdir()
    (events / "00000750.parquet").rename(more / "00000750.parquet")
    assert ranks(2).run(run_on_ranks, events, tmp_path / "parts", OFTEN) == [(37, 740)] * 2
    (more / "00000750.parquet").rename(events / "00000750.parquet")
    assert ranks(2).run(run_on_ranks, events, tmp_path / "parts", OFTEN) == [(50, 1000)] * 2
    assert checksums(tmp_path / "parts") == checksums(tmp_path / "whole")

    (events / "00000750.parquet").rename(more / "00000750.parquet")
    ranks(2).run(run_on_ranks, events, tmp_path / "fewer", OFTEN)
    (more / "00000750.parquet").rename(events / "00000750.parquet")
    lines = []
    trainer = run(
        events,
        tmp_path / "fewer",
        observer=lambda event: isinstance(event, Logged) and lines.append(event.line),
    )
    assert (trainer.progress.step, trainer.progress.num_samples) == (50, 1000)
    assert lines[-1]["samples@hour"] == 1000


def test_a_request_ends_the_run_with_a_checkpoint(events, tmp_path):
    stop = StopRequest()
    options = replace(ONCE, stop_when_idle=None)
    first = run(
        events,
        tmp_path / "run",
        stop=stop,
        options=options,
        observer=lambda event: isinstance(event, Stepped) and event.step == 7 and stop.request(),
    )
    assert first.stopped
    assert first.progress.step == 7
    # While it waits, too.
    stop = StopRequest()
    second = run(
        events,
        tmp_path / "run",
        stop=stop,
        options=options,
        observer=lambda event: isinstance(event, Stepped) and event.step == 50 and stop.request(),
    )
    assert (second.stopped, second.progress.step) == (True, 50)
    assert second.saver.is_current


def test_deltas_come_by_the_clock_and_say_how_fresh_they_are(ranks, events, tmp_path):
    ranks(2).run(run_on_ranks, events, tmp_path, replace(OFTEN, checkpoint_minutes=60))
    lines = []
    before = time.time()
    write_events(events, 1000, 60)
    run(
        events,
        tmp_path,
        options=replace(OFTEN, checkpoint_minutes=60),
        observer=lambda event: isinstance(event, Logged) and lines.append(event.line),
    )
    deltas = [line for line in lines if line["kind"] == "delta"]
    assert [line["step"] for line in deltas] == [51, 52, 53]
    assert deltas[-1]["freshness"] == pytest.approx(before - 1_700_001_059, abs=300)
    records = verify_deltas(tmp_path / DELTAS)
    assert records[-1].step == 53
    assert deltas[-1]["delta"] == records[-1].number


def test_a_server_that_applies_the_deltas_has_the_trained_weights(events, tmp_path):
    user = Hashed(name="user", num_embeddings=50)
    features = replace(FEATURES, features=(*FEATURES.features[:1], user)).fit([table_of(0, 100)])

    def fixed(recipe):
        return replace(recipe, data=replace(recipe.data, features=features))

    out = tmp_path / "run"
    (events / "00000750.parquet").rename(tmp_path / "later.parquet")
    first = run(events, out, options=OFTEN, changed=fixed, features=features)
    checkpoint = CheckpointManager(out / "checkpoints").latest()
    package = Package(first.recipe, checkpoint, RunFolder(out), first.dataset)
    (tmp_path / "later.parquet").rename(events / "00000750.parquet")
    # The first step after the restart repeats none, as the checkpoint has all deltas.
    second = run(events, out, options=replace(OFTEN, checkpoint_minutes=60), changed=fixed, features=features)
    assert second.progress.step == 50
    assert package.is_the_model(second.built.model)
    assert package.deltas.freshness.event_time == 1_700_000_999


def test_old_deltas_and_lines_are_removed_but_no_file_of_others(events, tmp_path):
    out = tmp_path / "run"
    folder = RunFolder(out)
    (out / DELTAS).mkdir(parents=True)
    (out / DELTAS / "notes.txt").touch()
    old = {"kind": "train", "step": 0, "time": int(time.time()) - 20 * 86400}
    folder.append_metrics(old)
    options = replace(OFTEN, checkpoint_minutes=1e-9, keep_delta_hours=1e-9)
    trainer = make(events, out, options=options)
    trainer.run()
    # Those after the oldest checkpoint that is kept.
    numbers, kept = delta_numbers(out / DELTAS), CheckpointManager(out / "checkpoints").steps()
    assert numbers[0] > 5
    assert verify_deltas(out / DELTAS)[0].since <= kept[0]
    files = {path.name for path in (out / DELTAS).iterdir()}
    assert files == {"notes.txt"} | {
        f"{number:08d}{suffix}"
        for number in numbers
        for suffix in (".json", ".rows.safetensors", ".dense.safetensors")
    }
    assert not (out / METRICS).exists() or old not in folder.metrics()


def test_rows_expire_in_event_time(tmp_path):
    live = []

    def observe(event):
        if isinstance(event, Logged):
            live.append(event.line["hashed/user/live"])

    write_events(tmp_path, 0, 4000)
    run(tmp_path, options=replace(ONCE, log_seconds=1e-6), observer=observe)
    # Every 10 seconds comes a new user, and is gone after 200. A row lives for 600 more.
    assert max(live) < 110
    assert min(live[len(live) // 2 :]) > 60


@pytest.mark.parametrize(
    ("changes", "value"),
    [
        ({"schedule": Schedule(decay="linear")}, "linear"),
        ({"placement": Placement(sharded=False)}, "sharded"),
    ],
)
def test_a_recipe_that_needs_an_end_is_refused(events, changes, value):
    with pytest.raises(ValueError, match=value):
        make(events, options=StreamOptions(), changed=lambda recipe: replace(recipe, **changes))


def test_options_are_checked():
    with pytest.raises(ValueError, match="delta_seconds is 0"):
        StreamOptions(delta_seconds=0)
    training = replace(recipe().training, accumulate=2)
    with pytest.raises(ValueError, match="accumulate is 2"):
        make(Path("none"), changed=lambda recipe: replace(recipe, training=training))


def test_a_run_may_have_a_last_step(events):
    training = replace(recipe().training, max_steps=8)
    trainer = run(
        events, changed=lambda recipe: replace(recipe, training=training, schedule=Schedule(decay="linear"))
    )
    assert (trainer.progress.step, trainer.progress.num_samples) == (8, 160)
    assert trainer.ended_because == "training made all 8 steps."
