"""``meshrec serve``: packages behind HTTP."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from meshrec.cli.arguments import Words, parse
from meshrec.export.manifest import MANIFEST
from meshrec.serve import ConnectionLimits, Limits, ServerOptions, serve
from meshrec.train.run_folder import CONFIG

TOKEN = "MESHREC_TOKEN"


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Answers requests over HTTP with the scores of exported models: POST /predict with JSON samples, the
    Open Inference Protocol under /v2, /metrics for Prometheus; GET / lists it all. SIGHUP loads packages
    anew, SIGTERM answers what was sent and ends."""

    models: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME=]PACKAGE ...")]
    """Packages, each under a name: its folder's, unless another is given."""
    host: str = ServerOptions.host
    """The address to listen at. Beyond loopback, as with 0.0.0.0 for all addresses, a token is required."""
    port: int = ServerOptions.port
    """0 takes a free one."""
    workers: int = 1
    """Processes; they share the pages of the weights."""
    max_batch: int = Limits.max_batch
    """Most samples in a batch."""
    max_wait_ms: float = Limits.max_wait_ms
    """How long a request may wait for others while nothing is computed."""
    max_queue: int = Limits.max_queue
    """Most requests of a model that wait for their scores; others get 503."""
    max_body: int = ServerOptions.max_body
    """Most bytes of a request's body."""
    max_header: int = ConnectionLimits.max_header
    """Most bytes of a request's headers."""
    max_unanswered: int = ConnectionLimits.max_unanswered
    """Most bytes of all requests that are being read or wait for their answer."""
    max_connections: int = ConnectionLimits.max_connections
    """Most connections of each worker."""
    max_per_client: int = ConnectionLimits.max_per_client
    """Most connections that one address has to a worker; raise it to max_connections behind a proxy."""
    header_seconds: float = ConnectionLimits.header_seconds
    """How long the headers of a request may take."""
    body_seconds: float = ConnectionLimits.body_seconds
    """How long the body of a request, or a client to read its answer, may take."""
    idle_seconds: float = ConnectionLimits.idle_seconds
    """How long a connection may stay open between two requests."""
    warm_up: Path | None = None
    """A file of samples, one JSON object a line, to score before a model is ready; otherwise made-up ones."""
    deltas: Words = ()
    """Folders of deltas that models follow, as NAME=FOLDER: of a run that publishes them, RUN/deltas."""
    token_file: Path | None = None
    """Clients must show its content as a bearer token; the variable MESHREC_TOKEN may hold it, too."""
    admin: bool = True
    """Whether models can be loaded, unloaded and rolled back over HTTP; SIGHUP works in any case."""
    hosts: tuple[str, ...] = ()
    """Names of this server that load and unload may be asked by where there is no token."""
    verify: bool = True
    """Whether packages are compared with their checksums before they are used."""
    tls_cert: Path | None = None
    """A PEM file with a certificate: serve HTTPS."""
    tls_key: Path | None = None
    """Its key."""
    access_log: bool = False
    """Log a line for each request."""


def main(arguments: Sequence[str]) -> int:
    """Parses and serves until a signal; the exit code."""
    options: ServeOptions = parse(ServeOptions, arguments, program="meshrec serve")
    token = os.environ.get(TOKEN)
    if options.token_file is not None:
        token = options.token_file.read_text().strip()
    models = packages(options.models)
    server = ServerOptions(
        host=options.host,
        port=options.port,
        limits=Limits(
            max_batch=options.max_batch, max_wait_ms=options.max_wait_ms, max_queue=options.max_queue
        ),
        connections=ConnectionLimits(
            max_connections=options.max_connections,
            max_per_client=options.max_per_client,
            max_header=options.max_header,
            max_unanswered=options.max_unanswered,
            header_seconds=options.header_seconds,
            body_seconds=options.body_seconds,
            idle_seconds=options.idle_seconds,
        ),
        max_body=options.max_body,
        warm_up=options.warm_up,
        deltas=followed(options.deltas, models),
        token=token,
        admin=options.admin,
        hosts=options.hosts,
        verify=options.verify,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        access_log=options.access_log,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(models, server, workers=options.workers)
    return 0


def followed(named: Sequence[str], models: Mapping[str, Path]) -> dict[str, Path]:
    """Folders of deltas by the model's name, of ``NAME=FOLDER``.

    Raises:
        ValueError: for a model that is not served, and anything else than that.
    """
    found: dict[str, Path] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        if not equals or name not in models:
            raise ValueError(f"--deltas {text}: give NAME=FOLDER, with the name of a model: {list(models)}.")
        found[name] = Path(folder)
    return found


def packages(named: Sequence[str]) -> dict[str, Path]:
    """Folders by the model's name, of ``NAME=FOLDER`` or ``FOLDER``.

    Raises:
        ValueError: for a folder that holds no package, a name that is there twice, and no model at all.
    """
    found: dict[str, Path] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else text)
        name = name if equals else path.absolute().name
        if not name or "/" in name:
            raise ValueError(f"{name!r} is no name for a model. Give NAME=FOLDER, with a name without '/'.")
        if name in found:
            raise ValueError(f"two models are called {name!r}. Give NAME=FOLDER.")
        if not (path / MANIFEST).is_file():
            raise ValueError(f"{path} holds no package. {_remedy(path)}")
        found[name] = path
    if not found:
        raise ValueError("no model was named. Give the folder of a package.")
    return found


def _remedy(path: Path) -> str:
    """Return the command that makes a package, which needs a folder that is not there yet."""
    run = path if (path / CONFIG).is_file() else "RUN"
    out = path if path.name else path.absolute()
    while out.exists():
        out = out.with_name(f"{out.name}-package")
    return f"Make one with `meshrec export {run} --out {out}`, then serve {out}."
