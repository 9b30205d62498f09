"""Scoring requests over HTTP, from first header to answer.

Most requests are of this kind, and under overload many must be refused per second. So they are handled in
plain ASGI, without the router and request objects of other routes.
"""

import asyncio
import json
import math
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import Receive, Scope, Send

from meshrec.serve.open_inference import HEADER_LENGTH
from meshrec.serve.reading import Body, BodyReader
from meshrec.serve.recommending import parse_item_options, parse_query
from meshrec.serve.requests import SCORES, Floats, InferRequest, RequestError, Signature
from meshrec.serve.service import ScoreRequest, ScoreResult, ScoringService

TIMEOUT = "X-Timeout-Ms"
"""Header with the client's timeout, in ms from when the server sees the request."""
# Paths of scoring requests. All other paths belong to the FastAPI application.
_INFER = re.compile(r"/v2/models/(?P<model>[^/]+)(?:/versions/(?P<version>[^/]+))?/infer")
_SAMPLES = re.compile(r"/(?P<kind>predict|embed|recommend)(?:/(?P<model>[^/]+))?")
_OUTPUTS_OF = {"predict": SCORES, "embed": "vectors", "recommend": "vectors"}
_JSON_TYPE = {"Content-Type": "application/json"}
# Values serialized at a time, in about 2 ms.
_VALUES_AT_ONCE = 4096
Headers = Mapping[bytes, bytes]


class Answer(NamedTuple):
    """HTTP response: status, body, and all headers except the content length."""

    status: int
    body: bytes
    headers: Mapping[str, str]


def score_request_of(path: str) -> ScoreRequest | None:
    """Parse the path of a URL, such as ``/predict/NAME``. Return None if it does not ask for scores."""
    if match := _INFER.fullmatch(path):
        return ScoreRequest(match["model"], match["version"], None)
    if match := _SAMPLES.fullmatch(path):
        kind = match["kind"]
        return ScoreRequest(match["model"], None, _OUTPUTS_OF[kind], kind == "recommend")
    return None


