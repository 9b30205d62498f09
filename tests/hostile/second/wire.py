"""Requests drawn from the grammar of HTTP, sent over raw sockets, and a strict reader of the answers.

Written apart from `tests.hostile.test_requests`, which changes the bytes of valid requests.
"""

import contextlib
import json
import random
import socket
import struct
import time
from typing import NamedTuple

PATHS = ["/predict/clicks", "/predict", "/embed/clicks", "/recommend/clicks", "/v2/models/clicks/infer"]
PATHS += ["/v2", "/v2/health/ready", "/v2/models/clicks", "/metrics", "/openapi.json", "/v2/repository/index"]
PATHS += ["/", "//", "/predict/", "/predict//clicks", "/predict/clicks/..", "/v2/../etc/passwd", "/%00", "/%"]
PATHS += ["/predict/%63licks", "/predict/" + "x" * 3000, "/v2/models/clicks/versions/1/infer", "*", "clicks"]
PATHS += [
    "/predict/clicks?a=%ff&b",
    "/v2/models/cl%C3%A9/infer",
    "/recommend?k=-1",
    "/recommend/clicks?k=1e9",
]


class Sent(NamedTuple):
    """A request: its bytes, and what may be answered.

    Attributes:
        content: the bytes.
        is_good: whether it must be answered with the right scores.
        ends: whether nothing may be answered on the connection after it, as its end is not sure.
        name: what it is.
    """

    content: bytes
    is_good: bool
    ends: bool
    name: str


