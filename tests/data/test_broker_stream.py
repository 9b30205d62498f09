"""Streams of records: every row once and in order, on any number of ranks, whatever interrupts it."""

import contextlib
import json
import os
import random
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pytest
import torch

from meshrec.comms.mesh import Axis, default_env
from meshrec.data import DataError, broker_stream
from meshrec.data.broker_stream import BrokerStream
from meshrec.data.brokers import Broker, Records
from meshrec.data.features import Features, Integer, Key, Label, Number, TimedFeatures
from meshrec.data.features.values import kind_of
from meshrec.testing.rank_pool import RankError
from tests.data.broker_servers import kafka_cluster, redis_server  # noqa: F401
from tests.data.test_messages import arrow_message

NUM = 10_000
# A process that is forked while another thread starts one would keep the pipe by which the latter tells that
# it has started.
_STARTING = threading.Lock()
FEATURES = Features(
    labels=(Label(column="y"),),
    features=(Integer(name="id", num_embeddings=NUM), Number(name="x")),
).fit([pa.table({"y": [0, 1], "id": [0, 1], "x": [0.5, 1.5]})])


def rows(first, last, **changes):
    return [{"y": n % 2, "id": n, "x": n / 2} | changes for n in range(first, last)]


def stream(address, **options):
    return BrokerStream(address, FEATURES, poll_seconds=0.001, **options)


def steps(source, batch_size, **options):
    """Yield the batches of all bursts, and the position after each."""
    for burst in source.bursts(batch_size, **options):
        yield from zip(burst.batches, burst.positions, strict=True)


def read(address, batch_size, *, axis=None, position=None, stop=lambda: True, **options):
    """Return the IDs of every batch, and the position after it."""
    found = steps(stream(address, **options), batch_size, position=position, axis=axis or Axis(), stop=stop)
    return [(batch.sparse.values().tolist(), after) for batch, after in found]


def test_records_of_one_stream_come_in_order_and_continue_at_any_position(redis_server):  # noqa: F811
    keys = redis_server.add("a", rows(0, 40))
    address = redis_server.address("a")
    found = read(address, 3)
    assert [ids for ids, _ in found] == [[*range(n, n + 3)] for n in range(0, 39, 3)]
    for number, (_, position) in enumerate(found):
        assert position["a"][:2] == [keys[3 * number + 2], 0]
        assert json.loads(json.dumps(position)) == position
        assert read(address, 3, position=position) == found[number + 1 :]
        assert [ids for ids, _ in read(address, 1, position=position)] == [
            [n] for n in range(3 * number + 3, 40)
        ]


def test_columns_get_the_types_of_their_first_values(redis_server):  # noqa: F811
    columns = {
        "a": Key(name="a", max_rows=10),
        "b": Key(name="b", max_rows=10),
        "x": Number(name="x"),
        "z": Key(name="z", max_rows=10),
    }
    features = Features(labels=(Label(column="y"),), features=tuple(columns.values()))
    records = [{"y": 1, "a": None, "b": None, "x": 1, "z": None}] * 3
    records += [{"y": 0, "a": "text", "b": 7, "x": 1.5, "z": None}] * 3
    for record in records:
        redis_server.add("a", [record])
    source = BrokerStream(redis_server.address("a"), features)
    assert source.column_types.schema is None
    for _ in steps(source, 3, stop=lambda: True):
        pass
    types = {field.name: kind_of(field.type) for field in source.column_types.schema}
    assert types == {"y": "integer", "a": "text", "b": "integer", "x": "number", "z": "other"}


def test_events_have_the_time_of_their_record_or_of_a_column(redis_server):  # noqa: F811
    events = [row | {"at": f"1970-01-01T00:00:{n:02}.5"} for n, row in enumerate(rows(0, 6))]
    redis_server.add("a", events, [f"{1000 * n}-1" for n in (1, 2, 3, 4, 5, 100)])
    found = [
        batch.times.tolist() for batch, _ in steps(stream(redis_server.address("a")), 3, stop=lambda: True)
    ]
    assert found == [[1_000_000, 2_000_000, 3_000_000], [4_000_000, 5_000_000, 100_000_000]]
    timed = TimedFeatures(FEATURES, "at")
    source = BrokerStream(redis_server.address("a"), timed, late_seconds=10)
    found = [batch.times.tolist() for batch, _ in steps(source, 3, stop=lambda: True)]
    assert found == [[500_000, 1_500_000, 2_500_000], [3_500_000, 4_500_000, 5_500_000]]
    assert source.late == {"a": 1}
    assert source.faults.skipped == {}


