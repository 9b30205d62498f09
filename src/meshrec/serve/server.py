"""Server process: event loop, signals, and a shutdown in which no request is lost."""

import asyncio
import contextlib
import functools
import math
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn

from meshrec.export import Predictor
from meshrec.ops.memory import frozen_objects
from meshrec.serve.app import Guard, Routes
from meshrec.serve.connections import Connection, Connections
from meshrec.serve.metrics import Metrics
from meshrec.serve.models import ModelChange, OpenOptions, Repository
from meshrec.serve.options import ServerOptions
from meshrec.serve.peers import ParentLink
from meshrec.serve.reading import BodyReader
from meshrec.serve.scoring import ScoringEndpoint
from meshrec.serve.service import ScoringService
from meshrec.serve.trial import PackageTrial, WarmUp


class Server:
    """HTTP server which answers requests in this process.

    Args:
        listener: result of `listen`; closed at the end.
        parent_link: connection to the other workers; None if this is the only process.
        changes: by model name, the last change which clients made before this worker started. The worker
            repeats it.

    Attributes:
        repository: models of this process.
    """

    def __init__(
        self,
        models: Mapping[str, Path],
        options: ServerOptions,
        listener: socket.socket,
        parent_link: ParentLink | None = None,
        changes: Mapping[str, ModelChange] | None = None,
    ) -> None:
        self._options, self._listener, self._parent_link = options, listener, parent_link
        # Before anything else, while this process has a single thread: both fork a child.
        self._reader, self._trial = BodyReader(), PackageTrial(Predictor)
        metrics = Metrics(len(models))
        self.repository = Repository(
            models,
            options.limits,
            metrics,
            opening=OpenOptions(
                options.verify,
                options.public_key,
                options.copy_weights,
                WarmUp(options.warm_up, options.limits.max_batch),
                options.keep_histories,
            ),
            trial=self._trial,
            deltas=options.deltas,
            changes=changes,
        )
        # Of this process only: the limits are per process.
        self._connections = Connections(options.connections, metrics.count_refusal)
        service = ScoringService(self.repository, metrics, self._connections)
        scoring = ScoringEndpoint(service, options.max_body, self._reader)
        # With several workers, the parent forwards a change to all of them, this one included.
        change_all = self.change if parent_link is None else parent_link.change_all
        hosts = (options.host.lower(), *map(str.lower, options.hosts))
        routes = Routes(
            self.repository,
            metrics,
            change_all,
            self._refusal,
            admin=options.admin,
            hosts=hosts if options.token is None else None,
        )
        # The ASGI application that uvicorn calls.
        self._guard = Guard(scoring, routes.app(), options.token)
        config = uvicorn.Config(
            self._guard,
            http=functools.partial(Connection, self._connections),  # type: ignore[arg-type]
            lifespan="off",
            ws="none",
            loop="asyncio",
            log_config=None,  # the command has configured logging
            access_log=options.access_log,
            server_header=False,
            proxy_headers=False,  # a client could forge X-Forwarded-For to evade the limits per client
            ssl_certfile=options.tls_cert,
            ssl_keyfile=options.tls_key,
            timeout_keep_alive=math.ceil(options.connections.idle_seconds),
            # Seconds after which uvicorn cancels requests that are still running.
            timeout_graceful_shutdown=60,
        )
        self._uvicorn = _HttpServer(config, self._guard, options.linger, options.connections.header_seconds)
        # Reloads in progress; cancelled when the server stops.
        self._tasks: set[asyncio.Task[None]] = set()
        # The lock is held during a reload and its retries. The event is set from a request for a reload until
        # the reload starts, and ends the retries of the reload before.
        self._reload_lock, self._reload_requested = asyncio.Lock(), asyncio.Event()

    @property
    def url(self) -> str:
        """URL of the server, with the actual port."""
        scheme = "http" if self._options.tls_cert is None else "https"
        host, port = self._listener.getsockname()[:2]
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    def run(self) -> None:
        """Run until `stop`; in the main thread also until SIGTERM or SIGINT. SIGHUP reloads the models."""
        loop = _new_event_loop()
        try:
            with frozen_objects():  # models are loaded later, so replaced versions can be collected
                loop.run_until_complete(self._serve())
            loop.run_until_complete(loop.shutdown_default_executor())
        finally:
            self._reader.close()
            self._trial.close()
            loop.close()

    def stop(self) -> None:
        """Make `run` return after it has answered all received requests. May be called from any thread."""
        self._uvicorn.should_exit = True

    def reload(self) -> None:
        """Schedule a reload of all models. Calls made before it starts are merged into one.

        Call in the event loop's thread.
        """
        if not self._reload_requested.is_set():
            self._reload_requested.set()
            self._start(self._load())

    async def change(self, action: str, model: str, delta: int | None = None) -> None:
        """Load or unload a model in this process.

        Args:
            delta: number of the last delta to apply when loading; None: all.

        Raises:
            RequestError: the model is unknown, or cannot be served.
        """
        if action == "load":
            await self.repository.load(model, delta)
        else:
            await self.repository.unload(model)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task, with a reference to it, because asyncio keeps only weak references."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refusal(self) -> str | None:
        """Return why a scoring request would be refused now; None if it would be answered."""
        if self._guard.is_stopping:
            return "the server is stopping"
        if (refusal := self.repository.refusal or self._connections.refusal) is not None:
            return refusal
        if self._parent_link is not None and not self._parent_link.all_loaded:
            return "another worker is loading its models"
        return None

    async def _load(self) -> None:
        """Load all models, and retry failed loads for a minute or until another reload is requested."""
        async with self._reload_lock:
            self._reload_requested.clear()
            failed = await self.repository.load_all()
            await self.repository.retry_loads(failed, self._reload_requested)
        if self._parent_link is not None:
            self._parent_link.report_loaded()

    async def _serve(self) -> None:
        """Load the models and answer requests until uvicorn stops."""
        loop = asyncio.get_running_loop()
        with _signal_handlers(loop, {signal.SIGHUP: self.reload}):
            if self._parent_link is not None:
                self._parent_link.listen(loop, self.change)
            if self._parent_link is not None and self._parent_link.is_replacement:
                # The other workers answer meanwhile, so this one must not accept connections yet.
                await self._load()
            else:
                # In the background: the server answers health checks while models load.
                self.reload()
            await self._uvicorn.serve([self._listener])
            # Reloads in progress end with the server.
            for task in self._tasks:
                task.cancel()
            self.repository.close()


