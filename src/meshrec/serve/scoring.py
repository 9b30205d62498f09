"""Requests for scores, from their first header to the answer.

Most requests are of this kind, and under overload the server must refuse many of them per second. So this
file answers them on plain ASGI, without the router and the request objects of the other routes.
"""

import asyncio
import json
import math
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from starlette.types import Receive, Scope, Send

from meshrec.serve.connections import Connections
from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, Served
from meshrec.serve.open_inference import HEADER_LENGTH, SCORES, answer
from meshrec.serve.reading import Body, BodyReader, size_of
from meshrec.serve.recommending import ItemsWanted, recommended_by
from meshrec.serve.requests import Floats, RequestError
from meshrec.serve.writing import JSON_ANSWER, with_numbers

TIMEOUT = "X-Timeout-Ms"
"""The header that says how long the client waits, in ms from when the server sees the request."""
_OUTCOMES = {
    401: "unauthorized",
    404: "unknown",
    413: "too_large",
    503: "overloaded",
    504: "expired",
}
_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_SAMPLES = re.compile(r"/(?P<kind>predict|embed|recommend)(?:/(?P<model>[^/]+))?")
_OUTPUTS_OF = {"predict": SCORES, "embed": "vectors", "recommend": "vectors"}
_ASK_FOR = {SCORES: "predict", "vectors": "embed"}
Headers = Mapping[bytes, bytes]


class ScoresWanted(NamedTuple):
    """The model, version and outputs that a path names.

    ``model`` is None if the path names none, for a server of one model. ``outputs`` is None for the Open
    Inference Protocol, whose answers contain whatever the model gives.
    """

    model: str | None
    version: str | None
    outputs: str | None
    recommends: bool = False
    """Whether the answer shall have items instead of vectors."""
    items: ItemsWanted = ItemsWanted()
    """The options of these items."""


