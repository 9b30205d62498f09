"""Reading Redis streams from a real server: order, restarts of the server, trimmed streams."""

import logging

import pytest

from meshrec.data.brokers import BrokerAwayError
from meshrec.data.faults import DataError
from meshrec.data.redis_broker import RedisBroker
from tests.data.broker_servers import redis_server  # noqa: F401


def read_all(broker, names, max_bytes=1000):
    """Read until there is nothing more; return the IDs by stream."""
    ids = {name: [] for name in names}
    while records := broker.read(names, max_bytes):
        for name, some in records.items():
            assert len(some.ids) == len(some.times) == len(some.payloads)
            ids[name] += some.ids
    return ids


def ids_of(numbers):
    return [f"{number}-1" for number in numbers]


def test_entries_come_in_order_from_any_position(redis_server):  # noqa: F811
    redis_server.add("a", [{"n": n} for n in range(300)], ids_of(range(1, 301)))
    redis_server.add("b", [{"n": n} for n in range(40)], ids_of(range(1, 41)))
    broker = RedisBroker(redis_server.address("a", "b", "none"))
    assert broker.partitions() == ["a", "b", "none"]
    broker.seek({"a": broker.start, "b": "30-1", "none": broker.start})
    assert read_all(broker, ["a", "b", "none"]) == {
        "a": ids_of(range(1, 301)),
        "b": ids_of(range(31, 41)),
        "none": [],
    }
    redis_server.add("a", [{"n": 0}], ["400-0"])
    records = broker.read(["a"], 1000)["a"]
    assert (records.ids, records.times, records.payloads) == (["400-0"], [400_000], [b'{"n": 0}'])
    broker.close()


def test_an_entry_is_a_message_or_has_a_field_per_column(redis_server):  # noqa: F811
    for fields in ({"json": "{}"}, {"arrow": b"\xff"}, {"text": "{}"}, {"json": "1", "id": "2"}):
        redis_server.client.xadd("a", fields)
    broker = RedisBroker(redis_server.address("a"))
    broker.seek({"a": broker.start})
    (records,) = broker.read(["a"], 1 << 20).values()
    assert records.payloads == [b"{}", b"\xff", {b"text": b"{}"}, {b"json": b"1", b"id": b"2"}]


def test_the_size_of_entries_limits_how_many_are_requested(redis_server):  # noqa: F811
    redis_server.add("a", [{"text": "x" * 1000}] * 200)
    broker = RedisBroker(redis_server.address("a"))
    broker.seek({"a": broker.start})
    broker.read(["a"], 20_000)
    assert 15 <= len(broker.read(["a"], 20_000)["a"].ids) <= 20


def test_a_restarted_server_continues_after_the_last_entry(redis_server):  # noqa: F811
    redis_server.add("a", [{"n": n} for n in range(10)], ids_of(range(1, 11)))
    broker = RedisBroker(redis_server.address("a"))
    broker.seek({"a": broker.start})
    assert len(broker.read(["a"], 1 << 20)["a"].ids) == 10
    redis_server.kill()
    for _ in range(2):
        with pytest.raises(BrokerAwayError):
            broker.read(["a"], 1000)
    redis_server.start()
    redis_server.add("a", [{"n": 11}], ["11-1"])
    assert read_all(broker, ["a"]) == {"a": ["11-1"]}


def test_trimmed_entries_are_an_error_unless_they_were_read(redis_server):  # noqa: F811
    redis_server.add("a", [{"n": n} for n in range(20)], ids_of(range(1, 21)))
    broker = RedisBroker(redis_server.address("a"))

    def read_after(last):
        broker.close()
        broker.seek({"a": last})
        return read_all(broker, ["a"])["a"]

    # A producer deletes single entries: they are not missing.
    redis_server.client.xdel("a", "5-1", "7-1")
    assert read_after("5-1") == ids_of([6, *range(8, 21)])
    redis_server.client.xtrim("a", minid="10-1", approximate=False)
    assert read_after("10-1") == ids_of(range(11, 21))
    assert read_after("0-0") == ids_of(range(10, 21))
    with pytest.raises(DataError, match=r"'a' after 8-1 .* 10-1"):
        read_after("8-1")
    redis_server.client.xtrim("a", maxlen=0, approximate=False)
    assert read_after("20-1") == []
    redis_server.add("a", [{"n": 30}], ["30-1"])
    with pytest.raises(DataError, match="after 20-1"):
        read_after("20-1")


