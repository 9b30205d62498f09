"""The routes of a server other than those for scores, and the check of the token before all routes."""

import hmac
from collections.abc import Callable, Collection
from importlib.metadata import version as version_of
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, Served
from meshrec.serve.open_api import page, schema
from meshrec.serve.open_inference import metadata
from meshrec.serve.origins import check_origin
from meshrec.serve.requests import RequestError
from meshrec.serve.scoring import Scoring, asked_by, refusal, respond

_EXTENSIONS = ["binary_tensor_data", "model_repository"]


class Everywhere(Protocol):
    """A function that changes a model in every worker of a server."""

    async def __call__(self, action: str, model: str, delta: int | None = None) -> None:
        """Load a model, with the deltas up to ``delta`` or with all, or unload it.

        Args:
            action: ``load`` or ``unload``.
            model: the model's name.
            delta: the last delta; None takes all.

        Raises:
            RequestError: a worker failed; the message is the first such worker's.
        """


class Routes:
    """The routes of a server other than those for scores.

    Args:
        repository: the server's models.
        metrics: the server's metrics.
        everywhere: loads and unloads models in every worker.
        refusal: returns why a request for scores would be refused now; None if it would be answered.
        admin: whether requests may load and unload models.
        hosts: names of this server that such requests may use; None if clients have to show a token.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics,
        everywhere: Everywhere,
        refusal: Callable[[], str | None],
        *,
        admin: bool = True,
        hosts: Collection[str] | None = (),
    ) -> None:
        self._repository, self._metrics = repository, metrics
        self._everywhere, self._refusal = everywhere, refusal
        self._admin, self._hosts = admin, hosts

    def app(self) -> Starlette:
        """Return an application with all of these routes."""
        get, post = ["GET"], ["POST"]
        model = "/v2/models/{model}"
        routes = [
            Route("/v2", self._server, methods=get),
            Route("/v2/health/live", self._live, methods=get),
            Route("/v2/health/ready", self._ready, methods=get),
            Route("/v2/repository/index", self._index, methods=post),
            Route("/v2/repository/models/{model}/load", self._load, methods=post),
            Route("/v2/repository/models/{model}/unload", self._unload, methods=post),
            Route("/v2/repository/models/{model}/rollback/{delta}", self._rollback, methods=post),
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
        refusal, problems = self._refusal(), self._repository.problems
        said: dict[str, Any] = {"ready": refusal is None}
        if refusal is not None:
            said["reason"] = refusal
        if problems:
            said["reasons"] = problems
        if refusal is None:
            return JSONResponse(said)
        return JSONResponse(said, 503, {"Retry-After": "1"})

    async def _metadata(self, http: HttpRequest) -> Response:
        served = self._served(http)
        return JSONResponse(metadata(served.name, served.version, served.signature))

    async def _model_ready(self, http: HttpRequest) -> Response:
        served = self._served(http)
        return JSONResponse({"name": served.name, "ready": True})

    async def _index(self, _: HttpRequest) -> Response:
        return JSONResponse(self._repository.index())

    async def _load(self, http: HttpRequest) -> Response:
        self._check_admin(http)
        await self._everywhere("load", http.path_params["model"])
        return JSONResponse({})

    async def _unload(self, http: HttpRequest) -> Response:
        self._check_admin(http)
        await self._everywhere("unload", http.path_params["model"])
        return JSONResponse({})

    async def _rollback(self, http: HttpRequest) -> Response:
        self._check_admin(http)
        text = http.path_params["delta"]
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise RequestError(f"a delta has a number, such as 15, and not {text[:40]!r}.")
        await self._everywhere("load", http.path_params["model"], int(text))
        return JSONResponse({})

    def _check_admin(self, http: HttpRequest) -> None:
        if not self._admin:
            raise RequestError(
                "this server was started with --no-admin. Start it without, to change models.",
                403,
            )
        if self._hosts is not None:
            check_origin(dict(http.scope["headers"]), self._hosts)

    async def _freshness(self, http: HttpRequest) -> Response:
        return JSONResponse(self._served(http).freshness._asdict())

    async def _figures(self, _: HttpRequest) -> Response:
        text, media_type = self._metrics.page()
        return Response(text, media_type=media_type)

    async def _schema(self, _: HttpRequest) -> Response:
        return JSONResponse(schema(self._repository))

    async def _page(self, _: HttpRequest) -> Response:
        return HTMLResponse(page(schema(self._repository)))

    def _served(self, http: HttpRequest) -> Served:
        return self._repository.get(http.path_params["model"], http.path_params.get("version"))


class Guard:
    """The entry of a server: it checks the token, and passes requests on.

    While the server stops, its answers tell clients to close their connections.

    Args:
        scoring: answers the requests for scores.
        app: answers all others.
        token: the token that clients must show, except for health; None if they need none.
    """

    def __init__(self, scoring: Scoring, app: ASGIApp, token: str | None) -> None:
        self._scoring, self._app = scoring, app
        self._expected = None if token is None else f"Bearer {token}".encode()
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, by the ASGI protocol."""
        if scope["type"] != "http":
            return
        reply = self._closing(send) if self.is_stopping else send
        if self._expected is not None and not scope["path"].startswith("/v2/health/"):
            shown = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(shown, self._expected):
                error = RequestError(
                    "the bearer token is missing or wrong. Send the header Authorization.",
                    401,
                    {"WWW-Authenticate": "Bearer"},
                )
                await respond(refusal(error), reply)
                return
        if (asked := asked_by(scope["path"])) is not None:
            await self._scoring(asked, scope, receive, reply)
        else:
            await self._app(scope, receive, reply)

    @staticmethod
    def _closing(send: Send) -> Send:
        async def closing(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        return closing


async def _refused(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _unknown(_: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{error.detail}: see / for what there is."
    return JSONResponse({"error": said}, error.status_code, error.headers)


async def _failed(_: HttpRequest, error: Exception) -> Response:
    return JSONResponse({"error": "the server failed; its log says how."}, 500)
