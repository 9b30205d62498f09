"""Parsing of request bodies: small bodies in the event loop, large bodies in a child process.

Python parses JSON without releasing the GIL, so a body of several megabytes would block all other clients.
"""

import asyncio
import contextlib
import os
import socket
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from meshrec.serve.child import Child, receive, send
from meshrec.serve.open_inference import read_infer
from meshrec.serve.requests import InferRequest, Request, RequestError, Signature
from meshrec.serve.samples import read_samples

# Maximum bytes of JSON or strings parsed in the event loop, in about 2 ms.
_AT_ONCE = 32 << 10
# Signatures which the child remembers; the oldest is dropped first, in both processes.
_MAX_SIGNATURES = 16
# The event loop and the scoring threads have priority over the child.
_NICE = 5


class Body(NamedTuple):
    """Unparsed body of a scoring request.

    Attributes:
        is_infer: whether the body follows the Open Inference Protocol. Otherwise it is JSON with samples (see
            `read_samples`).
        header_length: value of the ``Inference-Header-Content-Length`` header: bytes of JSON before binary
            tensors. None if the request has no such header.
        body: bytes as received.
    """

    is_infer: bool
    header_length: str | None
    body: bytes


class BodyReader:
    """Parser of request bodies. The event loop parses small bodies itself.

    A child process parses large bodies, one at a time, so that the event loop can serve other clients
    meanwhile.
    """

    def __init__(self) -> None:
        # Waits for the child, so that the event loop does not.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="read")
        # Numbers by which parent and child refer to signatures, so that a signature is sent only once. Keys
        # are weak: a signature is dropped together with the model version.
        self._indices: weakref.WeakKeyDictionary[Signature, int] = weakref.WeakKeyDictionary()
        # Never decreases, so a dropped signature's number is not given to another one.
        self._num_signatures = 0
        # Signatures which the child has; mirrors its eviction order. Reset when the child restarts.
        self._sent: list[int] = []
        # Forked here if this process has a single thread, otherwise started with the first large body.
        self._child = Child(_read_bodies)

    async def __call__(self, reading: Body, signature: Signature) -> InferRequest:
        """Parse the request in a body.

        Raises:
            RequestError: the body violates the protocol, or does not match the model.
        """
        if _parse_cost(reading, signature) <= _AT_ONCE:
            return read(reading, signature)
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(self._pool, self._ask, reading, signature)
        # The other process returns an error like a result.
        if isinstance(result, RequestError):
            raise result
        return result

    def close(self) -> None:
        """Stop the child process."""
        self._pool.shutdown()
        self._child.stop()

    def _ask(self, reading: Body, signature: Signature) -> InferRequest | RequestError:
        """Parse a body in the child process, and wait for the result. Starts the child if it does not run."""
        try:
            if not self._child.is_running:
                # A new child has no signatures yet.
                self._sent = []
                self._child.start()
            result: InferRequest | RequestError = self._child.ask(
                self._signature_message(signature), *reading
            )
        except (EOFError, OSError):  # it ran out of memory or was killed
            return RequestError(
                "the process that reads large requests ended. Send fewer samples at once, or try again.",
                503,
                {"Retry-After": "1"},
            )
        return result

    def _signature_message(self, signature: Signature) -> tuple[int, Signature | None]:
        """Return the message which tells the child the signature of a body.

        Returns:
            A number which identifies the signature, and the signature. The signature is None if the child
            already has it.
        """
        if (number := self._indices.get(signature)) is None:
            number = self._indices[signature] = self._num_signatures
            self._num_signatures += 1
        if number in self._sent:
            return number, None
        # The child drops its oldest signature at the same moment.
        self._sent = [*self._sent[1 - _MAX_SIGNATURES :], number]
        return number, signature


def read(reading: Body, signature: Signature) -> InferRequest:
    """Parse the request in a body, in this thread.

    Raises:
        RequestError: the body violates the protocol, or does not match the model.
    """
    try:
        if reading.is_infer:
            return read_infer(reading.body, reading.header_length, signature)
        request = read_samples(reading.body, signature)
    # json.loads recurses for every level of nesting.
    except RecursionError as error:
        raise RequestError("the body is nested too deep. Send lists of numbers or strings.") from error
    except MemoryError as error:
        raise RequestError(
            "the request needs more memory than available. Send fewer samples.", 413
        ) from error
    return InferRequest(request, None, float("inf"), wants_binary=False)


def size_of(request: Request) -> int:
    """Return the size of a request's arrays in bytes."""
    ids = sum(array.nbytes for array in [*request.values, *request.lengths])
    return request.dense.nbytes + ids


def _parse_cost(reading: Body, signature: Signature) -> int:
    """Return the number of bytes that Python must parse.

    Binary tensors with IDs or dense values do not count, because they are only copied.
    """
    length = reading.header_length
    if signature.raw is None and length is not None and length.isdecimal() and len(length) < 10:
        return min(int(length), len(reading.body))
    return len(reading.body)


def _read_bodies(parent: socket.socket) -> None:
    """Main loop of the child process: parse the bodies that the parent sends, until it exits."""
    # A sandbox may forbid it. Large bodies then compete with the scoring threads.
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    signatures: dict[int, Signature] = {}
    while True:
        (number, signature), is_infer, header_length, body = receive(parent)
        if signature is not None:
            signatures[number] = signature
            # The oldest first, in step with the parent's list of sent signatures.
            while len(signatures) > _MAX_SIGNATURES:
                del signatures[next(iter(signatures))]
        try:
            answer: Any = read(Body(is_infer, header_length, bytes(body)), signatures[number])
        except RequestError as error:
            answer = error
        send(parent, answer)
        del answer, body  # free the memory before waiting for the next body