def test_a_server_that_dies_between_two_requests_loses_no_entry(redis_server, monkeypatch):  # noqa: F811
    for name in ("a", "b"):
        redis_server.add(name, [{"n": n} for n in range(3)], ids_of(range(1, 4)))
    # Its position is missing, so the stream is looked at more closely.
    redis_server.client.xdel("b", "2-1")
    broker = RedisBroker(redis_server.address("a", "b"))
    broker.seek({"a": "1-1", "b": "2-1"})
    with monkeypatch.context() as patch:
        execute = type(redis_server.client.pipeline()).execute

        def killed(pipeline):
            answers = execute(pipeline)
            redis_server.kill()
            return answers

        patch.setattr(type(redis_server.client.pipeline()), "execute", killed)
        with pytest.raises(BrokerAwayError):
            broker.read(["a", "b"], 1000)
    redis_server.start()
    assert read_all(broker, ["a", "b"]) == {"a": ids_of([2, 3]), "b": ids_of([3])}


def test_entries_that_the_server_lost_after_they_were_read_are_an_error(redis_server):  # noqa: F811
    redis_server.add("a", [{"n": n} for n in range(3)], ids_of(range(1, 4)))
    broker = RedisBroker(redis_server.address("a"))
    broker.seek({"a": "3-1"})
    redis_server.client.xdel("a", "3-1")
    assert broker.read(["a"], 1000) == {}
    # As if the server had died before it wrote the entry: it may give this ID again.
    redis_server.client.execute_command("XSETID", "a", "2-1")
    with pytest.raises(DataError, match=r"'a' was read up to 3-1.* 2-1"):
        broker.read(["a"], 1000)
    redis_server.client.delete("a")
    assert broker.read(["a"], 1000) == {}


def test_addresses_have_secrets_that_are_not_shown(redis_server, monkeypatch, caplog):  # noqa: F811
    caplog.set_level(logging.DEBUG)
    redis_server.client.execute_command("ACL", "SETUSER", "eve", "on", ">hunter2", "~*", "+@all")
    redis_server.client.config_set("requirepass", "swordfish")
    redis_server.add("a", [{"n": 1}])
    shown = []

    def read(address):
        broker = RedisBroker(address)
        shown.append(broker.name)
        broker.seek({"a": broker.start})
        return len(broker.read(["a"], 1000)["a"].ids)

    address = redis_server.address("a")
    for wrong in (address, address + "&password=wrong"):
        with pytest.raises(DataError) as error:
            read(wrong)
        shown.append(str(error.value))
    assert read(address + "&username=eve&password=hunter2") == 1
    monkeypatch.setenv("REDIS_PASSWORD", "swordfish")
    assert read(address) == 1
    monkeypatch.setenv("REDIS_USERNAME", "eve")
    monkeypatch.setenv("REDIS_PASSWORD", "hunter2")
    assert read(address) == 1
    assert RedisBroker("rediss://eve:hunter2@host:1/0?stream=a").name == "rediss://host:1/0"
    assert not any(
        word in text for text in [*shown, caplog.text] for word in ("hunter2", "swordfish", "wrong")
    )


@pytest.mark.parametrize("query", ["", "?stream=", "?stream=a,a", "?streams=a"])
def test_an_address_names_each_stream_once(query):
    with pytest.raises(ValueError, match="redis://host/0"):
        RedisBroker(f"redis://host/0{query}")


def test_a_key_that_is_no_stream_is_an_error(redis_server):  # noqa: F811
    redis_server.client.set("a", "text")
    broker = RedisBroker(redis_server.address("a"))
    broker.seek({"a": broker.start})
    with pytest.raises(DataError, match="WRONGTYPE"):
        broker.read(["a"], 1000)
