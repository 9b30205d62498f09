"""The routes of a server, and what stands before all of them: the token, limits, outcomes."""

import functools
import hmac
import math
import time
from collections.abc import Awaitable, Callable
from importlib.metadata import version as version_of
from typing import Any, Protocol

import numpy as np
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, Served
from meshrec.serve.open_api import page, schema
from meshrec.serve.open_inference import HEADER_LENGTH, answer, metadata, read_infer
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
_EXTENSIONS = ["binary_tensor_data", "model_repository"]
Scoring = Callable[[HttpRequest, Served, float], Awaitable[Response]]


class Everywhere(Protocol):
    """Does something with a model in every worker of a server."""

    async def __call__(self, action: str, model: str, delta: int | None = None) -> None:
        """``load``, with the deltas up to ``delta`` or all, or ``unload``.

        Raises:
            RequestError: what one of them says that went wrong.
        """


class Routes:
    """What a server answers.

    Args:
        repository: its models.
        metrics: its figures.
        everywhere: loads and unloads.
        max_body: most bytes of a request.
    """

    def __init__(
        self, repository: Repository, metrics: Metrics, everywhere: Everywhere, max_body: int
    ) -> None:
        self._repository, self._metrics = repository, metrics
        self._everywhere, self._max_body = everywhere, max_body

    def app(self) -> Starlette:
        """The application without what `Guard` adds."""
        get, post = ["GET"], ["POST"]
        model = "/v2/models/{model}"
        infer = [
            # The first that fits is taken: those that are asked most stand first.
            Route(prefix + "/infer", self._infer, methods=post)
            for prefix in (model, model + "/versions/{version}")
        ]
        routes = [
            *infer,
            Route("/predict", self._predict, methods=post),
            Route("/predict/{model}", self._predict, methods=post),
            Route("/embed", self._embed, methods=post),
            Route("/embed/{model}", self._embed, methods=post),
            Route("/v2", self._server, methods=get),
            Route("/v2/health/live", self._live, methods=get),
            Route("/v2/health/ready", self._ready, methods=get),
            Route("/v2/repository/index", self._index, methods=post),
            Route("/v2/repository/models/{model}/load", self._load, methods=post),
            Route("/v2/repository/models/{model}/unload", self._unload, methods=post),
            Route("/v2/repository/models/{model}/rollback/{delta:int}", self._rollback, methods=post),
            Route("/metrics", self._figures, methods=get),
            Route("/openapi.json", self._schema, methods=get),
            Route("/", self._page, methods=get),
        ]
        for prefix in (model, model + "/versions/{version}"):
            routes += [
                Route(prefix, self._metadata, methods=get),
                Route(prefix + "/ready", self._model_ready, methods=get),
                Route(prefix + "/freshness", self._freshness, methods=get),
            ]
        handlers: dict[Any, Any] = {
            RequestError: _refused,
            HTTPException: _unknown,
            Exception: _failed,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _server(self, _: HttpRequest) -> Response:
        return JSONResponse({"name": "meshrec", "version": version_of("meshrec"), "extensions": _EXTENSIONS})

    async def _live(self, _: HttpRequest) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: HttpRequest) -> Response:
        ready = self._repository.is_ready
        return JSONResponse({"ready": ready}, 200 if ready else 503)

    async def _metadata(self, http: HttpRequest) -> Response:
        served = self._served(http)
        return JSONResponse(metadata(served.name, served.version, served.signature))

    async def _model_ready(self, http: HttpRequest) -> Response:
        served = self._served(http)
        return JSONResponse({"name": served.name, "ready": True})

    async def _index(self, _: HttpRequest) -> Response:
        return JSONResponse(self._repository.index())

    async def _load(self, http: HttpRequest) -> Response:
        await self._everywhere("load", http.path_params["model"])
        return JSONResponse({})

    async def _unload(self, http: HttpRequest) -> Response:
        await self._everywhere("unload", http.path_params["model"])
        return JSONResponse({})

    async def _rollback(self, http: HttpRequest) -> Response:
        await self._everywhere("load", http.path_params["model"], http.path_params["delta"])
        return JSONResponse({})

    async def _freshness(self, http: HttpRequest) -> Response:
        return JSONResponse(self._served(http).freshness._asdict())

    async def _figures(self, _: HttpRequest) -> Response:
        text, media_type = self._metrics.page()
        return Response(text, media_type=media_type)

    async def _schema(self, _: HttpRequest) -> Response:
        return JSONResponse(schema(self._repository))

    async def _page(self, _: HttpRequest) -> Response:
        return HTMLResponse(page(schema(self._repository)))

    async def _infer(self, http: HttpRequest) -> Response:
        return await self._scored(http, self._answer_infer)

    async def _predict(self, http: HttpRequest) -> Response:
        return await self._scored(http, functools.partial(self._answer_samples, "scores"))

    async def _embed(self, http: HttpRequest) -> Response:
        return await self._scored(http, functools.partial(self._answer_samples, "vectors"))

    def _served(self, http: HttpRequest) -> Served:
        name = http.path_params.get("model")
        if name is None:
            return self._repository.only()
        return self._repository.get(name, http.path_params.get("version"))

    async def _scored(self, http: HttpRequest, score: Scoring) -> Response:
        """Counts what becomes of a request for scores."""
        began, name, outcome = time.monotonic(), "", "error"
        try:
            served = self._served(http)
            name = served.name
            with served.batcher:
                response = await score(http, served, began)
            outcome = "ok"
        except RequestError as error:
            outcome = _OUTCOMES.get(error.status, "bad_request")
            raise
        finally:
            self._metrics.finished(name, outcome, time.monotonic() - began)
        return response

    async def _answer_infer(self, http: HttpRequest, served: Served, began: float) -> Response:
        deadline = _deadline(http, began)
        served.batcher.check(deadline)
        body = await _body(http, self._max_body)
        infer = read_infer(body, http.headers.get(HEADER_LENGTH), served.signature)
        scored = await served.batcher(infer.request, min(deadline, began + infer.timeout))
        content, headers = answer(
            infer, served.name, scored.version, served.signature.outputs, _numbers(scored.scores)
        )
        return Response(content, headers=headers)

    async def _answer_samples(
        self, outputs: str, http: HttpRequest, served: Served, began: float
    ) -> Response:
        if outputs != served.signature.outputs:
            ask = {"scores": "/predict", "vectors": "/embed"}[served.signature.outputs]
            raise RequestError(
                f"model {served.name!r} gives {served.signature.outputs}, not {outputs}. "
                f"Ask {ask}/{served.name}."
            )
        deadline = _deadline(http, began)
        served.batcher.check(deadline)
        request = read_samples(await _body(http, self._max_body), served.signature)
        scored = await served.batcher(request, deadline)
        scores = _numbers(scored.scores).tolist()
        return JSONResponse({"model": served.name, "version": scored.version, outputs: scores})