def _new_event_loop() -> asyncio.AbstractEventLoop:
    """Return an event loop: uvloop's if it is installed, because it has half the overhead, or asyncio's."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


class _HttpServer(uvicorn.Server):
    """Server that answers all received requests before it ends, unlike uvicorn's own server.

    Args:
        linger: seconds for which the shutdown waits for clients to close idle connections.
    """

    def __init__(self, config: uvicorn.Config, guard: Guard, linger: float, header_seconds: float) -> None:
        super().__init__(config)
        self._guard, self._linger, self._header_seconds = guard, linger, header_seconds

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        # uvicorn would raise the signal again after shutdown, so that the process would exit with an error.
        def stop() -> None:
            self.should_exit = True

        loop = asyncio.get_running_loop()
        with _signal_handlers(loop, {signal.SIGTERM: stop, signal.SIGINT: stop}):
            yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to listen like uvicorn, but with the header timeout also for TLS handshakes."""
        await self.lifespan.startup()
        loop, config = asyncio.get_running_loop(), self.config
        seconds = self._header_seconds if config.ssl is not None else None
        self.servers = [
            await loop.create_server(
                self._new_connection,
                sock=listener,
                ssl=config.ssl,
                ssl_handshake_timeout=seconds,
                backlog=config.backlog,
            )
            for listener in sockets or []
        ]
        self.started = True

    def _new_connection(self) -> asyncio.Protocol:
        """Return the protocol object for a new connection."""
        config = self.config
        return config.http_protocol_class(  # type: ignore[call-arg]
            config=config, server_state=self.server_state, app_state={}
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer received requests, ask clients to close their connections, then close idle connections."""
        self._guard.is_stopping = True
        await self._accept_queued(sockets or [])
        quiet_since = time.monotonic()
        # Clients get time to close idle connections, counted from the last request.
        while self.server_state.connections and time.monotonic() - quiet_since < self._linger:
            if self.server_state.tasks:
                quiet_since = time.monotonic()
            await asyncio.sleep(0.005)
        await super().shutdown(sockets)

    async def _accept_queued(self, sockets: list[socket.socket]) -> None:
        """Accept the connections in the kernel's queue, and stop listening.

        If the socket were closed first, the kernel would reset these connections.
        """
        loop, config = asyncio.get_running_loop(), self.config
        accepted = []
        # Sockets do not block, so this ends when the queue is empty.
        for server, listener in zip(self.servers, sockets, strict=True):
            with contextlib.suppress(BlockingIOError):
                while True:
                    accepted.append(listener.accept()[0])
            server.close()
        for connection in accepted:
            connection.setblocking(False)
            await loop.connect_accepted_socket(self._new_connection, connection, ssl=config.ssl)


@contextlib.contextmanager
def _signal_handlers(
    loop: asyncio.AbstractEventLoop, handlers: Mapping[signal.Signals, Callable[[], None]]
) -> Iterator[None]:
    """Install signal handlers within the context. Outside the main thread, Python allows none: do nothing."""
    set_here = []
    with contextlib.suppress(ValueError, RuntimeError):
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})  # deliver a SIGHUP blocked since the fork
            set_here.append(number)
    try:
        yield
    finally:
        for number in set_here:
            loop.remove_signal_handler(number)
