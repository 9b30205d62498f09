"""Labels that come later, joined while a model trains: every row once, whatever interrupts the reader."""

import pyarrow as pa
import pytest

from meshrec.comms.mesh import default_env
from meshrec.data import DataError, FolderJoin, JoinedStream, LabelJoin
from meshrec.data.features import Features, Integer, Label
from tests.data.test_folder_join import streams, write, written

ITEM = Integer(name="item", num_embeddings=50)
FEATURES = Features(labels=(Label(column="y"),), features=(ITEM,))


def create(folder, **options):
    options = {"window_seconds": 20, "allowed_lateness_seconds": 5} | options
    join = LabelJoin(key="key", time="ts", label="y", **options)
    joiner = FolderJoin(folder / "shown", folder / "acted", folder / "out", join, poll_seconds=1e-9)
    return JoinedStream(joiner, FEATURES)


def labels_and_items(batch):
    return batch.labels.tolist(), batch.sparse.values().tolist()


def read(stream, batch_size=10, num=10**9, **options):
    """Return at most ``num`` steps: position, labels and items."""
    steps = []
    for burst in stream.bursts(batch_size, stop=lambda: True, **options):
        for position, batch in zip(burst.positions, burst.batches, strict=True):
            steps.append((position, labels_and_items(batch)))
            if len(steps) == num:
                return steps
    return steps


def test_a_killed_reader_continues_with_the_rows_that_would_have_come(tmp_path):
    shown, acted = streams()
    expected = LabelJoin(key="key", time="ts", label="y", window_seconds=20, allowed_lateness_seconds=5).add(
        shown, acted
    )
    steps = []
    for number in range(6):
        write(tmp_path / "shown", shown.slice(number * 500, 500), 2, 2 * number)
        write(tmp_path / "acted", acted.slice(number * 167, 167), 1, number)
        # A reader that ends between two steps, and forgets those after its checkpoint.
        stream = create(tmp_path)
        done = read(stream, num=13, position=steps[-1][0] if steps else None)
        steps += done[:-2]
    steps += read(create(tmp_path), position=steps[-1][0])
    labels = [label for _, (labels, _) in steps for label in labels]
    items = [item for _, (_, items) in steps for item in items]
    num = len(labels)
    assert num == expected.num_rows // 10 * 10
    assert labels == [float(label) for label in expected["y"].to_pylist()[:num]]
    assert items == expected["item"].to_pylist()[:num]


def test_a_checkpoint_removes_consumed_rows_and_keeps_the_state(tmp_path):
    shown, acted = streams()
    write(tmp_path / "shown", shown.slice(0, 1500), 3)
    write(tmp_path / "acted", acted.slice(0, 500), 3)
    stream = create(tmp_path)
    before = []
    for burst in stream.bursts(10, stop=lambda: True):
        for position, batch in zip(burst.positions, burst.batches, strict=True):
            before.append((position, labels_and_items(batch)))
        if burst.positions:
            (tmp_path / "out" / "mine.arrow").touch()
            stream.on_checkpoint(before[-1][0])
            assert min(path.name for path in (tmp_path / "out").glob("0*")) == before[-1][0]["file"]
    assert (tmp_path / "out" / "mine.arrow").exists()
    (tmp_path / "out" / "mine.arrow").unlink()
    write(tmp_path / "shown", shown.slice(1500), 3, 3)
    write(tmp_path / "acted", acted.slice(500), 3, 3)
    after = read(create(tmp_path), position=before[-1][0])
    assert len(before) + len(after) == len(read(create_whole(tmp_path, shown, acted)))
    with pytest.raises(ValueError, match="window"):
        read(create(tmp_path, window_seconds=21))


def create_whole(folder, shown, acted):
    (folder / "whole").mkdir()
    write(folder / "whole" / "shown", shown, 1)
    write(folder / "whole" / "acted", acted, 1)
    return create(folder / "whole")


def read_with_two_ranks(folder):
    return read(create(folder), 10, axis=default_env().world)


def test_two_ranks_share_every_row(tmp_path, ranks):
    shown, acted = streams(1200)
    write(tmp_path / "shown", shown, 3)
    write(tmp_path / "acted", acted, 2)
    by_rank = ranks(2).run(read_with_two_ranks, tmp_path)
    alone = read(create(tmp_path), 20)
    assert len(by_rank[0]) == len(by_rank[1]) == len(alone) > 10
    for first, second, (position, (labels, items)) in zip(*by_rank, alone, strict=True):
        assert first[0] == second[0] == position
        assert (first[1][0] + second[1][0], first[1][1] + second[1][1]) == (labels, items)


def test_a_late_action_does_not_change_a_trained_label(tmp_path):
    table = pa.table({"key": ["a", "b"], "ts": [0, 100], "item": [1, 2]})
    write(tmp_path / "shown", table, 1)
    write(tmp_path / "acted", pa.table({"key": ["b", "a"], "ts": [101, 20]}), 1)
    write(tmp_path / "acted", pa.table({"key": ["x"], "ts": [200]}), 1, 1)
    write(tmp_path / "shown", pa.table({"key": ["c"], "ts": [200], "item": [3]}), 1, 1)
    stream = create(tmp_path)
    steps = read(stream, 1)
    assert [rows for _, rows in steps] == [([0.0], [1]), ([1.0], [2])]
    assert stream.faults.by_file["label join"] == {"late actions": 1}


def test_a_negative_at_once_has_a_positive_after_its_action(tmp_path):
    write(tmp_path / "shown", pa.table({"key": ["a", "b", "c"], "ts": [0, 5, 200], "item": [1, 2, 3]}), 1)
    write(tmp_path / "acted", pa.table({"key": ["b", "x"], "ts": [20, 200]}), 1)
    steps = read(create(tmp_path, negatives="at_once"), 1)
    assert [rows for _, rows in steps] == [([0.0], [1]), ([0.0], [2]), ([1.0], [2])]


def test_errors_of_the_join_reach_the_reader(tmp_path):
    shown, acted = streams(100)
    write(tmp_path / "shown", shown, 1)
    write(tmp_path / "acted", acted.drop_columns(["ts"]), 1)
    with pytest.raises(DataError, match="ts"):
        read(create(tmp_path))
    assert written(tmp_path / "out") is None
