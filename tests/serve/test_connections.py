"""Clients that misbehave, beside one that does not."""

import contextlib
import json
import random
import socket
import time
from dataclasses import dataclass

import numpy as np
import pytest

from meshrec.serve import ConnectionLimits, connections
from meshrec.serve.connections import Connections, client_key
from tests.serve.conftest import Client, running, samples, scores_of

GIVEN = samples(3)
BODY = json.dumps(GIVEN).encode()
HEAD = b"POST /predict HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"


@pytest.fixture(scope="module")
def strict(packages):
    limits = ConnectionLimits(
        max_per_client=8, max_header=4096, header_seconds=0.4, body_seconds=0.6, idle_seconds=0.5
    )
    with running({"clicks": packages[0]}, connections=limits) as server:
        yield server


@contextlib.contextmanager
def connected(server):
    port = int(server.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        yield connection


def rest(connection):
    """All that the server says until it closes."""
    parts = []
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(1 << 16):
            parts.append(part)
    return b"".join(parts)


def check(server, predictors):
    client = Client(server.url)
    status, _, said = client("POST", "/predict", GIVEN)
    assert status == 200, said
    np.testing.assert_allclose(said["scores"], scores_of(predictors[0], GIVEN), rtol=1e-5)
    assert client("GET", "/v2/health/ready")[0] == 200
    client.close()


@pytest.mark.parametrize(
    "begun", [b"", b"POST /predict HTTP/1.1\r\nHost", HEAD % 99 + b"[", HEAD % len(BODY) + BODY]
)
def test_many_unfinished_or_idle_connections_harm_nobody(strict, predictors, begun):
    with contextlib.ExitStack() as stack:
        for _ in range(40):
            stack.enter_context(connected(strict)).sendall(begun)
            check(strict, predictors)


@pytest.mark.parametrize(
    ("begun", "status"),
    [
        (b"", b""),
        (b"POST /predict HTTP/1.1\r\nHost", b"HTTP/1.1 408"),
        (HEAD % 99 + b"[", b"HTTP/1.1 408"),
    ],
)
def test_what_does_not_arrive_in_time_is_closed(strict, begun, status):
    with connected(strict) as connection:
        connection.sendall(begun)
        assert rest(connection).startswith(status)


def test_an_idle_connection_is_closed(strict):
    with connected(strict) as connection:
        connection.sendall(HEAD % len(BODY) + BODY)
        assert rest(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "header",
    [b"a: " + b"v" * 5000, b"a: v\r\n" * 300, b"".join(b"a%d: %s\r\n" % (n, b"v" * 99) for n in range(99))],
)
def test_headers_are_limited(strict, header):
    with connected(strict) as connection:
        connection.sendall(b"GET /v2 HTTP/1.1\r\n" + header + b"\r\n\r\n")
        assert rest(connection).startswith(b"HTTP/1.1 431")


def test_a_header_that_never_ends_is_refused(strict):
    with connected(strict) as connection:
        with contextlib.suppress(OSError):
            for _ in range(2000):
                connection.sendall(b"GET /v2 HTTP/1.1\r\na: " if not _ else b"v" * 1000)
        assert b"431" in rest(connection)


def test_what_is_no_http_is_refused_with_words(strict):
    with connected(strict) as connection:
        connection.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        said = rest(connection)
    assert said.startswith(b"HTTP/1.1 400")
    assert b"is not HTTP/1.1" in said


LENGTH = b"Content-Length: %d\r\n" % len(BODY)
CHUNKS = b"\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "head",
    [
        b"POST /predict HTTP/1.0\r\n" + LENGTH,
        b"POST /predict HTTP/1.1\r\nHost:\r\n" + LENGTH,
        b"POST /predict HTTP/1.1\r\nhOST: [::1]:80 \t\r\nCONTENT-LENGTH:%d \r\n" % len(BODY),
        b"POST http://other:80/predict HTTP/1.1\r\nHost: x\r\n" + LENGTH,
        b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: Chunked \r\n",
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Encoding: Identity\r\n" + LENGTH,
    ],
)
def test_requests_of_every_allowed_form_are_answered(strict, head):
    with connected(strict) as connection:
        connection.sendall(head + (CHUNKS if b"Chunked" in head else b"\r\n" + BODY))
        assert rest(connection).startswith((b"HTTP/1.1 200", b"HTTP/1.0 200"))


