"""A server of S3 for tests (moto's), behind a proxy that injects faults into reads."""

import http.client
import http.server
import logging
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
import pytest

DROPPED = ("connection", "content-length", "date", "server", "transfer-encoding")


class Store:
    """A bucket, which is written to directly and read through the proxy.

    ``fault(number, method, path)`` says what happens to a request: None, an HTTP status, "cut" for half of
    the content, or "stall" for half of the content and no end. ``requests`` has all of them.
    """

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.bucket = f"bucket-{uuid.uuid4().hex[:8]}"
        self.fault: Callable[[int, str, str], int | str | None] = lambda *_: None
        self.requests: list[tuple[str, str]] = []
        self.stalled, self.ended = threading.Event(), threading.Event()
        self.port = 0
        self.files, _ = pyarrow.fs.FileSystem.from_uri(
            f"s3://{self.bucket}?scheme=http&endpoint_override={server[0]}:{server[1]}&region=us-east-1"
            "&allow_bucket_creation=true"
        )
        self.files.create_dir(self.bucket)

    def put(self, name: str, content: "bytes | pa.Table", **options: int) -> None:
        # Without compression=None, pyarrow compresses what is named .gz.
        with self.files.open_output_stream(f"{self.bucket}/{name}", compression=None) as stream:
            if isinstance(content, bytes):
                stream.write(content)
            else:
                pq.write_table(content, stream, **options)

    def address(self, name: str, bucket: str | None = None, retries: int = 3) -> str:
        options = f"scheme=http&endpoint_override=127.0.0.1:{self.port}&region=us-east-1&retries={retries}"
        return f"s3://{bucket or self.bucket}/{name}?{options}"

    def answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        """Forward a request, and return the answer with a fault, if there is one."""
        number = len(self.requests)
        self.requests.append((request.command, request.path))
        client = http.client.HTTPConnection(*self.server)
        client.request(request.command, request.path, headers=dict(request.headers))
        answer = client.getresponse()
        content = answer.read()
        client.close()
        fault = self.fault(number, request.command, request.path)
        request.close_connection = True
        if isinstance(fault, int):
            request.send_response(fault)
            request.send_header("Content-Length", "0")
            request.end_headers()
            return
        request.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in DROPPED:
                request.send_header(name, value)
        is_head = request.command == "HEAD"
        length = answer.headers.get("Content-Length", "0") if is_head else str(len(content))
        request.send_header("Content-Length", length)
        request.end_headers()
        if not is_head:
            request.wfile.write(content if fault is None else content[: len(content) // 2])
        if fault == "stall":
            self.stalled.set()
            self.ended.wait()


@contextmanager
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """Start server and proxy on free ports; skip the test if moto is not installed."""
    pytest.importorskip("flask", reason="no server of S3 for tests is installed")
    server = pytest.importorskip("moto.server", reason="no server of S3 for tests is installed")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    # pytest shows the lines of a failed test; a line per request hides the others.
    logging.getLogger("werkzeug").setLevel(logging.WARNING)
    moto = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    store = Store(moto.get_host_and_port())

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with suppress(BrokenPipeError, ConnectionResetError):  # the reader was killed
                store.answer(self)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    proxy = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    proxy.daemon_threads = True
    store.port = proxy.server_address[1]
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        store.ended.set()
        proxy.shutdown()
        proxy.server_close()
        moto.stop()
