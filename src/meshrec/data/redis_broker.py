"""Records of Redis streams. A stream is a partition, and the position of a record is its ID."""

import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode

from meshrec.data.brokers import (
    Broker,
    BrokerAwayError,
    Payload,
    RecordId,
    Records,
    id_order,
    removed_records,
    sizes,
    split_address,
)
from meshrec.data.faults import DataError, needs

SCHEMES = ("redis", "rediss", "unix")
_MAX_COUNT = 10_000
"""Maximum number of entries per request and stream, for which the server answers no other client."""
_FIRST_BYTES = 4096
"""Assumed size of an entry before the first has been read."""


class RedisBroker(Broker):
    """Connection to a Redis server, version 6.2 or later.

    Args:
        address: ``redis://HOST:PORT/DB?stream=NAME,NAME``; ``rediss://`` for TLS, or ``unix://PATH?db=0``
            with ``&stream=NAME``. Further options are those of ``redis.Redis.from_url``. User and password
            are in the address, or in the environment variables ``REDIS_USERNAME`` and ``REDIS_PASSWORD``.

    Raises:
        ValueError: the address names no stream.
    """

    start = "0-0"

    def __init__(self, address: str) -> None:
        redis = needs("redis", "streams")
        parts, self.name = split_address(address)
        options = parse_qsl(parts.query)
        names = [name for key, value in options if key == "stream" for name in value.split(",") if name]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"{self.name} must name each stream once, got {names}. Example: "
                "redis://localhost:6379/0?stream=clicks,views"
            )
        self._names = names
        query = urlencode([(key, value) for key, value in options if key != "stream"])
        environment = {
            key: value
            for key in ("username", "password")
            if (value := os.environ.get(f"REDIS_{key.upper()}")) is not None
        }
        # Values in the address take precedence. Without retries: `read` is repeated by its caller.
        self._client: Any = redis.Redis.from_url(
            f"{address.partition('?')[0]}?{query}",
            **{"socket_timeout": 10.0, "socket_connect_timeout": 5.0, "retry": None, **environment},
        )
        # Pairs of ID and fields as the server sends them: dictionaries of fields cost more than all the rest.
        self._client.set_response_callback("XRANGE", lambda answer, **_: answer)
        self._errors: Any = redis.exceptions
        # ID of the last record that was read, by stream.
        self._last: dict[str, str] = {}
        # Mean size of the entries that were read last, by stream.
        self._entry_bytes: dict[str, float] = {}

    def partitions(self) -> Sequence[str]:
        """Return the streams of the address. They need not exist yet."""
        return self._names

    def seek(self, ids: Mapping[str, RecordId]) -> None:
        self._last.update((name, str(last)) for name, last in ids.items())

    def read(self, partitions: Sequence[str], max_bytes: int) -> dict[str, Records]:
        # A transaction, so that no stream is trimmed between the two requests.
        request = self._client.pipeline(transaction=True)
        for name in partitions:
            size = self._entry_bytes.get(name, _FIRST_BYTES)
            count = int(max_bytes / len(partitions) / size)
            request.xrange(name, f"({self._last[name]}", "+", count=min(max(count, 1), _MAX_COUNT))
            request.xrange(name, self._last[name], self._last[name])
        answers = self._answer(request.execute)
        records = {}
        for number, name in enumerate(partitions):
            entries, last = answers[2 * number : 2 * number + 2]
            if not last and self._last[name] != self.start:
                self._check_stream(name, is_read=bool(entries))
            if entries:
                records[name] = _records(entries)
        # Not before all checks: if the server is away, the caller repeats the request for all streams.
        for name, some in records.items():
            self._entry_bytes[name] = sum(sizes(some.payloads)) / len(some.ids) + 1
            self._last[name] = str(some.ids[-1])
        return records

    def _check_stream(self, name: str, *, is_read: bool) -> None:
        """Raise DataError if entries were trimmed before they were read, or lost after they were read.

        The last entry that was read is not in the stream. If an earlier entry is, then only single entries
        have been deleted by the producer (XDEL), as trimming takes the first entries.
        """
        last = self._last[name]
        if not self._answer(lambda: self._client.exists(name)):
            return  # deleted, or not loaded yet, so no entries can be missing
        stream = self._answer(lambda: self._client.xinfo_stream(name))
        first, newest = stream["first-entry"], stream["last-generated-id"].decode()
        if id_order(newest) < id_order(last):
            raise DataError(
                f"{self.name}: {name!r} was read up to {last}, and its last ID is now {newest}. The server "
                "has lost entries, and may give new ones IDs that were read already. Let it have `appendonly "
                "yes` and `appendfsync always`, and resume the run when the stream has later IDs."
            )
        if is_read and (first is None or id_order(first[0].decode()) > id_order(last)):
            first_id = "none" if first is None else first[0].decode()
            raise removed_records(
                self, name, last, f"the stream was trimmed or deleted, and its first ID is now {first_id}"
            )

    def _answer(self, request: Any) -> Any:
        """Make a request, and return the answer."""
        errors = self._errors
        try:
            return request()
        except (errors.AuthenticationError, errors.NoPermissionError, errors.AuthorizationError) as error:
            raise DataError(
                f"{self.name} refuses access: {error}. Check REDIS_USERNAME and REDIS_PASSWORD."
            ) from error
        except (errors.ConnectionError, errors.TimeoutError, errors.MasterDownError, OSError) as error:
            # Also while the server loads its data, or is a replica that lost its master.
            raise BrokerAwayError(str(error)) from error
        except errors.ResponseError as error:
            raise DataError(
                f"{self.name} cannot be read: {error}. Check the names of the streams."
            ) from error

    def close(self) -> None:
        self._client.close()
        self._last = {}


def _records(entries: list[tuple[bytes, list[bytes]]]) -> Records:
    """Convert the entries of a stream to records."""
    ids: list[RecordId] = [entry.decode() for entry, _ in entries]
    times = [1000 * int(entry.partition(b"-")[0]) for entry, _ in entries]
    return Records(ids, times, [_payload(fields) for _, fields in entries])


def _payload(fields: list[bytes]) -> Payload:
    """Return the value of the only field if it is named ``json`` or ``arrow``; otherwise all fields."""
    if len(fields) == 2 and fields[0] in (b"json", b"arrow"):
        return fields[1]
    return dict(zip(fields[::2], fields[1::2], strict=True))
