"""A client that misbehaves: `python -m benchmarks.serve_misbehave PORT WAY`, until it is killed."""

import contextlib
import json
import socket
import sys
import time
from typing import NamedTuple

_ADDRESS = "127.0.0.2"
_HEAD = b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n"
_LARGE = json.dumps({"shared": {"f0": list(range(100)) * 18_000}, "samples": [{"f1": 1}] * 99}).encode()


class Way(NamedTuple):
    """A kind of misbehaviour of a client: what it sends on each connection, and how often it opens one.

    Attributes:
        content: the bytes it sends.
        rate: connections per second.
        keeps: whether it keeps the connection open and says no more; otherwise it half-closes it.
    """

    content: bytes
    rate: float
    keeps: bool = True


WAYS = {
    "silent connections": Way(b"", 100),
    "unfinished headers": Way(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Le", 100),
    "unfinished bodies": Way(_HEAD % (1 << 20) + b"\r\n" + b"[" * 1000, 100),
    "large headers": Way(_HEAD % 9 + b"a: " + b"v" * (1 << 20), 20),
    "no HTTP": Way(bytes(range(128, 256)) * 8 + b"\r\n\r\n", 100),
    "bodies of 9 MB": Way(_HEAD % len(_LARGE) + b"\r\n" + _LARGE, 0.5),
    "half-closed connections": Way(
        b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n[]", 50, False
    ),
    "many requests at once": Way((_HEAD % 2 + b"\r\n[]") * 50, 2),
    "answers that are not read": Way(b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n" * 20, 2),
}
"""The ways to misbehave that hung or slowed a server before it had limits."""


def misbehave(port: int, way: Way) -> None:
    """Misbehave until this process is killed."""
    kept: list[socket.socket] = []
    print("began", flush=True)
    while True:
        with contextlib.suppress(OSError):
            bad = socket.create_connection(("127.0.0.1", port), 10, (_ADDRESS, 0))
            kept.append(bad)
            bad.sendall(way.content)
            if not way.keeps:
                bad.shutdown(socket.SHUT_WR)
                kept.pop().recv(1 << 16)
        while len(kept) > 500:
            kept.pop(0).close()
        time.sleep(1 / way.rate)


if __name__ == "__main__":
    misbehave(int(sys.argv[1]), WAYS[sys.argv[2]])
