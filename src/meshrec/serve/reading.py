"""The parsing of bodies: small ones at once, large ones in a process of their own.

Python reads JSON in one step that no other thread can interrupt, so all other clients would have to wait for
a body of some megabytes.
"""

import asyncio
import contextlib
import os
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from meshrec.serve.child import Child, receive, send
from meshrec.serve.open_inference import InferRequest, read_infer
from meshrec.serve.requests import Request, RequestError, Signature
from meshrec.serve.samples import read_samples

_AT_ONCE = 32 << 10
"""Most bytes of JSON or texts that the event loop parses itself, in about 2 ms."""
_MOST_SIGNATURES = 16
_NICE = 5


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
    """The parser of bodies. A child process parses the large ones, one at a time."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read")
        self._numbers: weakref.WeakKeyDictionary[Signature, int] = weakref.WeakKeyDictionary()
        self._num_signatures = 0
        self._known: list[int] = []
        self._child = Child(_read_bodies)

    async def __call__(self, reading: Body, signature: Signature) -> InferRequest:
        """Return the request in a body.

        Raises:
            RequestError: the protocol or the model does not allow the body.
        """
        if _work(reading, signature) <= _AT_ONCE:
            return read(reading, signature)
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(self._pool, self._ask, reading, signature)
        if isinstance(found, RequestError):
            raise found
        return found

    def close(self) -> None:
        """Stop the child process."""
        self._pool.shutdown()
        self._child.stop()

    def _ask(self, reading: Body, signature: Signature) -> InferRequest | RequestError:
        try:
            if not self._child.is_running:
                self._known = []
                self._child.start()
            found: InferRequest | RequestError = self._child.ask(self._named(signature), *reading)
        except (EOFError, OSError):  # it ran out of memory, or somebody ended it
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


def read(reading: Body, signature: Signature) -> InferRequest:
    """Return the request in a body, read here and now.

    Raises:
        RequestError: the protocol or the model does not allow the body.
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
    """Return how many bytes Python has to parse; binary tensors of numbers are copied."""
    length = reading.header_length
    if signature.raw is None and length is not None and length.isdecimal() and len(length) < 10:
        return min(int(length), len(reading.body))
    return len(reading.body)


def _read_bodies(parent: socket.socket) -> None:
    """Read the bodies that the parent sends, until it is gone."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signatures: dict[int, Signature] = {}
    while True:
        (number, signature), is_infer, header_length, body = receive(parent)
        if signature is not None:
            signatures[number] = signature
            while len(signatures) > _MOST_SIGNATURES:
                del signatures[next(iter(signatures))]
        try:
            answer: Any = read(Body(is_infer, header_length, bytes(body)), signatures[number])
        except RequestError as error:
            answer = error
        send(parent, answer)
        del answer, body  # and their memory, before the next one comes