@pytest.mark.parametrize(
    ("head", "status", "named"),
    [
        (b"POST /predict HTTP/1.1\r\n" + LENGTH, 400, "host"),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nHOST: x\r\n" + LENGTH, 400, "host"),
        (b"POST /predict HTTP/1.0\r\nHost: x\r\nHost: y\r\n" + LENGTH, 400, "host"),
        (b"POST /predict HTTP/1.1\r\nHost: a/b\r\n" + LENGTH, 400, "'a/b'"),
        (b"POST /predict HTTP/1.1\r\nHost: a b\r\n" + LENGTH, 400, "'a b'"),
        (b"POST /predict HTTP/2.0\r\nHost: x\r\n" + LENGTH, 505, "HTTP/2.0"),
        (b"POST ftp://x/predict HTTP/1.1\r\nHost: x\r\n" + LENGTH, 400, "'ftp://x/predict'"),
        (b"POST /predict#x HTTP/1.1\r\nHost: x\r\n" + LENGTH, 400, "'/predict#x'"),
        (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n", 400, "'*'"),
        (b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n", 400, "'x:80'"),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\n" + 2 * LENGTH, 400, "Content-Length"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + 2 * b"Authorization: Bearer a\r\n", 400, "authorization"),
        (b"GET /v2 HTTP/1.1\r\nHost: x\r\n" + 2 * b"X-Timeout-Ms: 5\r\n", 400, "x-timeout-ms"),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n", 501, "gzip, chunked"),
        (b"POST /predict HTTP/1.0\r\nTransfer-Encoding: chunked\r\n", 400, "transfer-encoding"),
        (b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n" + LENGTH, 400, "Transfer"),
    ],
)
def test_requests_that_break_http_are_refused_and_the_connection_is_closed(strict, head, status, named):
    with connected(strict) as connection:
        connection.sendall(head + (CHUNKS if b"chunked" in head else b"\r\n" + BODY))
        reply = rest(connection)
    assert reply.startswith(b"HTTP/1.1 %d" % status)
    assert reply.count(b"content-length") == 1  # the body is not taken for a second request
    assert named in json.loads(reply.split(b"\r\n\r\n")[1])["error"]


def test_the_host_of_an_absolute_target_replaces_the_header(strict):
    """A page that has its own name resolve to this machine may not change the server by another header."""
    for target, status in ((b"http://evil.test/", 403), (b"HTTP://127.0.0.1:80/", 200)):
        with connected(strict) as connection:
            connection.sendall(
                b"POST %sv2/repository/models/clicks/load HTTP/1.1\r\nHost: localhost\r\n"
                b"Content-Length: 0\r\nConnection: close\r\n\r\n" % target
            )
            assert rest(connection).startswith(b"HTTP/1.1 %d" % status)


def test_half_closed_clients_get_their_answers(strict):
    with connected(strict) as connection:
        connection.sendall(2 * (HEAD % len(BODY) + BODY))
        connection.shutdown(socket.SHUT_WR)
        assert rest(connection).count(b"HTTP/1.1 200") == 2


def test_bytes_of_unfinished_bodies_are_limited(packages, predictors):
    limits = ConnectionLimits(max_unanswered=1 << 20)
    with running({"clicks": packages[0]}, connections=limits) as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(connected(server)).sendall(HEAD % (1 << 20) + b" " * 500_000)
            time.sleep(0.05)
            check(server, predictors)


@dataclass
class Drawn:
    """A connection in a drawn state."""

    opened: float
    state: str
    since: float

    def wait_state(self):
        return self.state, self.since


def test_the_slowest_connection_is_found():
    draw = random.Random(31)
    order = {connections.IDLE: 1, connections.ANSWERS: 2}
    states = [connections.HEADER, connections.BODY, connections.UNREAD, connections.ANSWER, *order]
    for _ in range(500):
        drawn = []
        for opened in range(draw.randrange(8)):
            since = opened + draw.choice([0, draw.randrange(9)])
            drawn.append(Drawn(opened, draw.choice(states[draw.randrange(6) :]), since))
        able = [each for each in drawn if each.state != connections.ANSWER]
        slowest = min(able, key=lambda each: (order.get(each.state, 0), each.since), default=None)
        assert Connections._slowest(drawn) is slowest


def test_clients_are_addresses_or_networks():
    assert client_key("10.0.0.7") == client_key("::ffff:10.0.0.7") == "10.0.0.7"
    assert client_key("2001:db8:1:2::3") == client_key("2001:db8:1:2:4::5") != client_key("2001:db8:1:3::3")


@pytest.mark.parametrize("name", ["max_connections", "max_per_client", "max_header", "idle_seconds"])
def test_limits_are_checked(name):
    with pytest.raises(ValueError, match=f"{name}"):
        ConnectionLimits(**{name: 0})