def read_on_ranks(address, batch_size, position=None, num=0, options=None):
    """Read as `read` on all ranks, until there were ``num`` rows."""
    axis, found = default_env().world, []
    source = stream(address, **(options or {}))
    stop = lambda: len(found) * batch_size * axis.size >= num  # noqa: E731
    for batch, after in steps(source, batch_size, position=position, axis=axis, stop=stop):
        found.append((batch.sparse.values().tolist(), after))
    return found, source.faults.skipped


def joined(of_ranks):
    """Return the rows and the position of every step, from what all ranks have read."""
    both = zip(*(found for found, _ in of_ranks), strict=True)
    for one, other in both:
        assert one[1] == other[1]
        yield one[0] + other[0], one[1]


def test_ranks_share_the_rows_of_a_step(redis_server, ranks):  # noqa: F811
    tables = [pa.Table.from_pylist(rows(n, n + 7)) for n in range(0, 70, 7)]
    for table in tables:
        redis_server.client.xadd("a", {"arrow": arrow_message(table)})
    address = redis_server.address("a")
    expected = read(address, 8)
    assert [row for ids, _ in expected for row in ids] == [*range(64)]
    assert [*joined(ranks(2).run(read_on_ranks, address, 4))] == expected
    position = expected[2][1]
    assert position["a"][1] == 24 % 7
    assert [*joined(ranks(2).run(read_on_ranks, address, 4, position))] == expected[3:]


