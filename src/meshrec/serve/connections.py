"""Limits on the connections to a server process: how many, how much memory, and for how long.

uvicorn only sees complete requests. Until then, this module limits clients: headers, bodies and idle
connections have deadlines and maximum sizes. If a client opens too many connections, the server closes the
slowest one.
"""

import asyncio
import contextlib
import functools
import ipaddress
import json
import re
import time
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any, NamedTuple

import httptools
from typing_extensions import override
from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from meshrec.serve.options import ConnectionLimits

# Seconds between checks of all connections for expired deadlines, which are at least seconds long.
_SECONDS_BETWEEN_SWEEPS = 0.25
# Seconds for which a refused connection continues reading. Closing it with unread data would make the kernel
# reset the connection, and the client would lose the answer.
_SECONDS_TO_LINGER = 2.0
# Maximum requests which a client may send on a connection ahead of the answers.
_MAX_PIPELINED = 64
# Maximum header fields per request.
_MAX_HEADERS = 256
# Grammar of the Host header: name or address, and port (RFC 9110, 7.2).
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[\w.~!$&'()*+,;=%-]*)(?::\d*)?", re.ASCII)
# Headers allowed once: servers and proxies differ in which of two values they use.
_SINGLE_HEADERS = (
    b"host",
    b"authorization",
    b"content-encoding",
    b"content-type",
    b"inference-header-content-length",
    b"origin",
    b"sec-fetch-site",
    b"transfer-encoding",
    b"x-timeout-ms",
)
# Reason for refusing a complete request, and for dropping the largest incomplete upload.
_MEMORY_REFUSAL = "unanswered requests take too much memory on the server. Try again later."
IDLE, HEADER, BODY, UNREAD, REFUSED = "idle", "header", "body", "unread", "refused"
"""States in which a connection waits for the client: to send a request, headers or a body, to read an answer,
or to close after a refusal. Each has a time limit.
"""
ANSWER, ANSWERS = "answer", "answers"
"""States in which a connection waits for the server: for one answer, or for several pipelined answers."""


class _WaitState(NamedTuple):
    """State in which a connection waits, and the ``time.monotonic`` time when the state started.

    The state is one of the constants of this module, from `IDLE` to `ANSWERS`.
    """

    state: str
    since: float


class Connections:
    """Registry of all open connections to a server process, which enforces the limits."""

    def __init__(self, limits: ConnectionLimits, on_refusal: Callable[[int], None] = lambda _: None) -> None:
        self.limits, self.on_refusal = limits, on_refusal
        # Dictionaries as ordered sets, oldest connection first; from `add` until `remove`.
        self._all: dict[Connection, None] = {}
        self._by_client: dict[str, dict[Connection, None]] = {}  # by `Connection.owner`
        # Bytes of unanswered requests, over all connections and `reserve` calls.
        self._num_reserved = 0
        # Next call of `_on_sweep`; None without connections.
        self._sweep: asyncio.TimerHandle | None = None

    @property
    def refusal(self) -> str | None:
        """Reason for refusing a new request; None if it would be accepted."""
        if self._num_reserved >= self.limits.max_unanswered and self._largest_upload() is None:
            return f"requests of {self._num_reserved} bytes wait for their answers already"
        if len(self._all) >= self.limits.max_connections and self._slowest(self._all) is None:
            return f"{len(self._all)} connections wait for their answers already"
        return None

    def add(self, connection: "Connection") -> str | None:
        """Register a new connection. At a connection limit, first close the slowest one; see `_slowest`.

        If no connection can be closed, the caller must refuse the new one. A refused connection is registered
        as well, because the server continues to read from it for some seconds.

        Returns:
            Reason why the caller must refuse the connection, or None.
        """
        siblings = self._by_client.get(connection.owner, {})
        limits = self.limits
        refusal = None
        if len(siblings) >= limits.max_per_client and not self._close_slowest(siblings):
            refusal = f"{len(siblings)} connections of this client wait for their answers already"
        elif len(self._all) >= limits.max_connections:
            # The client with most connections gives way first.
            crowd = max(self._by_client.values(), key=len)
            if not self._close_slowest(crowd) and not self._close_slowest(self._all):
                refusal = f"{len(self._all)} connections wait for their answers already"
        # Also registered when refused: it still reads, and must be closed in time.
        self._by_client.setdefault(connection.owner, {})[connection] = None
        self._all[connection] = None
        if self._sweep is None:
            self._sweep = connection.loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._on_sweep, connection.loop)
        return refusal

    def remove(self, connection: "Connection") -> None:
        """Unregister a closed connection."""
        # `drop` and `connection_lost` may both remove it.
        if connection not in self._all:
            return
        siblings = self._by_client[connection.owner]
        del self._all[connection], siblings[connection]
        if not siblings:
            del self._by_client[connection.owner]
        if not self._all and self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None

    def hold(self, num_bytes: int) -> None:
        """Count bytes received for a body. Above the memory limit, refuse the largest incomplete bodies."""
        self._num_reserved += num_bytes
        while (
            self._num_reserved > self.limits.max_unanswered
            and (largest := self._largest_upload()) is not None
        ):
            largest.refuse(503, _MEMORY_REFUSAL)

    def release(self, num_bytes: int) -> None:
        """Subtract bytes counted by `hold` or `reserve`."""
        self._num_reserved -= num_bytes

    def reserve(self, num_bytes: int) -> str | None:
        """Count additional bytes of a complete request, unless the memory limit would be exceeded.

        Returns:
            None if the bytes were counted, otherwise the reason for refusing the request.
        """
        if self._num_reserved + num_bytes > self.limits.max_unanswered:
            return _MEMORY_REFUSAL
        self._num_reserved += num_bytes
        return None

    def _largest_upload(self) -> "Connection | None":
        """Return the connection with the most received bytes of an incomplete body, or None."""
        unfinished = (
            connection
            for connection in self._all
            if connection.held
            and connection.wait_state().state == BODY
            and not connection.transport.is_closing()
        )
        return max(unfinished, key=lambda connection: connection.held, default=None)

    def _close_slowest(self, connections: "Iterable[Connection]") -> bool:
        """Close the slowest connection, see `_slowest`. Return False if all wait for a single answer."""
        slowest = self._slowest(connections)
        if slowest is None:
            return False
        # An idle connection has no request to answer.
        if slowest.wait_state().state in (HEADER, BODY):
            slowest.refuse(408, "there are too many connections, and this one was the slowest. Use fewer.")
        slowest.drop()
        return True

    @staticmethod
    def _slowest(connections: "Iterable[Connection]") -> "Connection | None":
        """Return the connection to close first. A connection which waits for a single answer is never closed.

        Connections with an incomplete request, with an unread answer or with a refused request come first,
        then idle connections. Connections which wait for several pipelined answers come last, because their
        clients would have to resend the requests. Among connections of the same rank, the result is the one
        which has waited longest.

        Returns:
            The connection, or None if every connection waits for a single answer.
        """
        slowest: Connection | None = None
        last = {IDLE: 1, ANSWERS: 2}
        lowest = (3, 0.0)
        for connection in connections:
            if lowest[0] == 0 and lowest[1] <= connection.opened:
                break  # later connections are newer, so they cannot have waited longer
            state, since = connection.wait_state()
            if state != ANSWER and (order := (last.get(state, 0), since)) < lowest:
                slowest, lowest = connection, order
        return slowest

    def _on_sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        """Drop connections past their deadline.

        A pass over all connections four times per second is cheaper than a timer per request.
        """
        self._sweep = loop.call_later(_SECONDS_BETWEEN_SWEEPS, self._on_sweep, loop)
        now = time.monotonic()
        for connection in list(self._all):
            state, since = connection.wait_state()
            if state not in (ANSWER, ANSWERS) and now - since > self._timeout(state):
                connection.expire(state)

    def _timeout(self, state: str) -> float:
        """Return the seconds which a connection may stay in a state."""
        limits = self.limits
        if state == IDLE:
            return limits.idle_seconds
        if state == REFUSED:
            return _SECONDS_TO_LINGER
        return limits.header_seconds if state == HEADER else limits.body_seconds


