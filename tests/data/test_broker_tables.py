"""Records of brokers as tables: one order and one schema, and the same records again after a kill."""

import json

import numpy as np
import pyarrow as pa
import pytest

from meshrec.data import DataError, broker_tables
from meshrec.data.broker_tables import BrokerTables
from meshrec.data.brokers import Broker, BrokerAwayError, Records
from meshrec.data.faults import RecordFaults
from tests.data.test_messages import (
    FEATURES,
    TABLE,
    arrow_message,
    assert_same,
    encode,
    json_message,
    text_message,
)


class SlowBroker(Broker):
    """Records in memory, some of which have arrived. A read returns a few of one partition.

    Args:
        records: times and payloads by partition; the ID of a record is its index.
    """

    name, start = "memory", -1

    def __init__(self, records):
        self.records, self.last = records, {}
        self.arrived = {name: len(times) for name, (times, _) in records.items()}
        self.is_away, self.slow = False, set()
        self.rng = np.random.default_rng(0)

    def partitions(self):
        return [*self.records]

    def seek(self, ids):
        assert not self.last.keys() & ids.keys()
        self.last.update(ids)

    def read(self, partitions, max_bytes):
        if self.is_away:
            raise BrokerAwayError("away")
        for name in self.rng.permutation([name for name in partitions if name not in self.slow]).tolist():
            first, (times, payloads) = self.last[name] + 1, self.records[name]
            end = min(first + int(self.rng.integers(1, 9)), self.arrived[name])
            if end > first:
                self.last[name] = end - 1
                return {name: Records([*range(first, end)], times[first:end], payloads[first:end])}
        return {}

    def at_end(self, partitions):
        return all(self.last[name] + 1 == self.arrived[name] for name in partitions)

    def close(self):
        self.last = {}


@pytest.fixture
def tables(monkeypatch):
    """``tables(broker, **options)``: the records of a broker."""
    monkeypatch.setattr(broker_tables, "_POLL_SECONDS", 0.0)

    def create(broker, columns=("key", "ts"), kinds=None, on_error="raise", **options):
        faults = RecordFaults(on_error)
        return BrokerTables(broker, columns, kinds or {}, key="key", time="ts", faults=faults, **options)

    return create


def merged(num=60):
    """Return a broker with three partitions, and the numbers of its records in the order of their times."""
    rng, records, order = np.random.default_rng(1), {}, []
    for name in "abc":
        # Some times are equal, and some are before that of the record before.
        times = np.sort(rng.integers(0, num, num)) - rng.integers(0, 2, num)
        keys = np.maximum.accumulate(times).tolist()
        numbers = [f"{name}{n}" for n in range(num)]
        records[name] = (times.tolist(), [json.dumps({"key": key, "ts": 5}).encode() for key in numbers])
        order += zip(keys, [name] * num, range(num), strict=True)
    return records, [f"{name}{n}" for _, name, n in sorted(order)]


def test_partitions_are_merged_by_time_and_any_call_can_be_repeated(tables):
    records, expected = merged()
    reader = tables(SlowBroker(records))
    states, logged, parts = [reader.state_dict()], [], []
    while (table := reader.read()) is not None:
        parts.append(table["key"].to_pylist())
        logged.append(json.loads(json.dumps(reader.logged)))
        states.append(reader.state_dict())
    assert [key for part in parts for key in part] == expected
    assert len(parts) > 10
    assert not reader.is_waiting
    for number, state in enumerate(states[:-1]):
        broker = SlowBroker(records)
        again = tables(broker, state=state)
        broker.is_away = True
        assert again.read(logged[number]) is None
        assert again.is_waiting
        broker.is_away, again._requests._next_attempt = False, 0.0
        for part, call in zip(parts[number:], logged[number:], strict=True):
            assert again.read(call)["key"].to_pylist() == part
        assert again.read() is None
        assert again.state_dict() == states[-1]


def keys_of(reader):
    """Read all records, and return their keys."""
    keys = []
    while (table := reader.read()) is not None:
        keys += table["key"].to_pylist()
    return keys


