"""HTTP handlers for everything except scoring, and the token check for all requests."""

import hmac
import ipaddress
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version as version_of
from typing import Any, Protocol
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from meshrec.data.faults import shown
from meshrec.serve.metrics import Metrics
from meshrec.serve.models import Repository, ServedModel
from meshrec.serve.open_api import page, schema
from meshrec.serve.open_inference import metadata
from meshrec.serve.requests import RequestError
from meshrec.serve.samples import read_json
from meshrec.serve.scoring import ScoringEndpoint, error_answer, receive_body, score_request_of, send_answer

# Protocol extensions which ``GET /v2`` reports.
_EXTENSIONS = ["binary_tensor_data", "model_repository"]
# Maximum body size of model repository requests.
_MAX_BYTES = 1 << 20


class ChangeAllWorkers(Protocol):
    """Type of a function which loads or unloads a model in every worker process."""

    async def __call__(self, action: str, model: str, delta: int | None = None) -> None:
        """Load or unload a model.

        Args:
            action: ``load`` or ``unload``.
            model: model name.
            delta: number of the last delta (published weight update) to apply when loading; None: all.

        Raises:
            RequestError: a worker failed. The error is the first one received.
        """


class Routes:
    """HTTP handlers for all requests except scoring: health, models, metrics and API pages.

    Args:
        refusal: function which returns why the server refuses scoring requests now, or None if it accepts
            them.
        hosts: allowed ``Host`` names for requests which load or unload models. None: such requests are not
            checked for their origin, because clients must send a token.
    """

    def __init__(
        self,
        repository: Repository,
        metrics: Metrics,
        change_all: ChangeAllWorkers,
        refusal: Callable[[], str | None],
        *,
        admin: bool = True,
        hosts: Collection[str] | None = (),
    ) -> None:
        self._repository, self._metrics = repository, metrics
        self._change_all, self._refusal = change_all, refusal
        self._admin, self._hosts = admin, hosts

    def app(self) -> Starlette:
        """Return a Starlette application with these routes."""
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
            Route("/metrics", self._metrics_page, methods=get),
            Route("/openapi.json", self._schema, methods=get),
            Route("/", self._page, methods=get),
        ]
        # A client may name the version it expects; any other version is an error.
        for prefix in (model, model + "/versions/{version}"):
            routes += [
                Route(prefix, self._metadata, methods=get),
                Route(prefix + "/ready", self._model_ready, methods=get),
                Route(prefix + "/freshness", self._freshness, methods=get),
            ]
        # Starlette would answer errors as plain text; these handlers answer with JSON.
        handlers: dict[Any, Any] = {
            RequestError: _answer_refusal,
            HTTPException: _answer_unknown_path,
            Exception: _answer_exception,
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    async def _server(self, _: HttpRequest) -> Response:
        return JSONResponse({"name": "meshrec", "version": version_of("meshrec"), "extensions": _EXTENSIONS})

    async def _live(self, _: HttpRequest) -> Response:
        return JSONResponse({"live": True})

    async def _ready(self, _: HttpRequest) -> Response:
        """Return status 200 if scoring requests are accepted now, otherwise 503 with the reason."""
        # Problems alone do not make the server unready: an older version may still answer.
        refusal, problems = self._refusal(), self._repository.problems
        status: dict[str, Any] = {"ready": refusal is None}
        if refusal is not None:
            status["reason"] = refusal
        if problems:
            status["reasons"] = problems
        if refusal is None:
            return JSONResponse(status)
        return JSONResponse(status, 503, {"Retry-After": "1"})

    async def _metadata(self, http: HttpRequest) -> Response:
        """Return the inputs and outputs of a model, as in the Open Inference Protocol."""
        served = self._served(http)
        return JSONResponse(metadata(served.name, served.version, served.signature))

    async def _model_ready(self, http: HttpRequest) -> Response:
        served = self._served(http)
        return JSONResponse({"name": served.name, "ready": True})

    async def _index(self, http: HttpRequest) -> Response:
        """Return name, version and state of all models, or only of the ready models."""
        given = await _fields_of(http, ("ready",))
        only_ready = given.get("ready", False)
        if type(only_ready) is not bool:
            raise RequestError(f"ready must be true or false, got {shown(only_ready)}.")
        index = self._repository.index()
        return JSONResponse([entry for entry in index if entry["state"] == "READY"] if only_ready else index)

    async def _load(self, http: HttpRequest) -> Response:
        """Load a model in all workers."""
        self._check_admin(http)
        await _check_parameters(http)
        await self._change_all("load", http.path_params["model"])
        return JSONResponse({})

    async def _unload(self, http: HttpRequest) -> Response:
        """Unload a model in all workers."""
        self._check_admin(http)
        await _check_parameters(http, "unload_dependents")  # models have no dependents
        await self._change_all("unload", http.path_params["model"])
        return JSONResponse({})

    async def _rollback(self, http: HttpRequest) -> Response:
        """Load a model in all workers with the deltas up to the number in the path."""
        self._check_admin(http)
        text = http.path_params["delta"]
        # Decimal ASCII digits only: int() would accept other scripts, signs and underscores. 18 digits fit
        # int64.
        if not text.isascii() or not text.isdecimal() or len(text) > 18:
            raise RequestError(f"the delta must be a number such as 15, got {text[:40]!r}.")
        await _check_parameters(http)
        await self._change_all("load", http.path_params["model"], int(text))
        return JSONResponse({})

    def _check_admin(self, http: HttpRequest) -> None:
        """Raise RequestError (403) if the request may not load or unload models."""
        if not self._admin:
            raise RequestError(
                "this server was started with --no-admin. To change models, start it without that option.",
                403,
            )
        if self._hosts is not None:
            _check_origin(dict(http.scope["headers"]), self._hosts)

    async def _freshness(self, http: HttpRequest) -> Response:
        """Return the `Freshness` of a model as JSON: number and step of the last delta, and the problem."""
        return JSONResponse(self._served(http).freshness._asdict())

    async def _metrics_page(self, _: HttpRequest) -> Response:
        text, media_type = self._metrics.page()
        return Response(text, media_type=media_type)

    async def _schema(self, _: HttpRequest) -> Response:
        return JSONResponse(schema(self._repository))

    async def _page(self, _: HttpRequest) -> Response:
        return HTMLResponse(page(schema(self._repository)))

    def _served(self, http: HttpRequest) -> ServedModel:
        """Return the model and version named in the path."""
        return self._repository.get(http.path_params["model"], http.path_params.get("version"))


class Guard:
    """ASGI application for all requests: checks the token, then calls the handler for the path.

    While the server stops, answers tell clients to close their connections.

    Args:
        token: bearer token that clients must send, except for health checks; None: no token is needed.

    Attributes:
        is_stopping: set by the server when shutdown starts; never reset.
    """

    def __init__(self, scoring: ScoringEndpoint, app: ASGIApp, token: str | None) -> None:
        self._scoring, self._app = scoring, app
        self._token = None if token is None else token.strip().encode()
        self.is_stopping = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer an ASGI request."""
        if scope["type"] != "http":
            return  # the server disables WebSockets and lifespan events
        # Otherwise clients would send further requests on connections that are about to end.
        reply = self._with_connection_close(send) if self.is_stopping else send
        # Load balancers probe health without credentials.
        if self._token is not None and not scope["path"].startswith("/v2/health/"):
            scheme, _, shown = dict(scope["headers"]).get(b"authorization", b"").partition(b" ")
            # Constant time, so that response times do not reveal the token.
            if scheme.lower() != b"bearer" or not hmac.compare_digest(shown.strip(), self._token):
                error = RequestError(
                    "the bearer token is missing or wrong. Send the header Authorization.",
                    401,
                    {"WWW-Authenticate": "Bearer"},
                )
                await send_answer(error_answer(error), reply)
                return
        if (requested := score_request_of(scope["path"])) is not None:
            await self._scoring(requested, scope, receive, reply)
        else:
            await self._app(scope, receive, reply)

    @staticmethod
    def _with_connection_close(send: Send) -> Send:
        """Wrap ``send`` so that responses have the header ``Connection: close``."""

        async def closing(message: Message) -> None:
            """Send an ASGI message; add the header if the message starts a response."""
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"connection", b"close")]
            await send(message)

        return closing


async def _fields_of(http: HttpRequest, allowed: Sequence[str]) -> dict[str, Any]:
    """Receive a JSON body, and return its fields without those that are null. An empty body has no fields."""
    # Not http.json(), which does not limit the size.
    body = await receive_body(dict(http.scope["headers"]), http.receive, _MAX_BYTES)
    given = read_json(body) if body.strip() else {}
    if not isinstance(given, dict):
        raise RequestError(f"the body must be a JSON object, got {shown(given)}.")
    return _checked_names(given, allowed, "field")


async def _check_parameters(http: HttpRequest, *allowed: str) -> None:
    """Raise RequestError if the JSON body has a parameter outside ``allowed``.

    Otherwise the server would ignore the parameter, and the client would not notice.
    """
    parameters = (await _fields_of(http, ("parameters",))).get("parameters", {})
    if not isinstance(parameters, dict):
        raise RequestError(f"parameters must be a JSON object, got {shown(parameters)}.")
    _checked_names(parameters, allowed, "parameter")


def _checked_names(given: Mapping[str, Any], allowed: Sequence[str], kind: str) -> dict[str, Any]:
    """Return the non-null values of a JSON object; raise RequestError for a name outside ``allowed``."""
    values = {name: value for name, value in given.items() if value is not None}
    if unknown := sorted(values.keys() - set(allowed)):
        raise RequestError(
            f"unknown {kind} {shown(unknown[0])}; allowed: {list(allowed)}. Remove it: a "
            "model has no options besides the package folder."
        )
    return values


async def _answer_refusal(_: HttpRequest, error: Exception) -> Response:
    """Return the response to a request which raised a `RequestError`, with the status and headers in it."""
    assert isinstance(error, RequestError)
    return JSONResponse({"error": str(error)}, error.status, error.headers)


async def _answer_unknown_path(_: HttpRequest, error: Exception) -> Response:
    """Return the response to a path or method without a route."""
    assert isinstance(error, HTTPException)
    message = f"{error.detail}: see / for the available paths."
    return JSONResponse({"error": message}, error.status_code, error.headers)


async def _answer_exception(_: HttpRequest, error: Exception) -> Response:
    """Return status 500 after an unexpected exception, without details, which may be confidential."""
    return JSONResponse({"error": "internal error; see the server log."}, 500)


def _check_origin(headers: Mapping[bytes, bytes], server_names: Collection[str]) -> None:
    """Check that a request does not come from a web page of another server.

    Raises:
        RequestError: the header Host or Origin names another server, or the header Sec-Fetch-Site, which
            browsers send, says that the request comes from another site (status 403).
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not _is_this_server(_host_name("//" + host), server_names):
        raise RequestError(
            f"the header Host is {host[:80]!r}, which is not a name of this server. Use its address, "
            "add the name with --hosts, or start the server with a token.",
            403,
        )
    # Only browsers send these headers. Programs without a browser pass both checks.
    origin = headers.get(b"origin")
    if origin is not None and _authority_of(origin.decode("latin-1").lower()) != host:
        raise RequestError(
            f"the header Origin is {origin[:80].decode('latin-1')!r}: web pages may not change this server. "
            "Start it with a token, and send the token.",
            403,
        )
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise RequestError("web pages of other sites may not change this server.", 403)


def _host_name(url: str) -> str:
    """Return the host of a URL without the port; empty if the URL is malformed."""
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _authority_of(origin: str) -> str | None:
    """Return host and port of an origin; None for opaque origins such as ``null``."""
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_this_server(name: str, server_names: Collection[str]) -> bool:
    """Return whether a host name belongs to this server.

    True for every IP address: an attacker can let a domain name resolve to this server (DNS rebinding), but
    cannot do that with an address.
    """
    if name == "localhost" or name in server_names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