class Guard:
    """Asks for the token, and while the server stops has clients close their connections.

    Args:
        app: behind it.
        token: that clients must show; None asks for none. Health is told without.
    """

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Of ASGI."""
        if scope["type"] != "http":
            return
        reply = self._closing(send) if self.is_stopping else send
        if self._expected is not None and not scope["path"].startswith("/v2/health/"):
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._expected):
                said = {"error": "the bearer token is missing or wrong. Send the header Authorization."}
                refusal = JSONResponse(said, 401, {"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, reply)
                return
        await self._app(scope, receive, reply)

    @staticmethod
    def _closing(send: Send) -> Send:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        return closing


async def _body(http: HttpRequest, limit: int) -> bytes:
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise RequestError(f"bodies are read as they are, not as {encoding[:20]!r}. Send it plain.", 415)
    length = http.headers.get("content-length", "0")
    # Behind a body that was not read there is no next request.
    too_large = RequestError(
        f"the body is larger than {limit} bytes. Send fewer samples at once.", 413, {"Connection": "close"}
    )
    if length.isdecimal() and int(length) > limit:
        raise too_large
    parts, size = [], 0
    try:
        async for part in http.stream():
            size += len(part)
            if size > limit:
                raise too_large
            parts.append(part)
    except ClientDisconnect as error:
        raise RequestError("the client left before its request was whole. Send all of it.") from error
    return b"".join(parts)


def _deadline(http: HttpRequest, began: float) -> float:
    """Of the header, in the time of ``time.monotonic``."""
    text = http.headers.get(TIMEOUT)
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


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _unknown(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{error.detail}: see / for what there is."
    return JSONResponse({"error": said}, error.status_code, error.headers)


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says how."}, 500)
