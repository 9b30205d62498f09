"""Bodies read as requests: small ones at once, large ones in a process of their own.

Python reads JSON in one step that no other thread can interrupt, so a body of some megabytes would have every
other client wait. The process is forked when the server starts, before it has threads or models.
"""

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import struct
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, NoReturn

import numpy as np

from meshrec.serve.open_inference import InferRequest, read_infer
from meshrec.serve.requests import Request, RequestError, Signature
from meshrec.serve.samples import read_samples

_AT_ONCE = 32 << 10
"""Bytes of JSON or texts that are read in the event loop: about 2 ms."""
_MOST_SIGNATURES = 16
_NICE = 5
_SIZE = struct.Struct("<Q")


class Body(NamedTuple):
    """A body, and how to read it.

    Attributes:
        is_infer: whether it is a request of the Open Inference Protocol; otherwise it is samples in JSON.
        header_length: the header that says how many of its bytes are JSON.
        body: all of it.
    """

    is_infer: bool
    header_length: str | None
    body: bytes


class BodyReader:
    """Reads bodies, the large ones in a child process, one at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._numbers: weakref.WeakKeyDictionary[Signature, int] = weakref.WeakKeyDictionary()
        self._num_signatures = 0
        self._known: list[int] = []
        self._child: socket.socket | None = None
        self._pid = 0
        self._start()

    async def __call__(self, reading: Body, signature: Signature) -> InferRequest:
        """Return the request in a body.

        Raises:
            RequestError: for what the protocol or the model does not take.
        """
        if _work(reading, signature) <= _AT_ONCE:
            return read(reading, signature)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._ask, reading, signature)
        if isinstance(found, RequestError):
            raise found
        return found

    def close(self) -> None:
        """End the child process."""
        self._pool.shutdown()
        self._stop()

    def _ask(self, reading: Body, signature: Signature) -> InferRequest | RequestError:
        if self._child is None:
            self._start()
        assert self._child is not None
        try:
            _send(self._child, self._named(signature), *reading)
            found: InferRequest | RequestError = _receive(self._child)
        except (OSError, EOFError):  # it ran out of memory, or somebody ended it
            self._stop()
            return RequestError(
                "the process that reads large requests ended. Send fewer samples at once, or try again.",
                503,
                {"Retry-After": "1"},
            )
        return found

    def _named(self, signature: Signature) -> tuple[int, Signature | None]:
        """Return a signature's number, and the signature itself where the child does not have it."""
        if (number := self._numbers.get(signature)) is None:
            number = self._numbers[signature] = self._num_signatures
            self._num_signatures += 1
        if number in self._known:
            return number, None
        self._known = [*self._known[1 - _MOST_SIGNATURES :], number]
        return number, signature

    def _start(self) -> None:
        here, there = socket.socketpair()
        with warnings.catch_warnings():
            # Python warns of threads that hold locks. The child takes none of theirs: it only reads JSON.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._pid = os.fork()
        if not self._pid:
            _live(there)
        there.close()
        self._child, self._known = here, []

    def _stop(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._pid, 0)


def read(reading: Body, signature: Signature) -> InferRequest:
    """Return the request in a body, read here and now.

    Raises:
        RequestError: for what the protocol or the model does not take.
    """
    try:
        if reading.is_infer:
            return read_infer(reading.body, reading.header_length, signature)
        request = read_samples(reading.body, signature)
    except RecursionError as error:
        raise RequestError("the body is nested too deep. Send lists of numbers or texts.") from error
    except MemoryError as error:
        raise RequestError("the request needs more memory than there is. Send fewer samples.", 413) from error
    return InferRequest(request, None, float("inf"), wants_scores=True, wants_binary=False)


def size_of(request: Request) -> int:
    """Return the bytes of a request's arrays."""
    ids = sum(array.nbytes for array in [*request.values, *request.lengths])
    return request.dense.nbytes + ids


def _work(reading: Body, signature: Signature) -> int:
    """Return how many bytes Python has to look at one by one; tensors of numbers are copied as they are."""
    length = reading.header_length
    if signature.raw is None and length is not None and length.isdecimal() and len(length) < 10:
        return min(int(length), len(reading.body))
    return len(reading.body)


def _live(parent: socket.socket) -> NoReturn:
    """Read what the parent sends, until it is gone."""
    try:
        # The socket that clients connect to is among those that were inherited, and must end with the server.
        os.closerange(3, parent.fileno())
        os.closerange(parent.fileno() + 1, os.sysconf("SC_OPEN_MAX"))
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with contextlib.suppress(OSError):
            os.nice(_NICE)
        signatures: dict[int, Signature] = {}
        while True:
            (number, signature), is_infer, header_length, body = _receive(parent)
            if signature is not None:
                signatures[number] = signature
                while len(signatures) > _MOST_SIGNATURES:
                    del signatures[next(iter(signatures))]
            try:
                answer: Any = read(Body(is_infer, header_length, bytes(body)), signatures[number])
            except RequestError as error:
                answer = error
            _send(parent, answer)
            del answer, body  # and their memory, before the next one comes
    finally:
        os._exit(0)


def _send(to: socket.socket, *what: Any) -> None:
    """Send objects; their arrays and bytes go as they are in memory, while other threads run."""
    buffers: list[pickle.PickleBuffer] = []
    plain = [pickle.PickleBuffer(each) if isinstance(each, bytes) else each for each in what]
    head = pickle.dumps(plain if len(what) > 1 else what[0], 5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    sizes = [len(head), *(view.nbytes for view in views)]
    to.sendall(_SIZE.pack(len(sizes)) + b"".join(map(_SIZE.pack, sizes)))
    to.sendall(head)
    for view in views:
        to.sendall(view)


def _receive(source: socket.socket) -> Any:
    (num,) = _SIZE.unpack(_exactly(source, _SIZE.size))
    sizes = [size for (size,) in _SIZE.iter_unpack(_exactly(source, num * _SIZE.size))]
    head, *buffers = [_exactly(source, size) for size in sizes]
    return pickle.loads(head, buffers=buffers)


def _exactly(source: socket.socket, size: int) -> memoryview:
    found = np.empty(size, np.uint8).data  # not filled with zeros first
    at = 0
    while at < size:
        num = source.recv_into(found[at:])
        if not num:
            raise EOFError("the other process is gone")
        at += num
    return found
