"""Reading Kafka topics from librdkafka's cluster for tests: order, pauses of the cluster, expired records."""

import time

import pytest

from meshrec.data import kafka_broker
from meshrec.data.brokers import BrokerAwayError
from meshrec.data.faults import DataError
from meshrec.data.kafka_broker import KafkaBroker
from tests.data.broker_servers import kafka_cluster  # noqa: F401


def read(broker, names, num):
    """Read until there are ``num`` records, or for some seconds; return the offsets by partition."""
    offsets = {name: [] for name in names}
    deadline = time.monotonic() + 20
    while sum(map(len, offsets.values())) < num and time.monotonic() < deadline:
        for name, some in broker.read(names, 1 << 20).items():
            offsets[name] += some.ids
    return offsets


@pytest.fixture
def open_broker(kafka_cluster):  # noqa: F811
    brokers = []

    def open_one(topic):
        brokers.append(KafkaBroker(kafka_cluster.address(topic)))
        return brokers[-1]

    yield open_one
    for broker in brokers:
        broker.close()


def test_records_come_in_order_from_any_offset(kafka_cluster, open_broker):  # noqa: F811
    kafka_cluster.add("order", [{"n": n} for n in range(500)], 0, range(1000, 1500))
    kafka_cluster.add("order", [{"n": n} for n in range(50)], 2)
    broker = open_broker("order")
    names = ["order/0", "order/2"]
    assert broker.partitions() == [f"order/{number}" for number in range(4)]
    broker.seek({"order/0": broker.start, "order/2": 9})
    assert read(broker, names, 540) == {"order/0": [*range(500)], "order/2": [*range(10, 50)]}
    assert broker.read(names, 1000) == {}
    kafka_cluster.add("order", [{"n": 7}], 0, [5])
    deadline = time.monotonic() + 20
    while not (records := broker.read(names, 1000)) and time.monotonic() < deadline:
        pass
    assert records == {"order/0": ([500], [5000], [b'{"n": 7}'])}


def test_partitions_that_are_not_wanted_keep_their_records(kafka_cluster, open_broker):  # noqa: F811
    for number in (0, 1):
        kafka_cluster.add("paused", [{"n": n} for n in range(3000)], number)
    broker = open_broker("paused")
    names = ["paused/0", "paused/1"]
    broker.seek(dict.fromkeys(names, broker.start))
    offsets = {name: [] for name in names}
    turn = 0
    while min(map(len, offsets.values())) < 3000:
        wanted = [names[turn % 2]] if turn % 3 else names
        turn += 1
        records = broker.read(wanted, 20_000)
        assert records.keys() <= set(wanted)
        for name, some in records.items():
            offsets[name] += some.ids
    assert offsets == {name: [*range(3000)] for name in names}


def test_expired_and_future_offsets_are_an_error(kafka_cluster, open_broker):  # noqa: F811
    # The cluster for tests keeps 5 MB of a partition.
    for _ in range(80):
        kafka_cluster.add_payload("expired", b"x" * 100_000)
    kafka_cluster.producer.flush()
    for last in (0, 1000):
        broker = open_broker("expired")
        broker.seek({"expired/0": last})
        with pytest.raises(DataError, match=f"'expired/0' after {last}"):
            read(broker, ["expired/0"], 1)
    broker = open_broker("expired")
    broker.seek({"expired/0": broker.start})
    (records,) = broker.read(["expired/0"], 1).values()
    assert records.ids[0] > 1


def test_a_cluster_that_stops_for_a_while_loses_nothing(
    kafka_cluster,  # noqa: F811
    open_broker,
    monkeypatch,
):
    monkeypatch.setattr(kafka_broker, "_LIST_SECONDS", 0.2)
    kafka_cluster.add("away", [{"n": n} for n in range(10)])
    broker = open_broker("away")
    broker.seek({"away/0": broker.start})
    assert read(broker, ["away/0"], 10) == {"away/0": [*range(10)]}
    kafka_cluster.pause()
    try:
        kafka_cluster.producer.produce("away", b"late", partition=0)
        assert broker.read(["away/0"], 1000) == {}
        with pytest.raises(BrokerAwayError):
            open_broker("other").partitions()
    finally:
        kafka_cluster.go_on()
    kafka_cluster.producer.flush()
    assert read(broker, ["away/0"], 1) == {"away/0": [10]}


def test_user_and_password_are_used_and_not_shown(monkeypatch):
    address = "kafka://eve:hunter%402@host:9092,other:9092/clicks,views"
    broker = KafkaBroker(address)
    assert broker.name == "kafka://host:9092,other:9092/clicks,views"
    options = broker._options
    assert (options["sasl.username"], options["sasl.password"]) == ("eve", "hunter@2")
    assert (options["security.protocol"], options["sasl.mechanism"]) == ("sasl_ssl", "PLAIN")
    monkeypatch.setenv("KAFKA_USERNAME", "bob")
    monkeypatch.setenv("KAFKA_PASSWORD", "swordfish")
    options = KafkaBroker("kafka://host/clicks?sasl.mechanism=SCRAM-SHA-256")._options
    assert (options["sasl.username"], options["sasl.password"]) == ("bob", "swordfish")
    assert options["sasl.mechanism"] == "SCRAM-SHA-256"


@pytest.mark.parametrize(
    ("address", "named"),
    [
        ("kafka://host:9092", "kafka://host:9092"),
        ("kafka:///topic", "hosts"),
        ("kafka://host/topic?auto.offset.reset=latest", "auto.offset.reset"),
    ],
)
def test_wrong_addresses_are_told(address, named):
    with pytest.raises(ValueError, match=named):
        KafkaBroker(address)


def test_an_unknown_option_is_told_at_the_first_use():
    with pytest.raises(ValueError, match=r"no\.such\.option"):
        KafkaBroker("kafka://host/topic?no.such.option=1").partitions()


def test_the_end_of_partitions_is_that_of_now(kafka_cluster, open_broker, monkeypatch):  # noqa: F811
    kafka_cluster.add("end", [{"n": n} for n in range(5)])
    broker = open_broker("end")
    names = ["end/0", "end/1"]
    broker.seek(dict.fromkeys(names, broker.start))
    assert not broker.at_end(names)
    read(broker, names, 5)
    assert broker.at_end(names)
    kafka_cluster.add("end", [{"n": 5}])
    assert not broker.at_end(names)
    read(broker, names, 1)
    assert broker.at_end(names)
    monkeypatch.setattr(kafka_broker, "_LIST_SECONDS", 0.2)
    kafka_cluster.pause()
    try:
        with pytest.raises(BrokerAwayError):
            broker.at_end(names)
    finally:
        kafka_cluster.go_on()