class Answer(NamedTuple):
    """An answer to a client."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def asked_by(path: str) -> ScoresWanted | None:
    """Parse the path of a request; return None if it does not ask for scores."""
    if found := _INFER.fullmatch(path):
        return ScoresWanted(found["model"], found["version"], None)
    if found := _SAMPLES.fullmatch(path):
        kind = found["kind"]
        return ScoresWanted(found["model"], None, _OUTPUTS_OF[kind], kind == "recommend")
    return None


class Scoring:
    """The answers to requests for scores.

    A request that cannot be answered in time is refused after its headers, and its body is not parsed.

    Args:
        repository: the models.
        metrics: counts requests by outcome.
        max_body: largest body, in bytes.
        reader: parses bodies.
        connections: counts the bytes of waiting requests.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics,
        max_body: int,
        reader: BodyReader,
        connections: Connections,
    ) -> None:
        self._repository, self._metrics, self._max_body = repository, metrics, max_body
        self._reader, self._connections = reader, connections

    async def __call__(self, asked: ScoresWanted, scope: Scope, receive: Receive, send: Send) -> None:
        """Score a request whose path asks for scores, and send the answer."""
        if scope["method"] != "POST":
            error = RequestError("scores are asked for by POST: see / for what there is.", 405)
            error.headers["Allow"] = "POST"
            await respond(refusal(error), send)
            return
        began, name, outcome = time.monotonic(), "", "error"
        try:
            name = self._served(asked).name
            if asked.recommends:
                asked = asked._replace(items=recommended_by(scope.get("query_string", b"")))
            told = await self._answer(asked, began, dict(scope["headers"]), receive)
            outcome = "ok"
        except RequestError as error:
            outcome = _OUTCOMES.get(error.status, "bad_request")
            told = refusal(error)
        except Exception:
            await respond(refusal(RequestError("the server failed; its log says how.", 500)), send)
            raise  # to the log
        finally:
            self._metrics.finished(name, outcome, time.monotonic() - began)
        await respond(told, send)

    def _served(self, asked: ScoresWanted) -> Served:
        if asked.model is None:
            return self._repository.only()
        return self._repository.get(asked.model, asked.version)

    async def _answer(self, asked: ScoresWanted, began: float, headers: Headers, receive: Receive) -> Answer:
        deadline = _deadline(headers, began)
        self._check(self._served(asked), asked, deadline)
        body = await _body(headers, receive, self._max_body)
        # The model may have another version by now: no version is kept while a client sends its body.
        served = self._served(asked)
        self._check(served, asked, deadline)
        with served.batcher:
            infer = await self._reader(
                Body(asked.outputs is None, _text(headers, HEADER_LENGTH), body), served.signature
            )
            num_bytes = max(0, size_of(infer.request) - len(body))  # values that are shared may be repeated
            del body
            if (refused := self._connections.reserve(num_bytes)) is not None:
                raise RequestError(refused, 503, {"Retry-After": "1"})
            try:
                scored = await served.batcher(infer.request, min(deadline, began + infer.timeout))
            finally:
                self._connections.release(num_bytes)
        scores = _finite(scored.scores)
        if asked.outputs is None:
            return Answer(
                200, *await answer(infer, served.name, scored.version, served.signature.outputs, scores)
            )
        said = {"model": served.name, "version": scored.version}
        if asked.recommends:
            best = await asyncio.to_thread(served.recommend, scores, infer.request, asked.items)
            return Answer(200, json.dumps({**said, **best._asdict()}).encode(), dict(JSON_ANSWER))
        return Answer(200, await with_numbers(said, asked.outputs, scores), dict(JSON_ANSWER))

    def _check(self, served: Served, asked: ScoresWanted, deadline: float) -> None:
        """Check, before the body is read, that the request can be answered."""
        if asked.outputs not in (None, served.signature.outputs):
            raise RequestError(
                f"model {served.name!r} gives {served.signature.outputs}, not {asked.outputs}. "
                f"Ask /{_ASK_FOR[served.signature.outputs]}/{served.name}."
            )
        if asked.recommends and not served.recommends:
            raise RequestError(
                f"model {served.name!r} has no list of items. Export a run of next items from a log."
            )
        served.batcher.check(deadline)


def refusal(error: RequestError) -> Answer:
    """Return the answer that tells a client the error of its request."""
    body = json.dumps({"error": str(error)}).encode()
    return Answer(error.status, body, {"Content-Type": "application/json", **error.headers})


async def respond(answer: Answer, send: Send) -> None:
    """Send an answer, by the ASGI protocol."""
    fields = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    fields.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    await send({"type": "http.response.body", "body": answer.body})


async def _body(headers: Headers, receive: Receive, limit: int) -> bytes:
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding != b"identity":
        shown = encoding[:20].decode("latin-1")
        raise RequestError(f"bodies are read as they are, not as {shown!r}. Send it plain.", 415)
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client left before its request was whole. Send all of it.")
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RequestError:
    # The unread body is still on the connection, so no further request can be read from it.
    return RequestError(
        f"the body is larger than {limit} bytes. Send fewer samples at once.", 413, {"Connection": "close"}
    )


def _text(headers: Headers, name: str) -> str | None:
    value = headers.get(name.lower().encode())
    return None if value is None else value.decode("latin-1")


def _deadline(headers: Headers, began: float) -> float:
    """Return the deadline from the request's headers, as a time of ``time.monotonic``."""
    text = _text(headers, TIMEOUT)
    if text is None:
        return math.inf
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not milliseconds > 0:
        raise RequestError(f"the header {TIMEOUT} must be milliseconds above 0, got {text[:40]!r}.")
    return began + milliseconds / 1e3


def _finite(scores: Floats) -> Floats:
    finite = np.isfinite(scores)
    if not finite.all():
        sample = int(finite.reshape(len(scores), -1).all(1).argmin())
        raise RequestError(f"the score of sample {sample} is not finite. Look for huge dense values.", 422)
    return scores
