"""Clients of a server: connections that speak HTTP with as little work as possible, in a closed or open
loop.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """Answers by status (0: the connection broke), the seconds that each took, and the first failures."""

    statuses: Counter[int] = field(default_factory=Counter)
    seconds: dict[int, list[float]] = field(default_factory=dict)
    bodies: list[bytes] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def add(self, status: int, seconds: float, body: bytes) -> None:
        self.statuses[status] += 1
        self.seconds.setdefault(status, []).append(seconds)
        if status != 200 and len(self.failures) < 5:
            self.failures.append(f"{status} after {seconds:.3f} s: {body[:300]!r}")


def http(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


class Connection:
    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = await reader.readuntil(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
        body = await reader.readexactly(int(fields[b"content-length"]))
        if fields.get(b"connection") == b"close":
            self.close()
        return int(head.split(b" ", 2)[1]), body

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def closed(
    port: int,
    request: bytes,
    *,
    clients: int,
    seconds: float,
    keep_bodies: bool = False,
    on_body: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Run closed-loop clients: each sends its next request as soon as it has an answer."""
    outcome, end = Outcome(), time.perf_counter() + seconds

    async def client() -> None:
        connection = Connection(port)
        while (start := time.perf_counter()) < end:
            try:
                status, body = await connection.ask(request)
            except (OSError, asyncio.IncompleteReadError) as error:
                status, body = 0, repr(error).encode()
            outcome.add(status, time.perf_counter() - start, body)
            if keep_bodies:
                outcome.bodies.append(body)
            if on_body is not None and status == 200:
                on_body(body)
        connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return outcome


async def open_loop(
    port: int,
    request: bytes,
    *,
    rate: float,
    seconds: float,
    connections: int | None = None,
    on_body: Callable[[bytes], None] | None = None,
) -> Outcome:
    """Send requests at given times, however long answers take. Latencies count from these times.

    With a limit of connections, as clients of a pool have, a request also waits for a free one.
    """
    outcome, free, tasks = Outcome(), [], set()
    allowed = contextlib.nullcontext() if connections is None else asyncio.Semaphore(connections)
    start = time.perf_counter()

    async def one(due: float) -> None:
        async with allowed:
            connection = free.pop() if free else Connection(port)
            try:
                status, body = await connection.ask(request)
                free.append(connection)
            except (OSError, asyncio.IncompleteReadError) as error:
                status, body = 0, repr(error).encode()
        outcome.add(status, time.perf_counter() - due, body)
        if on_body is not None and status == 200:
            on_body(body)

    for number in range(int(rate * seconds)):
        due = start + number / rate
        if (wait := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait)
        tasks.add(task := asyncio.create_task(one(due)))
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in free:
        connection.close()
    return outcome
