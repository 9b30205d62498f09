"""Records of Kafka topics. The position of a record in a partition is its offset."""

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import SplitResult, parse_qsl, unquote

from meshrec.data.brokers import Broker, BrokerAwayError, RecordId, Records, removed_records, split_address
from meshrec.data.faults import DataError, needs

SCHEMES = ("kafka",)
_log = logging.getLogger(__name__)

_LIST_SECONDS = 5.0
"""Timeout for listing the partitions."""
_FIRST_SECONDS = 2.0
"""Time in which an idle broker usually says that a partition has no more records."""
_MAX_MESSAGES = 2000
"""Messages per call of ``consume``."""


class KafkaBroker(Broker):
    """Connection to a Kafka cluster.

    Partitions are assigned and sought explicitly. The broker keeps no positions: nothing is committed.

    Args:
        address: ``kafka://HOST:PORT,HOST:PORT/TOPIC,TOPIC``. Options after a question mark are those of
            librdkafka, such as ``?security.protocol=ssl``. User and password are in the address, or in the
            environment variables ``KAFKA_USERNAME`` and ``KAFKA_PASSWORD``; then ``security.protocol`` is
            ``sasl_ssl`` and ``sasl.mechanism`` is ``PLAIN`` unless options have other values.

    Raises:
        ValueError: the address has no host or topic, or a wrong option.
    """

    start = -1

    def __init__(self, address: str) -> None:
        self._kafka: Any = needs("confluent_kafka", "streams")
        parts, self.name = split_address(address)
        self._topics = [topic for topic in parts.path.strip("/").split(",") if topic]
        hosts = parts.netloc.rpartition("@")[2]
        if not hosts or not self._topics:
            raise ValueError(
                f"{self.name} must name hosts and topics. Example: kafka://localhost:9092/clicks"
            )
        self._options = self._options_of(hosts, parts)
        self._client: Any = None
        # Last offset that was read, by topic and partition number.
        self._last: dict[tuple[str, int], int] = {}
        # Offset after the last record, if all were read. Offsets before it may have no records.
        self._ends: dict[tuple[str, int], int] = {}
        # Whether an error has been logged since the last message, so that an outage is logged once.
        self._is_away = False
        # Reason for which the cluster refuses the user.
        self._refusal: str | None = None
        self._paused: set[tuple[str, int]] = set()

    def _options_of(self, hosts: str, parts: SplitResult) -> dict[str, Any]:
        """Return the options of librdkafka."""
        options = dict(parse_qsl(parts.query))
        user, _, password = parts.netloc.rpartition("@")[0].partition(":")
        user = unquote(user) or os.environ.get("KAFKA_USERNAME", "")
        password = unquote(password) or os.environ.get("KAFKA_PASSWORD", "")
        if user:
            options = {
                "security.protocol": "sasl_ssl",
                "sasl.mechanism": "PLAIN",
                **options,
                "sasl.username": user,
                "sasl.password": password,
            }
        fixed: dict[str, Any] = {
            "bootstrap.servers": hosts,
            # Required, but never used: positions are in checkpoints.
            "group.id": "meshrec",
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # Records that are gone must not be skipped.
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "error_cb": self._on_error,
        }
        if taken := sorted(fixed.keys() & options.keys()):
            raise ValueError(f"{self.name}: the options {taken} cannot be set. Remove them from the address.")
        # librdkafka prints to stderr otherwise.
        defaults = {"log_level": 2, "fetch.wait.max.ms": 100, "queued.max.messages.kbytes": 16384}
        return {**defaults, **options, **fixed}

    @property
    def _consumer(self) -> Any:
        """Consumer, which is created at its first use, and not before a fork."""
        if self._client is None:
            try:
                self._client = self._kafka.Consumer(self._options)
            except self._kafka.KafkaException as error:
                # The message of librdkafka names the option.
                raise ValueError(f"{self.name}: {error.args[0].str()}. Correct the address.") from error
        return self._client

    def _on_error(self, error: Any) -> None:
        """Log the first error of an outage. librdkafka reconnects and repeats requests by itself."""
        if error.code() == self._kafka.KafkaError._AUTHENTICATION:
            self._refusal = error.str()
        if not self._is_away:
            _log.warning("%s does not answer: %s; waiting for it", self.name, error.str())
        self._is_away = True

    def partitions(self) -> Sequence[str]:
        names = []
        for topic in self._topics:
            try:
                listed = self._consumer.list_topics(topic, timeout=_LIST_SECONDS).topics[topic]
            except self._kafka.KafkaException as error:
                self._raise_if_refused()
                raise BrokerAwayError(error.args[0].str()) from error
            if listed.error is not None:
                self._raise_if_lasting(listed.error, topic)
                raise BrokerAwayError(f"{topic}: {listed.error.str()}")
            names += [f"{topic}/{number}" for number in listed.partitions]
        return names

    def seek(self, ids: Mapping[str, RecordId]) -> None:
        first = self._kafka.OFFSET_BEGINNING
        offsets = {_partition(name): int(last) for name, last in ids.items()}
        self._last.update(offsets)
        self._consumer.incremental_assign(
            [
                self._kafka.TopicPartition(*partition, first if last < 0 else last + 1)
                for partition, last in offsets.items()
            ]
        )

    def read(self, partitions: Sequence[str], max_bytes: int) -> dict[str, Records]:
        requested = {_partition(name) for name in partitions}
        self._pause_except(requested)
        records: dict[str, Records] = {}
        deadline, num_bytes = time.monotonic() + _FIRST_SECONDS, 0
        while num_bytes < max_bytes:
            # Waits only if nothing has arrived, and more may be on its way.
            waits = not records and not requested <= self._ends.keys()
            messages = self._consumer.consume(_MAX_MESSAGES, 0.02 if waits else 0)
            for message in messages:
                num_bytes += self._add(message, records)
            if not messages and (not waits or time.monotonic() > deadline):
                break
        self._raise_if_refused()
        return records

    def at_end(self, partitions: Sequence[str]) -> bool:
        # Not `_ends` alone: it does not change while the cluster is away.
        for partition in map(_partition, partitions):
            try:
                _, end = self._consumer.get_watermark_offsets(
                    self._kafka.TopicPartition(*partition), timeout=_LIST_SECONDS
                )
            except self._kafka.KafkaException as error:
                self._raise_if_refused()
                raise BrokerAwayError(error.args[0].str()) from error
            if end > max(self._last[partition] + 1, self._ends.get(partition, 0)):
                return False
        return True

    def _raise_if_refused(self) -> None:
        """Raise DataError if the cluster has refused the user."""
        if self._refusal is not None:
            raise DataError(
                f"{self.name} refuses access: {self._refusal}. Check KAFKA_USERNAME and KAFKA_PASSWORD."
            )

    def _pause_except(self, requested: set[tuple[str, int]]) -> None:
        """Fetch only some of the assigned partitions."""
        paused = self._last.keys() - requested
        for change, partitions in (
            (self._consumer.pause, paused - self._paused),
            (self._consumer.resume, self._paused - paused),
        ):
            if partitions:
                change([self._kafka.TopicPartition(*partition) for partition in partitions])
        self._paused = paused

    def _add(self, message: Any, records: dict[str, Records]) -> int:
        """Add a message to the records, and return its size in bytes."""
        topic, number = message.topic(), message.partition()
        error = message.error()
        if error is not None:
            if error.code() == self._kafka.KafkaError._PARTITION_EOF:
                self._ends[topic, number] = message.offset()
            else:
                self._raise_if_lasting(error, f"{topic}/{number}")
                self._on_error(error)
            return 0
        self._is_away = False
        partition, payload = (topic, number), message.value() or b""
        self._ends.pop(partition, None)
        self._last[partition] = offset = message.offset()
        batch = records.setdefault(f"{topic}/{number}", Records.empty())
        batch.ids.append(offset)
        batch.times.append(1000 * message.timestamp()[1])
        batch.payloads.append(payload)
        return len(payload)

    def _raise_if_lasting(self, error: Any, name: str) -> None:
        """Raise DataError for an error about a topic or partition, unless librdkafka repeats the request."""
        kinds, code = self._kafka.KafkaError, error.code()
        if code in (kinds._AUTO_OFFSET_RESET, kinds.OFFSET_OUT_OF_RANGE):
            raise removed_records(self, name, self._last[_partition(name)], error.str())
        if code in (kinds.TOPIC_AUTHORIZATION_FAILED, kinds.CLUSTER_AUTHORIZATION_FAILED) or error.fatal():
            raise DataError(
                f"{self.name} refuses access to {name!r}: {error.str()}. Check the user's rights."
            )

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None
        self._last, self._ends, self._paused = {}, {}, set()


def _partition(name: str) -> tuple[str, int]:
    """Return the topic and the partition number of a partition's name. Topics have no slash."""
    topic, _, number = name.rpartition("/")
    return topic, int(number)