def test_a_kafka_topic_is_read_on_ranks(kafka_cluster, ranks):  # noqa: F811
    for number in range(4):
        kafka_cluster.add("ranks", rows(100 * number, 100 * number + 100), number, range(100))
    address = kafka_cluster.address("ranks")
    found = [*joined(ranks(2).run(read_on_ranks, address, 5, None, 400))]
    assert sorted(row for ids, _ in found for row in ids) == [*range(400)]
    for number in range(4):
        of_partition = [row for ids, _ in found for row in ids if row // 100 == number]
        assert of_partition == [*range(100 * number, 100 * number + 100)]
    # On another number of ranks, from the middle.
    seen = [row for ids, _ in found[:17] for row in ids]
    others = []
    for batch, _ in steps(stream(address), 10, position=found[16][1], stop=lambda: len(others) == 23):
        others.append(batch.sparse.values().tolist())
    left = [row for ids in others for row in ids]
    assert sorted(seen + left) == [*range(400)]


def test_damaged_records_are_counted_and_kept_aside(redis_server, ranks, tmp_path):  # noqa: F811
    good = [json.dumps(row) for row in rows(0, 12)]
    messages = [*good[:3], '{"y": 1', *good[3:9], json.dumps({"y": 1, "id": NUM, "x": 1}), *good[9:12]]
    for message in messages:
        redis_server.client.xadd("a", {"json": message})
    redis_server.client.xadd("a", {"id": "12", "y": "one", "x": "2"})
    redis_server.client.xadd("a", {"id": "13", "y": "1", "x": "2.5"})
    address = redis_server.address("a")
    with pytest.raises(DataError, match="no JSON object"):
        read(address, 4)
    with pytest.raises(DataError, match=f"{NUM}"):
        read(address, 4, position=read(address, 4, on_error="skip")[1][1])
    aside = tmp_path / "aside"
    options = {"on_error": "skip", "set_aside": aside}
    one, two = ranks(2).run(read_on_ranks, address, 4, None, 0, options)
    assert [ids for ids, _ in one[0]] == [[0, 1, 2], [7, 8, 9]]
    assert [ids for ids, _ in two[0]] == [[3, 4, 5, 6], [10, 11, 13]]
    assert sorted(one[1].values()) == [1, 1]
    assert [*two[1].values()] == [1]
    first, second = (
        [json.loads(line) for line in (aside / f"rank{n}.jsonl").read_text().splitlines()] for n in (0, 1)
    )
    assert [item["partition"] for item in first + second] == ["a", "a", "a"]
    assert first[0]["values"] == '{"y": 1'
    assert json.loads(first[1]["values"])["id"] == NUM
    assert second[0]["values"] == {"id": "12", "y": "one", "x": "2"}
    (entry,) = redis_server.client.xrange("a", second[0]["id"], second[0]["id"])
    assert entry[1][b"id"] == b"12"


def test_reasons_are_counted_together_and_named_with_the_first_record(redis_server, caplog):  # noqa: F811
    keys = redis_server.add("a", rows(0, 10, x=None) + rows(10, 20) + rows(20, 30, id="?"))
    source = stream(redis_server.address("a"), on_error="skip")
    assert [row for batch, _ in steps(source, 1, stop=lambda: True) for row in batch.sparse.values()] == [
        *range(10, 20)
    ]
    assert [*source.faults.skipped.values()] == [10, 10]
    texts = [record.getMessage() for record in caplog.records]
    assert [(keys[0] in text, keys[20] in text) for text in texts] == [(False, True), (True, False)]


def test_a_stopped_server_is_waited_for(redis_server, caplog):  # noqa: F811
    redis_server.add("a", rows(0, 10))
    events = []

    def stop():
        # Called whenever the rows do not suffice.
        events.append(len(found))
        if len(events) == 1:
            redis_server.kill()
        if len(events) == 5:
            redis_server.start()
            redis_server.add("a", rows(10, 16))
        return len(found) == 4

    found = []
    for batch, _ in steps(stream(redis_server.address("a")), 4, stop=stop):
        found.append(batch.sparse.values().tolist())
    assert found == [[*range(n, n + 4)] for n in range(0, 16, 4)]
    texts = [record.getMessage() for record in caplog.records]
    assert (
        sum("does not answer" in text for text in texts)
        == sum("answers again" in text for text in texts)
        == 1
    )


def fail_on_ranks(address, position):
    with pytest.raises(ValueError, match="are gone") as error:
        read_on_ranks(address, 2, position)
    return str(error.value)


def test_a_trimmed_stream_is_an_error_on_all_ranks(redis_server, ranks):  # noqa: F811
    redis_server.add("a", rows(0, 20))
    redis_server.add("b", rows(20, 40))
    address = redis_server.address("a", "b")
    position = read(address, 4)[2][1]
    redis_server.client.xtrim("b", maxlen=1, approximate=False)
    redis_server.client.xtrim("a", maxlen=1, approximate=False)
    assert all("'a'" in message for message in ranks(2).run(fail_on_ranks, address, position))


def test_a_burst_has_no_steps_while_it_waits(redis_server, monkeypatch):  # noqa: F811
    monkeypatch.setattr(broker_stream, "_IDLE_SECONDS", 0.02)
    redis_server.add("a", rows(0, 10))
    bursts = []
    for burst in stream(redis_server.address("a")).bursts(4, stop=lambda: len(bursts) > 3):
        bursts.append([batch.sparse.values().tolist() for batch in burst.batches])
    assert [burst for burst in bursts if burst] == [[[0, 1, 2, 3], [4, 5, 6, 7]]]
    assert len(bursts) > 3


class Train:
    """Reads two streams while they are written, and notes every batch in a file before the next one."""

    def __init__(self, address, folder, batch_size, num):
        self.address, self.folder, self.batch_size, self.num = address, folder, batch_size, num
        self.checkpoint = folder / "checkpoint.json"

    def run(self, kill_at=None, axis=None):
        axis = axis or Axis()
        step, position = json.loads(self.checkpoint.read_text()) if self.checkpoint.exists() else (0, None)
        source = stream(self.address, step_log=self.folder / "steps.jsonl")
        batches = steps(
            source,
            self.batch_size,
            position=position,
            axis=axis,
            stop=lambda: step * self.batch_size * axis.size >= self.num,
        )
        for batch, after in batches:
            step += 1
            content = [batch.sparse.values(), batch.dense, batch.labels, batch.times]
            torch.save(content, self.folder / f"{os.getpid()}-{step}-rank{axis.rank}.pt")
            if step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if step % 4 == 0:
                if axis.rank == 0:
                    new = self.folder / "checkpoint.new"
                    new.write_text(json.dumps([step, after]))
                    new.replace(self.checkpoint)
                source.on_checkpoint(after)

    def run_killed(self, kill_at):
        with _STARTING:
            pid = os.fork()
        if not pid:
            try:
                self.run(kill_at)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL

    def batches(self, rank=0):
        """Return the contents that were noted for every step."""
        found = {}
        for path in self.folder.glob(f"*-rank{rank}.pt"):
            found.setdefault(int(path.name.split("-")[1]), []).append(torch.load(path))
        return found

    def check(self, num_ranks=1):
        """Check that repeated steps are equal, and that every row is in one step."""
        by_rank = [self.batches(rank) for rank in range(num_ranks)]
        for found in by_rank:
            assert sorted(found) == [*range(1, self.num // (self.batch_size * num_ranks) + 1)]
            for first, *others in found.values():
                for other in others:
                    assert all(map(torch.equal, first, other))
        assert max(len(contents) for found in by_rank for contents in found.values()) > 1
        rows_of_all = [row for found in by_rank for first, *_ in found.values() for row in first[0].tolist()]
        assert sorted(rows_of_all) == [*range(self.num)]


@contextlib.contextmanager
def written(server, num, seed, *, is_restarted=False):
    """Write rows to three streams in random pieces, while the context lasts; maybe restart the server."""
    stopped = threading.Event()

    def write():
        rng = random.Random(seed)
        pending = rows(0, num)
        while pending and not stopped.is_set():
            count = rng.randint(1, 6)
            server.add(rng.choice("abc"), pending[:count])
            del pending[:count]
            time.sleep(0.001)
            if is_restarted and rng.random() < 0.1:
                server.kill()
                with _STARTING:
                    server.start()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        stopped.set()
        writer.join()


@pytest.mark.parametrize("kill_at", [1, 6, 11])
def test_killed_steps_are_repeated_with_the_same_records(redis_server, tmp_path, kill_at):  # noqa: F811
    train = Train(redis_server.address("a", "b", "c"), tmp_path, 12, 240)
    with written(redis_server, 240, kill_at, is_restarted=True):
        train.run_killed(kill_at)
        train.run_killed(kill_at + 3)
        train.run()
    train.check()
    # Steps before the last checkpoint are not kept.
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) < 8


def train_on_ranks(train, kill_at=None):
    train.run(kill_at, default_env().world)


def test_killed_steps_are_repeated_on_ranks(redis_server, ranks, tmp_path):  # noqa: F811
    train = Train(redis_server.address("a", "b", "c"), tmp_path, 6, 240)
    with written(redis_server, 240, 0):
        with pytest.raises(RankError):
            ranks(2).run(train_on_ranks, train, 7)
        ranks(2).run(train_on_ranks, train)
    train.check(2)


def test_another_number_of_ranks_loses_and_repeats_nothing(redis_server, ranks, tmp_path, caplog):  # noqa: F811
    redis_server.add("a", rows(0, 100))
    redis_server.add("b", rows(100, 200))
    train = Train(redis_server.address("a", "b"), tmp_path, 5, 200)
    train.run_killed(18)
    # The same rows per step on two ranks would repeat them; these are others.
    checkpoint_step, _ = json.loads(train.checkpoint.read_text())
    before = [row for step in range(1, checkpoint_step + 1) for row in train.batches()[step][0][0].tolist()]
    train.folder = tmp_path / "two"
    train.folder.mkdir()
    (train.folder / "steps.jsonl").write_bytes((tmp_path / "steps.jsonl").read_bytes())
    train.checkpoint.write_text(json.dumps([0, json.loads(train.checkpoint.read_text())[1]]))
    train.num = 200 - len(before)
    ranks(2).run(train_on_ranks, train)
    after = [row for rank in (0, 1) for one in train.batches(rank).values() for row in one[0][0].tolist()]
    assert sorted(before + after) == [*range(200)]


class MemoryBroker(Broker):
    """Records in memory, of partitions that become more."""

    name, start = "memory", -1

    def __init__(self):
        self.records, self.last = {}, {}

    def partitions(self):
        return [*self.records]

    def seek(self, ids):
        assert not self.last.keys() & ids.keys()
        self.last.update(ids)

    def read(self, partitions, max_bytes):
        read = {}
        for name in partitions:
            ids = [key for key in range(len(self.records[name])) if key > self.last[name]]
            if ids:
                payloads = [self.records[name][key] for key in ids]
                read[name], self.last[name] = Records(ids, [0] * len(ids), payloads), ids[-1]
        return read

    def close(self):
        self.last = {}


def test_partitions_may_become_more(monkeypatch):
    monkeypatch.setattr(broker_stream, "_LIST_SECONDS", 0.0)
    broker = MemoryBroker()
    monkeypatch.setattr(broker_stream, "open_broker", lambda address: broker)
    messages = [json.dumps(row).encode() for row in rows(0, 12)]
    broker.records["a"] = messages[:5]

    def stop():
        if "b" not in broker.records:
            broker.records["b"] = messages[5:]
            return False
        return len(found) == 3

    found = []
    for batch, position in steps(stream("memory"), 4, stop=stop):
        found.append((batch.sparse.values().tolist(), position))
    assert [row for ids, _ in found for row in ids] == [*range(12)]
    assert found[-1][1] == {"a": [4, 0, 0], "b": [6, 0, 0]}
    broker.records.pop("b")
    with pytest.raises(ValueError, match="'b'"):
        read("memory", 4, position=found[-1][1])


def test_options_are_checked(redis_server):  # noqa: F811
    for name in ("poll_seconds", "late_seconds"):
        with pytest.raises(ValueError, match=f"{name} is 0"):
            BrokerStream("redis://host/0?stream=a", FEATURES, **{name: 0})
    with pytest.raises(ValueError, match="'amqp'"):
        BrokerStream("amqp://host", FEATURES)
    with pytest.raises(ValueError, match="got 0"):
        read(redis_server.address("a"), 0)
    with pytest.raises(ValueError, match="file"):
        read(redis_server.address("a"), 4, position={"file": "a.parquet", "row": 3})


def test_memory_stays_bounded(redis_server):  # noqa: F811
    # A step that is larger than what one round reads, and rounds that are larger than a step.
    redis_server.add("a", rows(0, 1000))
    source = stream(redis_server.address("a"))
    found = [batch for batch, _ in steps(source, 400, stop=lambda: True)]
    assert np.concatenate([batch.sparse.values() for batch in found]).tolist() == [*range(800)]
