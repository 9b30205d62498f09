"""The connections of a server process: how many there are, what they hold, and when they are closed.

uvicorn answers whoever has sent a whole request. What a client may hold until then is limited here: headers,
bodies and idle connections have deadlines and sizes. A client that opens ever more connections loses its own
slowest one.
"""

import asyncio
import functools
import ipaddress
import json
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
from typing_extensions import override
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from meshrec.serve.options import ConnectionLimits

_SECONDS_BETWEEN_SWEEPS = 0.25
_SECONDS_TO_LINGER = 2.0
"""Seconds for which a refused connection still reads. If it closed with unread data, the kernel would reset
it, and the client would lose the answer."""
_MOST_PIPELINED = 64
_MOST_HEADERS = 256
_TOO_MUCH = "the server holds too many bytes of unanswered requests. Try again later."
IDLE, HEADER, BODY, UNREAD, REFUSED = "idle", "header", "body", "unread", "refused"
ANSWER, ANSWERS = "answer", "answers"


class _Waits(NamedTuple):
    """The state of a connection: what it waits for, and since when."""

    state: str
    since: float


class Connections:
    """All connections of a server process.

    Args:
        limits: what clients may hold.
        count: a function that is called with the status of each refusal.
    """

    def __init__(self, limits: ConnectionLimits, count: Callable[[int], None] = lambda _: None) -> None:
        self.limits, self.count = limits, count
        # Dictionaries as ordered sets: the connections that were opened first come first.
        self._all: dict[Connection, None] = {}
        self._of: dict[str, dict[Connection, None]] = {}
        self._held = 0
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def refusal(self) -> str | None:
        """The reason why a new request would be refused; None if it would not be."""
        if self._held >= self.limits.max_unanswered and self._largest() is None:
            return f"requests of {self._held} bytes wait for their answers already"
        if len(self._all) >= self.limits.max_connections and self._slowest(self._all) is None:
            return f"{len(self._all)} connections wait for their answers already"
        return None

    def admit(self, connection: "Connection") -> str | None:
        """Admit a new connection. If there are too many, close the slowest one.

        Returns:
            The reason why it is refused, or None.
        """
        own = self._of.get(connection.owner, {})
        limits = self.limits
        refusal = None
        if len(own) >= limits.max_per_client and not self._evict(own):
            refusal = f"{len(own)} connections of this client wait for their answers already"
        elif len(self._all) >= limits.max_connections:
            crowd = max(self._of.values(), key=len)
            if not self._evict(crowd) and not self._evict(self._all):
                refusal = f"{len(self._all)} connections wait for their answers already"
        self._of.setdefault(connection.owner, {})[connection] = None
        self._all[connection] = None
        if self._sweep is None:
            self._sweep = connection.loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._on_sweep, connection.loop)
        return refusal

    def leave(self, connection: "Connection") -> None:
        """Remove a connection that is closed."""
        if connection not in self._all:
            return
        own = self._of[connection.owner]
        del self._all[connection], own[connection]
        if not own:
            del self._of[connection.owner]
        if not self._all and self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def hold(self, num_bytes: int) -> None:
        """Count bytes of an unfinished body. If there are too many in all, refuse the largest bodies."""
        self._held += num_bytes
        while self._held > self.limits.max_unanswered and (largest := self._largest()) is not None:
            largest.refuse(503, _TOO_MUCH)

    def release(self, num_bytes: int) -> None:
        """Subtract bytes that `hold` or `reserve` counted."""
        self._held -= num_bytes

    def reserve(self, num_bytes: int) -> str | None:
        """Count bytes of a complete request; return the reason if there are too many in all."""
        if self._held + num_bytes > self.limits.max_unanswered:
            return _TOO_MUCH
        self._held += num_bytes
        return None

    def _largest(self) -> "Connection | None":
        unfinished = (
            each
            for each in self._all
            if each.held and each.waits().state == BODY and not each.transport.is_closing()
        )
        return max(unfinished, key=lambda each: each.held, default=None)

    def _evict(self, some: "Iterable[Connection]") -> bool:
        slowest = self._slowest(some)
        if slowest is None:
            return False
        if slowest.waits().state in (HEADER, BODY):
            slowest.refuse(408, "there are too many connections, and this one was the slowest. Use fewer.")
        slowest.drop()
        return True

    @staticmethod
    def _slowest(some: "Iterable[Connection]") -> "Connection | None":
        """Return the connection whose request or answer has been unfinished longest.

        If there is none, return the one that has been idle longest. If there is none of these either, take
        one that waits for several answers: its client has to send these requests again.
        """
        found: Connection | None = None
        last = {IDLE: 1, ANSWERS: 2}
        lowest = (3, 0.0)
        for each in some:
            if lowest[0] == 0 and lowest[1] <= each.opened:
                break  # neither this one nor a later one can have been unfinished for longer
            state, since = each.waits()
            if state != ANSWER and (order := (last.get(state, 0), since)) < lowest:
                found, lowest = each, order
        return found

    def _on_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop connections whose deadline has passed.

        One walk over all connections four times a second costs less than a timer for each request.
        """
        self._sweep = loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._on_sweep, loop)
        now = time.monotonic()
        for connection in list(self._all):
            state, since = connection.waits()
            if state not in (ANSWER, ANSWERS) and now - since > self._seconds(state):
                connection.expire(state)

    def _seconds(self, state: str) -> float:
        limits = self.limits
        if state == IDLE:
            return limits.idle_seconds
        if state == REFUSED:
            return _SECONDS_TO_LINGER
        return limits.header_seconds if state == HEADER else limits.body_seconds


class Connection(HttpToolsProtocol):
    """A connection of a client.

    Args:
        registry: all connections of the process.
        given: arguments of uvicorn's protocol.
    """

    def __init__(self, registry: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._registry = registry
        self.owner = ""
        self.held = 0
        """Bytes of bodies that were received and not answered yet."""
        self.opened = self._began = time.monotonic()
        self._reading: str | None = HEADER  # of a new connection a request is expected at once
        self._active: RequestResponseCycle | None = None
        self._is_silent = True
        self._begins_here = False
        self._num_header = self._num_fields = self._num_between = 0
        self._unread_since: float | None = None
        self._refused_at: float | None = None
        self._reason: tuple[int, str] | None = None

    def waits(self) -> _Waits:
        """Return what the connection waits for, and since when."""
        if self._refused_at is not None:
            return _Waits(REFUSED, self._refused_at)
        if self._unread_since is not None:
            return _Waits(UNREAD, self._unread_since)
        if self._active is not None and not self._active.more_body:
            return _Waits(ANSWERS if self.pipeline else ANSWER, self._began)
        return _Waits(self._reading or IDLE, self._began)

    def expire(self, state: str) -> None:
        """Close this connection, since its deadline has passed; answer an unfinished request with 408."""
        if state in (HEADER, BODY) and not self._is_silent:
            self.refuse(408, f"the {state} of the request did not arrive in time. Send it at once.")
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connection, whether or not the client reads what was sent to it."""
        self._registry.leave(self)
        if self._unread_since is not None:
            self.transport.abort()
        else:
            self.transport.close()
            self.loop.call_later(_SECONDS_TO_LINGER, self.transport.abort)

    def refuse(self, status: int, reason: str) -> None:
        """Answer the unfinished request with an error, then close the connection."""
        if self._refused_at is not None or self.transport.is_closing():
            return
        self._registry.count(status)
        self._unset_keepalive_if_required()
        unfinished = self._reading == BODY and not self.cycle.response_complete
        while self.pipeline and unfinished and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._active  # type: ignore[assignment]
            unfinished = False
        earlier = self._active is not None and not (unfinished and self._active is self.cycle)
        if earlier:  # their answers come first, and then the connection ends
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            self._reading = None
            return
        self._refused_at = time.monotonic()
        started = unfinished and self.cycle.response_started
        if unfinished:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._release()
        if started or (self._reading == BODY and not unfinished):  # it has its answer
            self.drop()
            return
        body = json.dumps({"error": reason}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.owner = client_of(self.client[0] if self.client else "")
        if (reason := self._registry.admit(self)) is not None:
            self.refuse(503, f"{reason}. Try again later.")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.leave(self)
        self._release()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keep a connection whose client has sent all, and waits for its answers."""
        if self._refused_at is not None or self._active is None or self.scheme == "https":
            return False
        if self._reading is not None:  # of the last request, which will never be whole
            self.refuse(400, "the client closed the connection before its request was whole. Send all of it.")
            return self._refused_at is None
        self.cycle.keep_alive = False
        return True

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            return
        self._unset_keepalive_if_required()
        self._num_between += len(data)
        self._begins_here = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self.cycle.keep_alive = (
                False  # answered as it is; what follows is of no protocol that is spoken here
            )
            self.flow.pause_reading()
        except httptools.HttpParserError as error:
            self.refuse(*(self._reason or (400, f"the request is not HTTP/1.1: {error}. Send it anew.")))
            return
        if self._reading == HEADER and not self._is_silent:
            # How much of the first part is header is not known; what is read at once limits it.
            self._num_header += 0 if self._begins_here else len(data)
            self._check_header()
        elif self._reading == BODY and self._num_between > self._registry.limits.max_header:
            self._reason = 400, "there is too much between the parts of the body. Send it in larger chunks."
        if self._reason is not None:
            self.refuse(*self._reason)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._is_silent, self._begins_here = HEADER, False, True
        self._num_header = self._num_fields = 0
        if self._active is None:
            self._began = time.monotonic()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._num_between += len(name) + len(value)
        if self._num_fields > _MOST_HEADERS:
            self._reason = 431, f"the request has more than {_MOST_HEADERS} headers. Send fewer."
            raise ValueError(self._reason[1])
        super().on_header(name, value)

    @override
    def on_headers_complete(self) -> None:
        self._num_header = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_header()
        if self._refused_at is not None:
            raise ValueError("this connection was refused, and takes no further request")
        if len(self.pipeline) >= _MOST_PIPELINED:
            self._reason = (
                429,
                f"more than {_MOST_PIPELINED} requests wait on this connection. Send fewer at once.",
            )
        if self._reason is not None:
            raise ValueError(self._reason[1])
        super().on_headers_complete()
        self._reading, self._num_between = BODY, 0

    @override
    def on_body(self, body: bytes) -> None:
        self._num_between = 0
        if self._refused_at is not None:
            return
        super().on_body(body)
        if not self.cycle.response_complete:
            self.held += len(body)
            self._registry.hold(len(body))

    @override
    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._reading = None
        if self._active is None:
            self._began = time.monotonic()

    @override
    def on_response_complete(self) -> None:
        self._active = None
        self._began = time.monotonic()
        if not self.pipeline:
            self._release()
        super().on_response_complete()

    @override
    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread_since = time.monotonic()

    @override
    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread_since = None

    @override
    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    def _check_header(self) -> None:
        limit = self._registry.limits.max_header
        if self._num_header > limit:
            self._reason = 431, f"the headers of the request are larger than {limit} bytes. Send fewer."

    def _release(self) -> None:
        self._registry.release(self.held)
        self.held = 0


@functools.lru_cache(1024)
def client_of(address: str) -> str:
    """Return the client that an address belongs to: itself, or its network of 64 bits for IPv6."""
    try:
        found = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv6Address):
        if found.ipv4_mapped is not None:
            return str(found.ipv4_mapped)
        return str(ipaddress.ip_network((found, 64), strict=False))
    return address
