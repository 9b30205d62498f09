"""Labels that come later, joined while a model trains: every row once, whatever interrupts the reader."""

import os
import signal

import pyarrow as pa
import pytest
import torch

from meshrec.comms.mesh import default_env
from meshrec.data import DataError, FolderJoin, JoinedStream, LabelJoin, broker_tables, folder_join
from meshrec.data.features import Features, Integer, Label
from tests.data.broker_servers import kafka_cluster, redis_server  # noqa: F401
from tests.data.test_folder_join import streams, write, written

ITEM = Integer(name="item", num_embeddings=50)
FEATURES = Features(labels=(Label(column="y"),), features=(ITEM,))


def create(folder, shown=None, acted=None, *, clock_lag_seconds=None, **options):
    options = {"window_seconds": 20, "allowed_lateness_seconds": 5} | options
    join = LabelJoin(key="key", time="ts", label="y", **options)
    joiner = FolderJoin(
        shown or folder / "shown",
        acted or folder / "acted",
        folder / "out",
        join,
        features=FEATURES,
        clock_lag_seconds=clock_lag_seconds,
        poll_seconds=1e-9,
    )
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


def add_to_redis(server, shown, acted, first=0, last=3000):
    """Add records, impressions to two streams in turns, with IDs in the order of their numbers."""
    rows, numbers = shown.to_pylist(), range(first, last)
    for name, is_second in (("shown0", 0), ("shown1", 1)):
        chosen = [number for number in numbers if number % 7 % 2 == is_second]
        server.add(name, [rows[number] for number in chosen], [f"{number + 1}-1" for number in chosen])
    numbers = range(first // 3, last // 3)
    server.add("acted", acted.to_pylist()[numbers.start : numbers.stop], [f"{n + 1}-1" for n in numbers])


def redis_addresses(server):
    return server.address("shown0", "shown1"), server.address("acted")


def labels_and_rows(steps):
    labels = [label for _, (labels, _) in steps for label in labels]
    return labels, [item for _, (_, items) in steps for item in items]


def expected_rows(shown, acted, num):
    rows = LabelJoin(key="key", time="ts", label="y", window_seconds=20, allowed_lateness_seconds=5).add(
        shown, acted
    )
    num = rows.num_rows // num * num
    return [float(label) for label in rows["y"].to_pylist()[:num]], rows["item"].to_pylist()[:num]


@pytest.fixture
def small_reads(monkeypatch):
    """Many reads of few records."""
    monkeypatch.setattr(broker_tables, "_PARTITION_BYTES", 2000)
    monkeypatch.setattr(broker_tables, "_POLL_SECONDS", 0.0)


@pytest.mark.usefixtures("small_reads")
def test_streams_of_redis_give_the_rows_of_a_plain_join(redis_server, tmp_path):  # noqa: F811
    shown, acted = streams()
    add_to_redis(redis_server, shown, acted)
    steps = read(create(tmp_path, *redis_addresses(redis_server)))
    assert labels_and_rows(steps) == expected_rows(shown, acted, 10)


def test_topics_of_kafka_are_joined_with_a_folder(kafka_cluster, tmp_path):  # noqa: F811
    shown, acted = streams()
    write(tmp_path / "acted", acted, 3)
    for number in range(3):
        rows = shown.to_pylist()[number::3]
        kafka_cluster.add("shown", rows, number, range(number + 1, 3001, 3))
    steps = read(create(tmp_path, kafka_cluster.address("shown")))
    assert labels_and_rows(steps) == expected_rows(shown, acted, 10)


def read_and_die(folder, addresses, position, kill_at):
    """Read in a process, which kills itself after some steps. Return them."""
    notes, pid = folder / "notes.pt", os.fork()
    if not pid:
        try:
            steps = []
            for burst in create(folder, *addresses).bursts(10, position=position, stop=lambda: True):
                for after, batch in zip(burst.positions, burst.batches, strict=True):
                    steps.append((after, labels_and_items(batch)))
                    if len(steps) == kill_at:
                        torch.save(steps, notes)
                        os.kill(os.getpid(), signal.SIGKILL)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    return torch.load(notes)


@pytest.mark.usefixtures("small_reads")
def test_kills_lose_and_repeat_no_record_of_a_broker(redis_server, tmp_path, monkeypatch):  # noqa: F811
    # A file every few reads.
    monkeypatch.setattr(folder_join, "_FILE_ROWS", 30)
    shown, acted = streams()
    addresses, steps = redis_addresses(redis_server), []
    for first in range(0, 3000, 1000):
        add_to_redis(redis_server, shown, acted, first, first + 1000)
        # Killed twice, each time after a checkpoint, and steps that are repeated.
        for _ in range(2):
            done = read_and_die(tmp_path, addresses, steps[-1][0] if steps else None, 12)
            again = read(create(tmp_path, *addresses), num=5, position=steps[-1][0] if steps else None)
            assert again == done[:5]
            steps += done[:8]
    # The rows in the joined folder do not need the broker.
    redis_server.kill()
    assert read(create(tmp_path, *addresses), position=steps[-1][0])[:4] == done[8:]
    redis_server.start()
    steps += read(create(tmp_path, *addresses), position=steps[-1][0])
    assert labels_and_rows(steps) == expected_rows(shown, acted, 10)


def test_a_clock_decides_nothing_while_a_broker_is_away(redis_server, tmp_path, monkeypatch):  # noqa: F811
    redis_server.add("shown0", [{"key": "a", "ts": 100, "item": 1}])
    redis_server.add("acted", [{"key": "x", "ts": 100}])
    events, labels = [], []

    def stop():
        events.append(None)
        if len(events) == 1:
            redis_server.kill()
        if len(events) == 3:
            redis_server.start()
            redis_server.add("acted", [{"key": "a", "ts": 101}, {"key": "x", "ts": 5 * 10**9}])
            redis_server.add("shown0", [{"key": "b", "ts": 5 * 10**9, "item": 2}])
        return bool(labels) or len(events) > 500

    # The window ends while the server is away.
    monkeypatch.setattr(folder_join.time, "time_ns", lambda: 10**18 if events else 0)
    addresses = redis_server.address("shown0"), redis_server.address("acted")
    stream = create(tmp_path, *addresses, clock_lag_seconds=0)
    stream._follow._poll_seconds = 0.05
    for burst in stream.bursts(1, stop=stop):
        labels += [batch.labels.tolist() for batch in burst.batches]
    assert labels == [[1.0]]


@pytest.mark.usefixtures("small_reads")
def test_kills_lose_and_repeat_no_record_of_kafka(kafka_cluster, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(folder_join, "_FILE_ROWS", 30)
    shown, acted = streams(600)
    for number in range(3):
        kafka_cluster.add("k_shown", shown.to_pylist()[number::3], number, range(number + 1, 601, 3))
    kafka_cluster.add("k_acted", acted.to_pylist(), 0, range(1, 201))
    addresses, steps = (kafka_cluster.address("k_shown"), kafka_cluster.address("k_acted")), []
    for _ in range(2):
        done = read_and_die(tmp_path, addresses, steps[-1][0] if steps else None, 12)
        steps += done[:8]
    steps += read(create(tmp_path, *addresses), position=steps[-1][0])
    assert labels_and_rows(steps) == expected_rows(shown, acted, 10)
