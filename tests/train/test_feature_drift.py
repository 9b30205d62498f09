"""A run on a stream raises an alarm when the values of a feature drift, and holds back deltas."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from meshrec.checkpoint import find_checkpoint, read_hold, verify_deltas
from meshrec.data import Follow
from meshrec.data.features import Features, Hashed, Key, Label, Number, TimedFeatures, Vocabulary
from meshrec.data.open_stream import stream_dataset
from meshrec.train.feature_drift import drift_of
from meshrec.train.observers import Logged
from meshrec.train.ranks import join
from meshrec.train.run_folder import DELTAS, RunFolder
from meshrec.train.stream_options import StreamOptions
from meshrec.train.stream_trainer import StreamTrainer
from tests.train.events import recipe

FEATURES = Features(
    labels=(Label(column="clicked"),),
    features=(
        Number(name="price", missing=0.0, standardize=True),
        Number(name="age", num_bins=4, missing=0.0),
        Hashed(name="item", num_embeddings=50),
        Vocabulary(name="city"),
        Key(name="user", max_rows=2000, missing=True),
    ),
).fit(
    [
        pa.table(
            {
                "clicked": [0, 1],
                "price": [1.0, 3.0],
                "age": [0.2, 0.7],
                "item": [1, 2],
                "city": ["old", "new"],
                "user": [1, 2],
            }
        )
    ]
)
OPTIONS = StreamOptions(
    drift_limit=0.25, on_alarm="hold", stop_when_idle=1e-3, log_seconds=1e-6, checkpoint_minutes=60
)


def write(folder: Path, hours: range, *, drifts: bool) -> None:
    """Write 1,200 events per hour to a followed folder. From hour 3 on, half of them are broken."""
    numbers = np.arange(1200 * hours.start, 1200 * hours.stop)
    draws = np.random.default_rng(hours.start).random((3, len(numbers)))
    is_bad = drifts & (numbers >= 3600) & (numbers % 2 > 0)
    events = {
        "clicked": draws[1] < 0.3,
        "price": pa.array(draws[0], mask=is_bad),
        "age": draws[0],
        "user": pa.array((1 << 60) * draws[2], mask=is_bad).cast(pa.int64(), safe=False),
        "city": np.where(is_bad, "other", np.where(draws[1] < 0.5, "old", "new")),
        "item": (50 * draws[2] ** 2).astype(int),
        "ts": 1_700_000_100.0 + 3 * numbers,
    }
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.table(events), folder / f"{hours.start:02d}.parquet")


def follow(events, out):
    """Follow all events, and return the reported lines."""
    features, lines = TimedFeatures(FEATURES, "ts"), []
    stream = Follow(events, features, poll_seconds=1e-3)
    training = replace(recipe().training, batch_size=120)
    trainer = StreamTrainer(
        replace(recipe(), data=replace(recipe().data, features=FEATURES), training=training),
        stream_dataset(stream, features),
        stream,
        join("cpu"),
        options=OPTIONS,
        folder=RunFolder(out),
        observer=lambda event: isinstance(event, Logged) and lines.append(event.line),
        drift=drift_of(FEATURES),
    )
    trainer.resume()
    trainer.run()
    return lines


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_drifting_feature_raises_an_alarm_and_a_steady_one_does_not(ranks, tmp_path, num_ranks):
    def train(events, out):
        return follow(events, out) if num_ranks == 1 else ranks(2).run(follow, events, out)[0]

    events, out = tmp_path / "events", tmp_path / "run"
    write(events, range(3), drifts=True)
    lines = train(events, out)
    assert not [line for line in lines if line["kind"] == "alarm"]
    assert 0 < lines[-1 if lines[-1]["kind"] == "train" else -2]["drift"] < 0.1
    published = verify_deltas(out / DELTAS)[-1]
    # The run continues with the windows of its checkpoint.
    write(events, range(3, 4), drifts=True)
    lines = train(events, out)
    (alarm,) = [line for line in lines if line["kind"] == "alarm"]
    assert alarm["drift"].keys() <= {"city", "price", "user"}
    last = [line for line in lines if line["kind"] == "train"][-1]
    assert last["drift_feature"] in ("city", "price", "user")
    assert last["drift"] > 0.25
    assert read_hold(out).step == 30
    assert int(find_checkpoint(out).name[5:]) == 30
    assert published.step == 30
    assert verify_deltas(out / DELTAS)[-1].step < alarm["step"]
