"""Interface of message brokers: partitions of records, each with an ID that increases in its partition."""

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar
from urllib.parse import SplitResult, urlsplit

from meshrec.data.faults import DataError

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_FIRST_WAIT, _MAX_WAIT = 0.1, 5.0
"""Time before the second attempt to reach a broker that is away, and the maximum, in seconds."""

RecordId = str | int
"""ID of a record in its partition: a Redis stream ID, or a Kafka offset. A plain value."""
Payload = bytes | dict[bytes, bytes]
"""Content of a record: a JSON object, an Arrow IPC stream, or a string per column. See data/messages.py."""


class BrokerAwayError(Exception):
    """The broker does not answer now. The request may be repeated later."""


class Records(NamedTuple):
    """Consecutive records of a partition. All lists have an entry per record."""

    ids: list[RecordId]
    times: list[int]
    """Time at which the broker or the producer wrote the record, in microseconds since 1970."""
    payloads: list[Payload]

    @staticmethod
    def empty() -> "Records":
        """Return no records, to which records may be added."""
        return Records([], [], [])


class Broker(ABC):
    """Connection to a broker, which reads the records of some partitions.

    Attributes:
        name: address without user, password and options, for messages.
        start: ID before the first record of every partition.
    """

    name: str
    start: RecordId

    @abstractmethod
    def partitions(self) -> Sequence[str]:
        """Return the names of all partitions that exist now.

        Raises:
            BrokerAwayError: the broker does not answer.
            DataError: the broker refuses access.
        """

    @abstractmethod
    def seek(self, ids: Mapping[str, RecordId]) -> None:
        """Read partitions from now on, in addition to those of earlier calls.

        Args:
            ids: ID by partition. Records after it are read, in order.
        """

    @abstractmethod
    def read(self, partitions: Sequence[str], max_bytes: int) -> dict[str, Records]:
        """Return the next records by partition. Partitions without new records are missing.

        Args:
            partitions: partitions to read, a part of those of `seek`.
            max_bytes: size of records after which no more are requested; an approximate limit.

        Raises:
            BrokerAwayError: the broker does not answer.
            DataError: records after the last one that was read, or after the ID of `seek`, are gone; or the
                broker refuses access.
        """

    def at_end(self, partitions: Sequence[str]) -> bool:
        """Return whether the broker now has no records after those of `read`.

        Call it when `read` has returned no records of the partitions.

        Raises:
            BrokerAwayError: the broker does not answer.
        """
        return True

    @abstractmethod
    def close(self) -> None:
        """Close the connection. A later call opens another, which reads no partitions yet."""


class Requests:
    """Requests to a broker, which are attempted again, after growing waits, while the broker is away.

    Args:
        name: name of the broker, for messages.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        # Time of time.monotonic before which no attempt is made.
        self._next_attempt = 0.0
        # Time until the attempt after the next one; 0 while the broker answers.
        self._wait = 0.0

    @property
    def is_away(self) -> bool:
        """Whether the broker has not answered the last request."""
        return self._wait > 0

    def attempt(self, request: Callable[[], _T], otherwise: _T) -> _T:
        """Make a request, and return ``otherwise`` while the broker is away."""
        if time.monotonic() < self._next_attempt:
            return otherwise
        try:
            answer = request()
        except BrokerAwayError as error:
            if not self._wait:
                _log.warning("%s does not answer: %s; waiting for it", self._name, error)
            self._wait = min(2 * self._wait, _MAX_WAIT) or _FIRST_WAIT
            self._next_attempt = time.monotonic() + self._wait
            return otherwise
        if self._wait:
            _log.warning("%s answers again", self._name)
        self._wait = 0.0
        return answer


def check_partitions(broker: Broker, names: Sequence[str], partitions: Sequence[str]) -> None:
    """Raise ValueError if a broker lacks a partition.

    Args:
        broker: the broker.
        names: partitions of a position.
        partitions: partitions that the broker has.
    """
    if missing := sorted(set(names) - set(partitions)):
        raise ValueError(
            f"the position has the partitions {missing}, and {broker.name} has only {sorted(partitions)}. "
            "Take the address with which the run started."
        )


def id_order(record: RecordId) -> tuple[int, ...]:
    """Return the numbers of an ID, by which the IDs of a partition are ordered."""
    return tuple(map(int, record.split("-"))) if isinstance(record, str) else (record,)


def removed_records(broker: Broker, partition: str, last: RecordId, reason: str) -> DataError:
    """Create the error for records that a broker has deleted before they were read.

    Args:
        broker: the broker.
        partition: partition name.
        last: ID of the last record that was read.
        reason: message from the broker.
    """
    return DataError(
        f"{broker.name}: records of {partition!r} after {last} are gone: {reason}. Let the broker keep "
        "records until a checkpoint has their positions. To go on without them, start from the weights of "
        "the run, without its position."
    )


def split_address(address: str) -> tuple[SplitResult, str]:
    """Split the address of a broker, and return the parts with a name for messages.

    The name has no user, password and options, which are secrets.

    Raises:
        ValueError: the address has no host, or a port that is not a number.
    """
    parts = urlsplit(address)
    name = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return parts, name


def sizes(payloads: Sequence[Payload]) -> Iterator[int]:
    """Yield the size of every payload in bytes."""
    for payload in payloads:
        yield len(payload) if isinstance(payload, bytes) else sum(map(len, payload.values()))