class ScoringEndpoint:
    """ASGI handler for scoring requests."""

    def __init__(self, service: ScoringService, max_body: int, reader: BodyReader) -> None:
        self._service, self._max_body, self._reader = service, max_body, reader

    async def __call__(self, requested: ScoreRequest, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a scoring request, from the headers to the answer.

        Args:
            requested: result of `score_request_of` for the path.
            scope: ASGI scope.
            receive: ASGI receive function.
            send: ASGI send function.
        """
        if scope["method"] != "POST":
            error = RequestError("scoring requests need POST: see / for the available paths.", 405)
            error.headers["Allow"] = "POST"
            await send_answer(error_answer(error), send)
            return
        try:
            with self._service.count_outcome(requested) as start_time:
                query = scope.get("query_string", b"")
                if requested.recommends:
                    requested = requested._replace(items=parse_item_options(query))
                else:
                    parse_query(query, ())
                answer = await self._answer(requested, start_time, dict(scope["headers"]), receive)
        except RequestError as error:
            answer = error_answer(error)
        except Exception:
            await send_answer(error_answer(RequestError("internal error; see the server log.", 500)), send)
            raise  # to the log
        await send_answer(answer, send)

    async def _answer(
        self, requested: ScoreRequest, start_time: float, headers: Headers, receive: Receive
    ) -> Answer:
        """Receive the body, score it, and return the answer."""
        # Before the body is read: a request that cannot be answered in time is refused at once.
        deadline = _parse_deadline(headers, start_time)
        self._service.check(requested, deadline)
        bodies = [await receive_body(headers, receive, self._max_body)]
        header_length, num_bytes = _header_text(headers, HEADER_LENGTH), len(bodies[0])

        async def read(signature: Signature) -> InferRequest:
            # `pop` drops the last reference, so the body is freed while the request waits for a batch.
            body = Body(requested.outputs is None, header_length, bodies.pop())
            return await self._reader(body, signature)

        scored = await self._service.score(
            requested, read, num_bytes, start_time=start_time, deadline=deadline
        )
        if requested.outputs is None:
            return await _infer_answer(scored)
        fields = {"model": scored.model, "version": scored.version}
        if scored.best is not None:
            return Answer(200, json.dumps({**fields, **scored.best._asdict()}).encode(), _JSON_TYPE)
        return Answer(200, await _json_with_array(fields, requested.outputs, scored.scores), _JSON_TYPE)


async def _infer_answer(scored: ScoreResult) -> Answer:
    """Return the HTTP response of the Open Inference Protocol, with scores as JSON or a binary tensor."""
    infer, scores = scored.infer, scored.scores
    fields: dict[str, Any] = {"model_name": scored.model, "model_version": scored.version}
    if infer.id is not None:
        fields["id"] = infer.id
    output: dict[str, Any] = {"name": scored.outputs, "datatype": "FP32", "shape": list(scores.shape)}
    if not infer.wants_binary:
        tensor = await _json_with_array(output, "data", scores.reshape(-1))
        return Answer(200, b'%s, "outputs": [%s]}' % (json.dumps(fields)[:-1].encode(), tensor), _JSON_TYPE)
    # The protocol's binary tensors are little-endian.
    data = scores.astype("<f4", copy=False).tobytes()
    output["parameters"] = {"binary_data_size": len(data)}
    head = json.dumps({**fields, "outputs": [output]}).encode()
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(head))}
    return Answer(200, head + data, headers)


async def _json_with_array(fields: Mapping[str, Any], name: str, array: Floats) -> bytes:
    """Serialize a JSON object with an array as the last value.

    The array is serialized in parts, with other clients served in between.
    """
    parts = []
    # Rows of vectors have several values each.
    rows = max(1, _VALUES_AT_ONCE // max(1, array[:1].size))
    for start in range(0, len(array), rows):
        if start:
            await asyncio.sleep(0)
        parts.append(json.dumps(array[start : start + rows].tolist())[1:-1])
    head = json.dumps(fields)[:-1] + (", " if fields else "")
    return f"{head}{json.dumps(name)}: [{', '.join(parts)}]}}".encode()


def error_answer(error: RequestError) -> Answer:
    """Return the HTTP response for an error, with the message as JSON."""
    body = json.dumps({"error": str(error)}).encode()
    return Answer(error.status, body, {**_JSON_TYPE, **error.headers})


async def send_answer(answer: Answer, send: Send) -> None:
    """Send an HTTP response with an ASGI send function."""
    fields = [(name.lower().encode(), value.encode()) for name, value in answer.headers.items()]
    fields.append((b"content-length", b"%d" % len(answer.body)))
    await send({"type": "http.response.start", "status": answer.status, "headers": fields})
    await send({"type": "http.response.body", "body": answer.body})


async def receive_body(headers: Headers, receive: Receive, limit: int) -> bytes:
    """Receive a request body from an ASGI receive function.

    Args:
        headers: request headers with lower-case names.
        receive: ASGI receive function.
        limit: maximum size in bytes.

    Raises:
        RequestError: the body is compressed, too large, or incomplete.
    """
    encoding = headers.get(b"content-encoding", b"identity")
    if encoding.lower() != b"identity":
        shown = encoding[:20].decode("latin-1")
        raise RequestError(
            f"the content-encoding {shown!r} is not supported. Send the body uncompressed.", 415
        )
    # Refuse by the announced length, before any of the body is read. A chunked body has no length, so the
    # loop below counts as well.
    # A number of more than 18 digits is above any limit.
    length = headers.get(b"content-length", b"0")
    if length.isdigit() and (len(length) > 18 or int(length) > limit):
        raise _too_large(limit)
    parts: list[bytes] = []
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise RequestError("the client disconnected before the request was complete. Send all of it.")
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
        parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large(limit: int) -> RequestError:
    """Return the error for a body above the size limit."""
    # The unread body remains on the connection, which is therefore unusable for further requests.
    return RequestError(
        f"the body is larger than {limit} bytes. Send fewer samples at once.", 413, {"Connection": "close"}
    )


def _header_text(headers: Headers, name: str) -> str | None:
    """Return a header as a string; None if the request does not have it."""
    value = headers.get(name.lower().encode())
    return None if value is None else value.decode("latin-1")


def _parse_deadline(headers: Headers, start_time: float) -> float:
    """Return the client's deadline from the header `TIMEOUT`, as a ``time.monotonic`` time; else infinity."""
    text = _header_text(headers, TIMEOUT)
    if text is None:
        return math.inf
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not milliseconds > 0:  # also true for NaN
        raise RequestError(f"the header {TIMEOUT} must be milliseconds above 0, got {text[:40]!r}.")
    return start_time + milliseconds / 1e3