class Connection(HttpToolsProtocol):
    """asyncio protocol for a client connection: uvicorn's HTTP/1.1 protocol with limits.

    Attributes:
        owner: the client: `client_key` of the peer's address. Set when the connection is made.
        held: bytes of bodies that were received and are not answered yet.
        opened: ``time.monotonic`` time of construction.
    """

    def __init__(self, registry: Connections, **given: Any) -> None:
        super().__init__(**given)
        self._registry = registry
        self.owner = ""
        self.held = 0
        # `_began` is the start of the present wait: the connection, a request's first byte, or the end of a
        # request or an answer.
        self.opened = self._began = time.monotonic()
        # HEADER or BODY while it is received, None between requests; a new connection must send a request.
        self._reading: str | None = HEADER
        # Request being answered, from the request start until the response is complete.
        self._active: RequestResponseCycle | None = None
        # Whether no byte of any request has been received yet.
        self._is_silent = True
        # Whether a request started in the chunk which `data_received` is parsing.
        self._started_in_chunk = False
        # Header bytes and header fields of the current request; bytes received since the last body data, such
        # as chunk sizes and extensions, which would otherwise be unlimited.
        self._num_header = self._num_fields = self._num_unstructured = 0
        # ``time.monotonic`` time since which the client has not read the answer; None: it has read
        # everything.
        self._unread_since: float | None = None
        # ``time.monotonic`` time when an error was sent; no data is read from then on.
        self._refused_at: float | None = None
        # Status and reason to refuse with, set inside parser callbacks.
        self._reason: tuple[int, str] | None = None

    def wait_state(self) -> _WaitState:
        """Return the state in which the connection waits, and the start time."""
        if self._refused_at is not None:
            return _WaitState(REFUSED, self._refused_at)
        if self._unread_since is not None:
            return _WaitState(UNREAD, self._unread_since)
        if self._active is not None and not self._active.more_body:
            return _WaitState(ANSWERS if self.pipeline else ANSWER, self._began)
        return _WaitState(self._reading or IDLE, self._began)

    def expire(self, state: str) -> None:
        """Close this connection, because its state has lasted too long.

        If a part of a request has arrived, the client gets status 408 first.
        """
        if state in (HEADER, BODY) and not self._is_silent:
            self.refuse(408, f"the {state} of the request did not arrive in time. Send it without pauses.")
        else:
            self.drop()

    def drop(self) -> None:
        """Close the connection, even if the client does not read the answer."""
        self._registry.remove(self)
        if self._unread_since is not None:
            self.transport.abort()
        else:
            self.transport.close()
            # Closing waits until all data is sent, and the client may never read it.
            self.loop.call_later(_SECONDS_TO_LINGER, self.transport.abort)

    def refuse(self, status: int, reason: str) -> None:
        """Answer the incomplete request with an error, then close the connection."""
        if self._refused_at is not None or self.transport.is_closing():
            return
        self._registry.on_refusal(status)
        self._unset_keepalive_if_required()
        unfinished = self._reading == BODY and not self.cycle.response_complete
        # Drop the request whose body will never be complete: earlier ones are still answered.
        while self.pipeline and unfinished and self.pipeline[0][0] is self.cycle:
            self.pipeline.popleft()
            self.cycle = self.pipeline[0][0] if self.pipeline else self._active  # type: ignore[assignment]
            unfinished = False
        earlier = self._active is not None and not (unfinished and self._active is self.cycle)
        if earlier:  # pipelined answers come first, then the connection ends
            self.cycle.keep_alive = False
            self.flow.pause_reading()
            self._reading = None
            return
        self._refused_at = time.monotonic()
        started = unfinished and self.cycle.response_started
        if unfinished:
            # Wakes the handler, which waits for the body and then sees a disconnected client.
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._release()
        if started or (self._reading == BODY and not unfinished):  # already answered
            self.drop()
            return
        body = json.dumps({"error": reason}).encode()
        head = (
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        # The client may still be sending: without reading, it would not see the answer.
        self.flow.resume_reading()
        # Half-close, so that the client reads the answer before it sees an error; TLS has no half-close.
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()

    @override
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.owner = client_key(self.client[0] if self.client else "")
        if (reason := self._registry.add(self)) is not None:
            self.refuse(503, f"{reason}. Try again later.")

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        self._registry.remove(self)
        self._release()
        super().connection_lost(exc)

    def eof_received(self) -> bool:  # type: ignore[override]
        """Handle a client which closed the sending side, but may still wait for answers.

        Returns:
            True if the connection stays open until the answers are sent.
        """
        # TLS has no half-close: the connection has ended.
        if self._refused_at is not None or self._active is None or self.scheme == "https":
            return False
        if self._reading is not None:  # the last request will never be complete
            self.refuse(
                400, "the client closed the connection before the request was complete. Send all of it."
            )
            return self._refused_at is None
        self.cycle.keep_alive = False
        return True

    @override
    def data_received(self, data: bytes) -> None:
        if self._refused_at is not None:
            return
        self._unset_keepalive_if_required()
        self._num_unstructured += len(data)
        self._started_in_chunk = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            # The request is answered; data after an upgrade has an unsupported protocol.
            self.cycle.keep_alive = False
            self.flow.pause_reading()
        except httptools.HttpParserError as error:
            self.refuse(*(self._reason or (400, f"the request is not HTTP/1.1: {error}. Send it again.")))
            return
        if self._reading == HEADER and not self._is_silent:
            # The header's share of the first chunk is unknown; the chunk size bounds it.
            self._num_header += 0 if self._started_in_chunk else len(data)
            self._check_header()
        elif self._reading == BODY and self._num_unstructured > self._registry.limits.max_header:
            self._reason = 400, "the body has too much chunk overhead. Send larger chunks."
        if self._reason is not None:
            self.refuse(*self._reason)

    @override
    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._reading, self._is_silent, self._started_in_chunk = HEADER, False, True
        self._num_header = self._num_fields = 0
        if self._active is None:
            self._began = time.monotonic()

    @override
    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        self._num_unstructured += len(name) + len(value)
        if self._num_fields > _MAX_HEADERS:
            self._reason = 431, f"the request has more than {_MAX_HEADERS} headers. Send fewer."
            raise ValueError(self._reason[1])  # stops the parser; `data_received` refuses with `_reason`
        # Whitespace around a value is not part of it (RFC 9110, 5.5).
        super().on_header(name, value.strip(b" \t"))

    @override
    def on_headers_complete(self) -> None:
        self._num_header = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        self._check_header()
        if self._refused_at is not None:
            raise ValueError("this connection was refused and accepts no further requests")
        # More requests in the pipeline would take memory while their answers wait for earlier ones.
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._reason = (
                429,
                f"more than {_MAX_PIPELINED} requests wait on this connection. Send fewer at once.",
            )
        self._reason = self._reason or self._check_request()
        if self._reason is not None:
            raise ValueError(self._reason[1])
        super().on_headers_complete()
        self._reading, self._num_unstructured = BODY, 0

    @override
    def on_body(self, body: bytes) -> None:
        self._num_unstructured = 0
        if self._refused_at is not None:
            return
        super().on_body(body)
        # A handler may answer before it has read the whole body.
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

    def _check_request(self) -> tuple[int, str] | None:
        """Check the rules of RFC 9112 that the parser does not check.

        An absolute-form target (a whole URL) is replaced by the path, and the URL's host replaces the Host
        header.

        Returns:
            HTTP status and reason to refuse the request with, or None if it is valid.
        """
        # The parser accepts other versions, too.
        version = self.parser.get_http_version()
        if version not in ("1.0", "1.1"):
            return 505, f"the request uses HTTP/{version}. Send HTTP/1.1."
        headers = dict(self.headers)
        # Only if some header is repeated, which is rare.
        if len(headers) != len(self.headers):
            for single in _SINGLE_HEADERS:
                if (count := sum(name == single for name, _ in self.headers)) > 1:
                    return 400, f"the request has the header {single.decode()} {count} times. Send it once."
        if version == "1.1" and b"host" not in headers:
            return 400, "the request has no header host, which HTTP/1.1 requires. Send it."
        if (coding := headers.get(b"transfer-encoding")) is not None:
            if version == "1.0":
                return 400, "HTTP/1.0 has no header transfer-encoding. Send HTTP/1.1."
            if coding.lower() != b"chunked":
                return 501, f"the transfer-encoding {_format_header(coding)} is not supported. Send chunked."
        if b"#" in self.url or not (self.url.startswith(b"/") or self._resolve_target()):
            return (
                400,
                f"the target {_format_header(self.url)} is neither a path nor an address. Send a path.",
            )
        if _HOST.fullmatch(headers.get(b"host", b"")) is None:
            return 400, f"the header host is {_format_header(headers[b'host'])}. Send a name or an address."
        return None

    def _resolve_target(self) -> bool:
        """Replace a target that is a URL by its path, and the Host header by the URL's host and port."""
        with contextlib.suppress(httptools.HttpParserInvalidURLError):
            url = httptools.parse_url(self.url)
            if (url.schema or b"").lower() in (b"http", b"https") and url.host and url.userinfo is None:
                # RFC 9112, 3.2.2: the host in a target replaces the Host header.
                host = b"[%s]" % url.host if b":" in url.host else url.host
                self.headers[:] = [field for field in self.headers if field[0] != b"host"]
                self.headers.append((b"host", host if url.port is None else b"%s:%d" % (host, url.port)))
                self.url = (url.path or b"/") + (b"" if url.query is None else b"?" + url.query)
                return True
        return False

    def _check_header(self) -> None:
        """Set ``_reason`` if the headers received so far are too large."""
        limit = self._registry.limits.max_header
        if self._num_header > limit:
            self._reason = 431, f"the headers of the request are larger than {limit} bytes. Send fewer."

    def _release(self) -> None:
        """Stop counting the body bytes of this connection, because its requests are answered or refused."""
        self._registry.release(self.held)
        self.held = 0


def _format_header(value: bytes) -> str:
    """Return the start of a header value, quoted, for an error."""
    return repr(value[:80].decode("latin-1"))


# Cached, because a client usually opens several connections.
@functools.lru_cache(1024)
def client_key(address: str) -> str:
    """Return the client to which an address counts: the IPv4 address, or the 64-bit network of an IPv6
    address.

    A client usually has a whole 64-bit network, so limits per IPv6 address would be useless.
    """
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        # A client that reaches a dual-stack socket by IPv4.
        if parsed.ipv4_mapped is not None:
            return str(parsed.ipv4_mapped)
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address
