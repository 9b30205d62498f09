"""Requests for scores, from their first header to the answer.

They are most of what a server does, and at overload it must refuse many a second: so they are answered here,
on plain ASGI, before the router and the request objects that the other routes are made of.
"""

import json
import math
import re
import time
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from starlette.types import Receive, Scope, Send

from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, Served
from meshrec.serve.open_inference import HEADER_LENGTH, SCORES, answer, read_infer
from meshrec.serve.requests import Floats, RequestError
from meshrec.serve.samples import read_samples

TIMEOUT = "X-Timeout-Ms"
"""The header with which a client says how long it waits, counted from when the server saw the request."""
_OUTCOMES = {
    401: "unauthorized",
    404: "unknown",
    413: "too_large",
    503: "overloaded",
    504: "expired",
}
_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_SAMPLES = re.compile(r"/(?P<kind>predict|embed)(?:/(?P<model>[^/]+))?")
_OUTPUTS_OF = {"predict": SCORES, "embed": "vectors"}
_ASK_FOR = {outputs: kind for kind, outputs in _OUTPUTS_OF.items()}
Headers = Mapping[bytes, bytes]


class ScoresWanted(NamedTuple):
    """What the path of a request asks for.

    ``model`` is None where there is one only; ``outputs`` is None for the Open Inference Protocol, whose
    answers hold what the model gives.
    """

    model: str | None
    version: str | None
    outputs: str | None


class Answer(NamedTuple):
    """What a client is told."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def asked_by(path: str) -> ScoresWanted | None:
    """What a path asks for, if that is scores."""
    if found := _INFER.fullmatch(path):
        return ScoresWanted(found["model"], found["version"], None)
    if found := _SAMPLES.fullmatch(path):
        return ScoresWanted(found["model"], None, _OUTPUTS_OF[found["kind"]])
    return None


class Scoring:
    """Answers requests for scores. A request that cannot be answered in time is refused by its headers; its
    body is let pass unread.

    Args:
        repository: the models.
        metrics: counts what becomes of each request.
        max_body: most bytes of a request.
    """

    def __init__(self, repository: Repository, metrics: Metrics, max_body: int) -> None:
        self._repository, self._metrics, self._max_body = repository, metrics, max_body

    async def __call__(self, asked: ScoresWanted, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request whose path asks for scores."""
        if scope["method"] != "POST":
            error = RequestError("scores are asked for by POST: see / for what there is.", 405)
            error.headers["Allow"] = "POST"
            await respond(refusal(error), send)
            return
        began, name, outcome = time.monotonic(), "", "error"
        try:
            served = self._served(asked)
            name = served.name
            with served.batcher:
                headers: Headers = dict(scope["headers"])
                if asked.outputs is None:
                    told = await self._infer(served, began, headers, receive)
                else:
                    told = await self._samples(asked.outputs, served, began, headers, receive)
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

    async def _infer(self, served: Served, began: float, headers: Headers, receive: Receive) -> Answer:
        deadline = _deadline(headers, began)
        served.batcher.check(deadline)
        body = await _body(headers, receive, self._max_body)
        infer = read_infer(body, _text(headers, HEADER_LENGTH), served.signature)
        scored = await served.batcher(infer.request, min(deadline, began + infer.timeout))
        scores = _numbers(scored.scores)
        return Answer(200, *answer(infer, served.name, scored.version, served.signature.outputs, scores))

    async def _samples(
        self, outputs: str, served: Served, began: float, headers: Headers, receive: Receive
    ) -> Answer:
        if outputs != served.signature.outputs:
            raise RequestError(
                f"model {served.name!r} gives {served.signature.outputs}, not {outputs}. "
                f"Ask /{_ASK_FOR[served.signature.outputs]}/{served.name}."
            )
        deadline = _deadline(headers, began)
        served.batcher.check(deadline)
        request = read_samples(await _body(headers, receive, self._max_body), served.signature)
        scored = await served.batcher(request, deadline)
        said = {"model": served.name, "version": scored.version, outputs: _numbers(scored.scores).tolist()}
        return Answer(200, json.dumps(said).encode(), {"Content-Type": "application/json"})


def refusal(error: RequestError) -> Answer:
    """Why a request is not answered."""
    body = json.dumps({"error": str(error)}).encode()
    return Answer(error.status, body, {"Content-Type": "application/json", **error.headers})


async def respond(answer: Answer, send: Send) -> None:
    """Hands an answer to the server."""
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
    if length.isdigit() and int(length) > limit:
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
    # Behind a body that was not read there is no next request.
    return RequestError(
        f"the body is larger than {limit} bytes. Send fewer samples at once.", 413, {"Connection": "close"}
    )


def _text(headers: Headers, name: str) -> str | None:
    value = headers.get(name.lower().encode())
    return None if value is None else value.decode("latin-1")


def _deadline(headers: Headers, began: float) -> float:
    """Of the header, in the time of ``time.monotonic``."""
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


def _numbers(scores: Floats) -> Floats:
    finite = np.isfinite(scores)
    if not finite.all():
        sample = int(finite.reshape(len(scores), -1).all(1).argmin())
        raise RequestError(f"the score of sample {sample} is no number. Look for huge dense values.", 422)
    return scores
