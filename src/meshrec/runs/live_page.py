"""Serve a web page about a run on a stream, which updates itself while the run trains.

The page is read-only and has no parts from elsewhere. It is for the users of this machine: the server listens
on 127.0.0.1, and only answers requests whose Host header names this machine, so that no web site can
read the page through a name that it resolves to 127.0.0.1.
"""

import contextlib
import json
import logging
import os
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from typing_extensions import override

from meshrec.checkpoint.finding import CHECKPOINTS, read_hold
from meshrec.metrics.named import METRICS, metric_title
from meshrec.reports.page import to_page
from meshrec.train.run_folder import CONFIG, RunFolder
from meshrec.train.run_folder import METRICS as METRICS_FILE

_logger = logging.getLogger("meshrec")

_MAX_RECENT, _MAX_THINNED = 400, 200
"""Lines per kind that the page gets: the newest ones, and at most twice the second number of older ones."""
_MAX_ALARMS = 50
_FIELDS = ("kind", "step", "time", "event_time", "lag", "samples_per_second", "delta", "freshness")
"""Entries of a metrics line that the page shows, in addition to metrics."""
_CURVES = ("kind", "time", "lag", "samples_per_second", "freshness", "loss")
"""Entries of which the page has curves, in addition to metrics over windows."""
_REQUEST_SECONDS = 10.0
_SERVER_SECONDS, _SERVER_TIMEOUT = 5.0, 2.0
"""Time between requests to the scoring server, and how long an answer may take."""