class Answered(NamedTuple):
    """An answer: its status, its headers by name, and its body."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes


def good(body: bytes, draw: random.Random) -> Sent:
    """A valid request for scores, in one of the many forms that HTTP has for it."""
    target = draw.choice([b"/predict/clicks", b"/predict", b"/predict?", b"http://x/predict/clicks"])
    fields = [draw.choice([b"Host: x", b"host:x", b"HOST:   localhost:1\t"])]
    fields += draw.sample(_HARMLESS, draw.randrange(4))
    if draw.random() < 0.5:
        framing, content = b"Content-Length: %d" % len(body), body
    else:
        framing, content = b"Transfer-Encoding: chunked", _chunked(body, draw)
    fields.insert(draw.randrange(len(fields) + 1), framing)
    return Sent(_message(b"POST", target, fields, content), True, False, "good")


_HARMLESS = [b"Accept: */*", b"User-Agent: a\xc3\xa9", b"X-Empty:", b"Cookie: " + b"c" * 2000, b"Expect: x"]
_HARMLESS += [b"X-Timeout-Ms: 60000", b"Content-Type: text/plain", b"Accept-Encoding: gzip", b'A: b: c;d="e"']


def _chunked(body: bytes, draw: random.Random) -> bytes:
    found, at = b"", 0
    while at < len(body):
        part = body[at : at + draw.choice([1, 7, 100, 5000])]
        size = draw.choice([b"%x", b"%X", b"000%x"]) % len(part)
        found += size + draw.choice([b"", b";a=b", b";x"]) + b"\r\n" + part + b"\r\n"
        at += len(part)
    return found + draw.choice([b"0", b"00"]) + b"\r\n" + draw.choice([b"", b"Trailer: x\r\n"]) + b"\r\n"


def _message(
    method: bytes, target: bytes, fields: list[bytes], body: bytes, version: bytes = b"HTTP/1.1"
) -> bytes:
    return b"\r\n".join([b" ".join([method, target, version]), *fields, b"", body])


def odd(body: bytes, draw: random.Random) -> Sent:
    """A whole request whose path, method, headers or body are odd."""
    method = draw.choice(
        [b"POST", b"POST", b"POST", b"GET", b"PUT", b"DELETE", b"OPTIONS", b"TRACE", b"PATCH"]
    )
    path = draw.choice(PATHS).encode()
    fields = [b"Host: localhost"]
    kind = draw.choice(["body", "body", "header", "path"])
    if kind == "body":
        method, path = (
            b"POST",
            draw.choice([b"/predict/clicks", b"/v2/models/clicks/infer", b"/recommend/clicks"]),
        )
        body = _odd_body(body, draw)
    elif kind == "header":
        name = draw.choice(_HEADERS)
        fields += [name + b": " + draw.choice(_VALUES)] * draw.choice([1, 1, 2, 40])
    fields.append(b"Content-Length: %d" % len(body))
    return Sent(_message(method, path, fields, body), False, False, f"odd {kind}")


_HEADERS = [b"X-Timeout-Ms", b"Inference-Header-Content-Length", b"Content-Encoding", b"Content-Type"]
_HEADERS += [b"Authorization", b"Origin", b"Host", b"Connection", b"Upgrade", b"Expect", b"TE", b"Range"]
_VALUES = [b"", b"0", b"-1", b"1e999", b"nan", b"9" * 5000, b"\xff\xfe", b"gzip, br", b"100-continue", b"h2c"]
_VALUES += [b"close", b"upgrade", b"keep-alive", b"bytes=0-", b"0x10", b"1_000", "\u0661".encode(), b"a,b,,c"]


def _odd_body(body: bytes, draw: random.Random) -> bytes:
    text = body.decode()
    numbers = [
        "1e999",
        "-0",
        "NaN",
        "-Infinity",
        "1" * 5000,
        "0.1e-999",
        "9223372036854775808",
        "true",
        '"1"',
    ]
    at = draw.randrange(len(text))
    digits = [n for n, letter in enumerate(text) if letter.isdigit()]
    change = draw.randrange(7)
    if change == 0 and digits:
        at = draw.choice(digits)
        text = text[:at] + draw.choice(numbers) + text[at + 1 :]
    elif change == 1:
        text = (
            text[:at] + draw.choice(["[", "{", '"\\ud800"', "]", '"', "\\", "\0", "\ud83d", ","]) + text[at:]
        )
    elif change == 2:
        text = "[" * draw.choice([3, 200, 30_000]) + text
    elif change == 3:
        text = text.replace('"user"', draw.choice(['"user":[1],"user"', '"us\\u0065r"', '"User"', '""']), 1)
    elif change == 4:
        text = "[" + ",".join([text.strip("[]")] * draw.choice([2, 50, 800])) + "]"
    elif change == 5:
        return bytes(draw.randrange(256) for _ in range(draw.randrange(300)))
    else:
        return text.encode(draw.choice(["utf-16", "utf-32", "utf-8-sig"]), "replace")
    return text.encode("utf-8", "surrogatepass")


def unsure(body: bytes, draw: random.Random) -> Sent:
    """A request of which two readers may find two ends, or that is none. A second one hides in it."""
    hidden = b"GET /hidden HTTP/1.1\r\nHost: x\r\n\r\n"
    size = b"Content-Length: %d"
    name, fields, content = draw.choice(
        [
            ("two lengths", [size % 5, size % len(body)], body + hidden),
            ("length list", [size % 5 + b", %d" % len(body)], body + hidden),
            ("length and chunks", [size % 4, b"Transfer-Encoding: chunked"], b"0\r\n\r\n" + hidden),
            ("chunks and length", [b"Transfer-Encoding: chunked", size % 4], b"0\r\n\r\n" + hidden),
            ("chunked twice", [b"Transfer-Encoding: chunked, chunked"], b"0\r\n\r\n" + hidden),
            ("unknown coding", [b"Transfer-Encoding: x, identity"], hidden),
            ("coding hidden", [b"Transfer-Encoding : chunked"], b"0\r\n\r\n" + hidden),
            ("coding of a tab", [b"Transfer-Encoding:\x0bchunked"], b"0\r\n\r\n" + hidden),
            ("negative length", [b"Content-Length: -1"], hidden),
            ("signed length", [b"Content-Length: +5"], b"[1,2]" + hidden),
            ("length in hex", [b"Content-Length: 0x5"], b"[1,2]" + hidden),
            ("huge length", [b"Content-Length: " + b"9" * 40], hidden),
            ("length with space", [b"Content-Length: 1 2"], hidden),
            ("chunk of -1", [b"Transfer-Encoding: chunked"], b"-1\r\n\r\n" + hidden),
            ("chunk of no size", [b"Transfer-Encoding: chunked"], b"\r\n" + hidden),
            ("huge chunk", [b"Transfer-Encoding: chunked"], b"f" * 17 + b"\r\n" + hidden),
            ("chunk too long", [b"Transfer-Encoding: chunked"], b"1\r\nab\r\n0\r\n\r\n" + hidden),
            ("chunk by line feed", [b"Transfer-Encoding: chunked"], b"1\na\n0\n\n" + hidden),
            ("folded header", [b"X: a\r\n b: c", size % 0], hidden),
            ("header without colon", [b"nonsense", size % 0], hidden),
            ("header with NUL", [b"X: a\0b", size % 0], hidden),
            ("header with return", [b"X: a\rb", size % 0], hidden),
            ("no name", [b": a", size % 0], hidden),
        ]
    )
    version = draw.choice([b"HTTP/1.1"] * 6 + [b"HTTP/1.0"])
    content = _message(b"POST", b"/predict/clicks", [b"Host: x", *fields], content, version)
    return Sent(content, False, True, name)


def broken_line(_: bytes, draw: random.Random) -> Sent:
    """No request line of HTTP/1.1."""
    line = draw.choice(
        [
            *(
                b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
                b"get / HTTP/1.1\r\n\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
            ),
            *(
                b"G\xffT / HTTP/1.1\r\n\r\n",
                b"GET /\x01 HTTP/1.1\r\n\r\n",
                b"\0" * 99,
            ),
            *(
                b"GET / HTTP/1.1 x\r\n\r\n",
                b"GET / XTTP/1.1\r\n\r\n",
                b"\x16\x03\x01\x02\x00\x01\x00",
                b"A" * 20_000,
            ),
            *(
                b"GET /" + b"a" * 90_000 + b" HTTP/1.1\r\n\r\n",
                b"SSH-2.0-x\r\n",
                b"{}\r\n\r\n",
                b"POST\r\n\r\n",
            ),
        ]
    )
    return Sent(line, False, True, "broken line")


def conversation(body: bytes, draw: random.Random) -> list[Sent]:
    """Requests that are sent on one connection, one after another without a look at the answers."""
    makers = draw.choices([good, odd, unsure, broken_line], [3, 6, 4, 1], k=draw.choice([1, 1, 2, 3, 8]))
    return [make(body, draw) for make in makers]


def talk(port: int, sent: list[Sent], draw: random.Random) -> tuple[list[Answered], bool]:
    """Send the requests in one piece or slowly in many; read all answers until the server closes.

    Returns:
        The answers, and whether the whole talk was seen. It was not if this client broke it off.
    """
    content = b"".join(each.content for each in sent)
    leaves = draw.random()
    found = b""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        with contextlib.suppress(OSError):  # the server may close first, as it should
            pieces = draw.choice([1, 1, 1, 2, 5, 30])
            step = max(1, len(content) // pieces)
            if leaves < 0.1:
                content = content[: draw.randrange(len(content))]
            for at in range(0, len(content), step):
                connection.sendall(content[at : at + step])
                if pieces > 1:
                    time.sleep(draw.choice([0, 0.001, 0.01]))
            if leaves < 0.05:  # gone with a reset, in the midst of it
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return [], False
            connection.shutdown(socket.SHUT_WR)
        try:
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionError:
            return answers(found, is_whole=False), False
    return answers(found), leaves >= 0.1


def answers(content: bytes, *, is_whole: bool = True) -> list[Answered]:
    """Read what a server sent as HTTP/1.1, strictly.

    Raises:
        AssertionError: it is anything else.
    """
    found = []
    while content:
        head, end, rest = content.partition(b"\r\n\r\n")
        if not end and not is_whole:
            break
        assert end, f"an answer ends within its head: {content[:200]!r}"
        line, *lines = head.split(b"\r\n")
        assert line.count(b" ") >= 2, line
        version, status, _ = line.split(b" ", 2)
        assert version == b"HTTP/1.1", line
        assert len(status) == 3, line
        assert all(b": " in each for each in lines), lines
        headers = {name.lower(): value for name, _, value in (each.partition(b": ") for each in lines)}
        content = rest
        if status == b"100":
            continue
        length = int(headers[b"content-length"])
        if len(rest) < length and not is_whole:
            break
        assert len(rest) >= length, "an answer ends within its body"
        found.append(Answered(int(status), headers, rest[:length]))
        content = rest[length:]
    return found


def check(sent: list[Sent], got: list[Answered], is_right, *, is_seen: bool) -> None:
    """Check the answers to a talk.

    Args:
        sent: the requests.
        got: the answers.
        is_right: tells whether a body has the right scores.
        is_seen: whether the client read all of it.

    Raises:
        AssertionError: a good request before the first bad one was not answered rightly, a bad one was
            answered without words, or there is an answer to what nobody asked.
    """
    assert len(got) <= len(sent), [each.status for each in got]
    for each in got:
        assert 200 <= each.status < 500 or each.status in (501, 503, 504), each
        assert each.status < 400 or len(json.loads(each.body)["error"]) > 10, each
        assert b"hidden" not in each.body, "a hidden request was answered"
    for request, answer in zip(sent, got, strict=False):
        if request.is_good and (is_seen or answer.status == 200):
            assert answer.status == 200, answer
            assert is_right(answer.body), answer
        if request.ends:
            break
    if not is_seen:
        return
    last = next((at for at, each in enumerate(sent) if each.ends), len(sent) - 1)
    assert len(got) <= last + 1, f"{sent[last].name} was read in two ways: {[each.status for each in got]}"
    leading = next((at for at, each in enumerate(sent) if not each.is_good), len(sent))
    assert len(got) >= min(leading, len(sent)), "a good request has no answer"
