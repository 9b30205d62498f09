"""A server in processes of its own, and a client that keeps asking it while something happens to it."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tests.forked import ForkedProgram
from tests.hostile.sockets import descendants

ROOT = Path(__file__).parents[3]
PATIENCE = 120.0
"""Seconds after which a server does not come back; a machine may be busy."""


class Program:
    """A server in processes of its own.

    Args:
        process: the process that was started.
        log: the file that it logs to.
    """

    def __init__(self, process: subprocess.Popen | ForkedProgram, log: Path) -> None:
        self.process, self.log, self.port = process, log, 0

    def told(self) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-3000:]

    def wait_until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for a condition. Raises AssertionError after a long time, or if the server has ended."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert self.process.poll() is None, (
                f"the server ended with {self.process.returncode}: {self.told()}"
            )
            assert time.monotonic() < deadline, f"{what} did not come: {self.told()}"
            time.sleep(0.02)

    def ask(self, method: str, path: str, body: object = None) -> tuple[int, bytes]:
        """Ask on a connection of its own; give status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE)
        try:
            content = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
            connection.request(method, path, content)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def is_ready(self) -> bool:
        """Whether health says so."""
        with contextlib.suppress(OSError, http.client.HTTPException):
            return self.ask("GET", "/v2/health/ready")[0] == 200
        return False

    def memory(self) -> int:
        """Bytes in memory of the process and its descendants, without files."""
        total = 0
        for pid in descendants(self.process.pid):
            with contextlib.suppress(OSError):
                found = re.search(r"RssAnon:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
                total += int(found[1]) << 10 if found else 0
        return total


@contextlib.contextmanager
def serving(folder: Path, *arguments: object, before: tuple[str, ...] = ()) -> Iterator[Program]:
    """Run ``meshrec serve`` until the end of the context; ``before`` is a command that runs it."""
    log, words = folder / "log", ["serve", *map(str, arguments), "--port", "0"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT}/src"}
    process: subprocess.Popen | ForkedProgram
    with log.open("w") as file:
        if before:
            process = subprocess.Popen(
                [*before, sys.executable, "-W", "ignore", "-m", "meshrec", *words],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
            )
        else:
            process = ForkedProgram(
                "meshrec.cli.__main__:main", words, cwd=ROOT, environment=environment, stderr=file
            )
    program = Program(process, log)
    try:
        program.wait_until(lambda: port_of(program) != 0 and program.is_ready(), "readiness")
        yield program
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            for pid in descendants(process.pid) if process.poll() is None else ():
                os.kill(pid, 9)
            process.wait()


def port_of(program: Program) -> int:
    """Return the port on which a server listens; 0: none yet."""
    if not program.port and (found := re.search(r" at http://127\.0\.0\.1:(\d+)", program.log.read_text())):
        program.port = int(found[1])
    return program.port


class Seen(NamedTuple):
    """An answer to a good request: its status (0: none), and its body or the error."""

    status: int
    body: bytes


class Steady:
    """A client that asks for scores again and again, from a thread.

    Args:
        program: the server.
        body: the request.
        expected: the right scores, one array for each version that may answer.
    """

    def __init__(self, program: Program, body: bytes, expected: list[np.ndarray]) -> None:
        self._program, self._body, self._expected = program, body, expected
        self._seen: list[Seen] = []
        self._ends = False
        self._asks = threading.Lock()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Steady":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends = True
        self._thread.join()

    def once(self) -> Seen:
        """Ask once, on a connection of its own."""
        try:
            return Seen(*self._program.ask("POST", "/predict/clicks", self._body))
        except (OSError, http.client.HTTPException) as error:
            return Seen(0, repr(error).encode())

    def is_right(self, body: bytes) -> bool:
        """Whether a body has the scores of one of the versions."""
        scores = np.array(json.loads(body)["scores"], np.float32)
        return any(
            scores.shape == each.shape and np.allclose(scores, each, rtol=1e-5) for each in self._expected
        )

    def take(self) -> list[Seen]:
        """What was seen since the last call."""
        found, self._seen = self._seen, []
        return found

    def recover(self) -> None:
        """Wait until health says ready and ten requests in a row are answered rightly."""
        in_a_row = 0

        def enough() -> bool:
            nonlocal in_a_row
            seen = self.once()
            is_good = seen.status == 200 and self.is_right(seen.body) and self._program.is_ready()
            in_a_row = in_a_row + 1 if is_good else 0
            return in_a_row == 10

        self._program.wait_until(enough, "ten right answers in a row")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Ask nothing within the context, which begins once the present answer is there."""
        with self._asks:
            yield

    def _run(self) -> None:
        while not self._ends:
            with self._asks:
                self._seen.append(self.once())
            time.sleep(0.01)