@contextlib.contextmanager
def live_page(folder: RunFolder, port: int, *, server: str | None = None) -> Iterator[str]:
    """Context manager that serves the page, and gives its address.

    Args:
        folder: run folder. Its files are read for every request.
        port: port at 127.0.0.1; 0: any free port.
        server: freshness address of a scoring server, such as
            ``http://localhost:8080/v2/models/model/freshness``; None: the page shows no server.

    Raises:
        ValueError: the port cannot be used.
    """
    try:
        http = _PageServer(("127.0.0.1", port), _LiveRun(folder, server))
    except (OSError, OverflowError) as error:
        raise ValueError(f"--page {port}: {error}. Take another port, or 0 for any free one.") from error
    with http:
        thread = threading.Thread(target=http.serve_forever, args=(0.1,), name="page", daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/"
        finally:
            http.shutdown()
            thread.join()


class _PageServer(ThreadingHTTPServer):
    """HTTP server of one page."""

    def __init__(self, address: tuple[str, int], run: "_LiveRun") -> None:
        self.run = run
        super().__init__(address, _Handler)

    @override
    def handle_error(self, *_: Any) -> None:
        """Ignore a connection that a browser has closed."""


class _Handler(BaseHTTPRequestHandler):
    """Answers of `_PageServer`: the page at ``/``, and its figures as JSON at ``/data``."""

    server: _PageServer
    # A connection without a request must not hold its thread.
    timeout = _REQUEST_SECONDS

    def do_GET(self) -> None:
        if self.headers.get("Host", "").rpartition(":")[0] not in ("127.0.0.1", "localhost"):
            self.send_error(403, "This page is only for 127.0.0.1 and localhost")
            return
        path = self.path.partition("?")[0]
        if path == "/data":
            text = json.dumps(self.server.run.data(), separators=(",", ":"), allow_nan=False)
            self._answer(text, "application/json")
        elif path == "/":
            self._answer(to_page("live.js", self.server.run.data()), "text/html; charset=utf-8")
        else:
            self.send_error(404)

    def _answer(self, text: str, content_type: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        sources = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'"
        self.send_header("Content-Security-Policy", f"{sources}; connect-src 'self'")
        self.end_headers()
        self.wfile.write(content)

    @override
    def log_message(self, *_: Any) -> None:
        """Log nothing: pages ask every few seconds."""


class _LiveRun:
    """Figures of a run that trains. Threads may share it."""

    def __init__(self, folder: RunFolder, server: str | None) -> None:
        self._folder, self._lines, self._lock = (
            folder,
            _MetricLines(folder.path / METRICS_FILE),
            threading.Lock(),
        )
        self._server = None if server is None else _ScoringServer(server)

    def data(self) -> dict[str, Any]:
        """Return the data of the page as plain JSON types."""
        with self._lock:
            self._lines.read()
            config = self._folder.read_json(CONFIG) or {}
            hold = read_hold(self._folder.path)
            return {
                "name": self._folder.path.name,
                # Ages are differences of times of this host.
                "now": time.time(),
                "recipe": config.get("recipe", {}).get("name"),
                "stream": config.get("stream"),
                "ranks": config.get("ranks"),
                "device": config.get("device"),
                "began": config.get("began"),
                "state": self._folder.state()._asdict() if config else {"name": "running", "error": None},
                "titles": {name: metric_title(name) for name in METRICS},
                "lines": self._lines.shown(),
                "last": self._lines.last,
                "alarms": list(self._lines.alarms),
                "hold": None if hold is None else hold.text,
                "checkpoint": self._checkpoint(),
                "served": None if self._server is None else self._server.freshness(),
            }

    def _checkpoint(self) -> dict[str, Any] | None:
        """Return step and time of the newest checkpoint in the run folder; None if there is none."""
        newest = max(self._folder.path.glob(f"{CHECKPOINTS}/step-*/manifest.json"), default=None)
        # An older one may be removed meanwhile.
        with contextlib.suppress(FileNotFoundError):
            if newest is not None:
                step = int(newest.parent.name.partition("-")[2])
                return {"step": step, "time": newest.stat().st_mtime}
        return None


class _MetricLines:
    """Reader of a growing ``metrics.jsonl``, with bounded memory."""

    def __init__(self, path: Path) -> None:
        self._path = path
        # Identity of the file, which is replaced when lines are removed, and number of bytes read.
        self._inode, self._size = 0, 0
        self._clear()

    def _clear(self) -> None:
        """Forget all lines."""
        self.last: dict[str, dict[str, Any]] = {}
        self.alarms: deque[dict[str, Any]] = deque(maxlen=_MAX_ALARMS)
        self._thinned: dict[str, _ThinnedLines] = {}

    def read(self) -> None:
        """Read the lines that were added since the last call."""
        with contextlib.suppress(FileNotFoundError), self._path.open("rb") as file:
            about = os.fstat(file.fileno())
            if about.st_ino != self._inode or about.st_size < self._size:
                self._clear()
                self._inode, self._size = about.st_ino, 0
            file.seek(self._size)
            for line in file:
                if not line.endswith(b"\n"):
                    # The writer has not finished it.
                    break
                self._size += len(line)
                with contextlib.suppress(ValueError):
                    self._add(json.loads(line))

    def _add(self, line: dict[str, Any]) -> None:
        """Add a line."""
        kind = str(line.get("kind"))
        if kind == "alarm":
            self.alarms.append(line)
        self.last[kind] = {
            name: value
            for name, value in line.items()
            if name in _FIELDS or name.partition("@")[0] in (*METRICS, "samples")
        }
        curves = {name: _rounded(value) for name, value in line.items() if _is_curve(name)}
        self._thinned.setdefault(kind, _ThinnedLines()).add(curves)

    def shown(self) -> list[dict[str, Any]]:
        """Return the lines for charts, ascending per kind."""
        return [
            line
            for kind in ("train", "delta")
            if kind in self._thinned
            for line in self._thinned[kind].lines()
        ]


class _ThinnedLines:
    """Newest lines, and evenly spaced older ones."""

    def __init__(self) -> None:
        self._recent: deque[dict[str, Any]] = deque()
        self._older: list[dict[str, Any]] = []
        # Every stride-th line is one of the older lines.
        self._num, self._stride = 0, 1

    def add(self, line: dict[str, Any]) -> None:
        """Add a line after the others."""
        self._recent.append(line)
        if len(self._recent) <= _MAX_RECENT:
            return
        oldest = self._recent.popleft()
        if self._num % self._stride == 0:
            self._older.append(oldest)
        self._num += 1
        if len(self._older) > 2 * _MAX_THINNED:
            self._older, self._stride = self._older[::2], 2 * self._stride

    def lines(self) -> list[dict[str, Any]]:
        """Return all lines, ascending."""
        return [*self._older, *self._recent]


class _ScoringServer:
    """Server that answers requests with the weights of the run."""

    def __init__(self, address: str) -> None:
        self._address = address
        # Last answer, and when to ask again, of time.monotonic.
        self._answer: dict[str, Any] = {}
        self._next = 0.0

    def freshness(self) -> dict[str, Any]:
        """Return the entries of `meshrec.serve.fresh.Freshness`, or an ``error``."""
        if time.monotonic() >= self._next:
            try:
                with urllib.request.urlopen(self._address, timeout=_SERVER_TIMEOUT) as response:
                    answer = json.loads(response.read(1 << 16))
                self._answer = {name: answer[name] for name in ("delta", "step", "reason", "event_time")}
            # An address that is not of a server of MeshRec may answer anything.
            except (OSError, ValueError, KeyError, TypeError) as error:
                self._answer = {"error": str(error) or type(error).__name__}
            self._next = time.monotonic() + _SERVER_SECONDS
        return self._answer


def _is_curve(name: str) -> bool:
    """Return whether the page has a curve of an entry of a metrics line."""
    metric, at, _ = name.partition("@")
    return name in _CURVES or (at != "" and metric in ("auc", "normalized_entropy", "calibration"))


def _rounded(value: Any) -> Any:
    """Round a float to the precision of a screen; the page asks for all lines every few seconds."""
    return float(f"{value:.7g}") if isinstance(value, float) else value