def test_only_a_partition_that_may_have_earlier_records_is_waited_for(tables, monkeypatch):
    monkeypatch.setattr(broker_tables, "_READ_SECONDS", 0.01)
    records, expected = merged()
    broker = SlowBroker(records)
    broker.slow = {"b"}
    reader = tables(broker)
    assert reader.read() is None
    assert reader.is_waiting
    broker.slow = set()
    assert keys_of(reader) == expected
    broker = SlowBroker(records)
    broker.arrived["b"] = 0
    reader = tables(broker)
    assert keys_of(reader) == [key for key in expected if key[0] != "b"]
    assert not reader.is_waiting
    broker.arrived["b"] = 60
    assert keys_of(reader) == [f"b{n}" for n in range(60)]


@pytest.mark.parametrize("form", [json_message, text_message, None])
def test_rows_encode_to_the_samples_of_a_file(tables, form):
    table = TABLE.append_column("key", pa.array(["a", "b", "3", "4"]))
    table = table.append_column("ts", pa.array([1, 2, 3, 4]))
    messages = [arrow_message(table)] if form is None else [form(row) for row in table.to_pylist()]
    reader = tables(
        SlowBroker({"a": ([0] * len(messages), messages)}), FEATURES.columns(), FEATURES.fitted_kinds()
    )
    parts = []
    while (part := reader.read()) is not None:
        parts.append(part)
    rows = pa.concat_tables(parts)
    assert_same(encode(FEATURES, rows), encode(FEATURES, TABLE))
    assert rows["key"].to_pylist() == ["a", "b", "3", "4"]
    assert rows["ts"].to_pylist() == [1, 2, 3, 4]


def messages(*rows):
    return [json.dumps(row).encode() for row in rows]


def test_unknown_kinds_are_those_of_the_first_values(tables):
    row = {"key": 7, "ts": "2024-05-01T00:00:00", "user": None}
    broker = SlowBroker({"a": ([0] * 4, messages(row, row, row | {"user": "u"}, row | {"user": 5}))})
    broker.arrived["a"] = 2
    reader = tables(broker, ["user"], on_error="skip")
    assert reader.read() is None
    assert reader.is_waiting
    broker.arrived["a"] = 4
    parts = []
    while (part := reader.read()) is not None:
        parts.append(part)
    rows = pa.concat_tables(parts)
    assert rows.schema.types == [pa.string(), pa.int64(), pa.timestamp("us")]
    assert rows["user"].to_pylist() == [None, None, "u"]
    assert [*reader._faults.skipped.values()] == [1]
    assert reader.state_dict()["kinds"] == {"key": "integer", "ts": "time", "user": "text"}
    # Another object has the kinds from the state.
    again = SlowBroker({"a": ([0], messages(row | {"user": 5}))})
    with pytest.raises(DataError, match="'user'"):
        tables(again, ["user"], state={"partitions": {}, "kinds": reader.state_dict()["kinds"]}).read()


def test_a_column_without_values_is_an_error(tables, monkeypatch):
    monkeypatch.setattr(broker_tables, "_PARTITION_BYTES", 50)
    broker = SlowBroker({"a": ([0] * 4, messages(*[{"key": 7, "ts": 8}] * 4))})
    with pytest.raises(DataError, match=r"'user'.*--from"):
        tables(broker, ["user"]).read()


def test_damaged_records_are_named_counted_and_set_aside(tables, tmp_path):
    rows = messages({"key": "a", "ts": 1}, {"key": "b", "ts": "late"}, {"key": "c", "ts": 3})
    table = pa.table({"key": ["d", "e"], "ts": [4.5, 5.0]})
    records = {"a": ([0] * 5, [*rows, b"{", arrow_message(table)])}
    with pytest.raises(DataError, match=r"record 1 of 'a'.*'ts'"):
        keys_of(tables(SlowBroker(records)))
    reader = tables(SlowBroker(records), on_error="skip", set_aside=tmp_path / "aside")
    assert keys_of(reader) == ["a", "c", "e"]
    items = [json.loads(line) for line in (tmp_path / "aside").read_text().splitlines()]
    assert [(item["id"], item["row"]) for item in items] == [(1, 0), (3, 0), (4, 0)]
    assert sum(reader._faults.skipped.values()) == 3
