#!/usr/bin/env bash
# confluent-kafka 2.16.1: a record that is produced with timestamp=0 gets the current time.
# Guess: 1970-01-01, as timestamp=1 is a millisecond later, and as a caller that names no time gets the current one.
# Seen: the first of the events 0, 1, 2 ms is decades after the others. A reader whose watermark is the largest
# time minus an allowed lateness takes all later events of a replayed or simulated log for late.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --disable-pip-version-check confluent-kafka==2.16.1
cd "$folder"
venv/bin/python - <<'PY'
import time

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

# The cluster for tests that librdkafka has.
cluster = AdminClient({"bootstrap.servers": "none:1", "test.mock.num.brokers": 1, "log_level": 0})
(broker,) = cluster.list_topics(timeout=30).brokers.values()
options = {"bootstrap.servers": f"{broker.host}:{broker.port}", "log_level": 0}
producer = Producer(options)
for milliseconds in (0, 1, 2):
    producer.produce("events", b"{}", partition=0, timestamp=milliseconds)
producer.flush()
consumer = Consumer({**options, "group.id": "one"})
consumer.assign([TopicPartition("events", 0, 0)])
times = []
while len(times) < 3:
    if (message := consumer.poll(1)) is not None:
        assert message.error() is None
        times.append(message.timestamp()[1])
consumer.close()
print(times)
assert abs(times[0] / 1000 - time.time()) < 600 and times[1:] == [1, 2]
PY
