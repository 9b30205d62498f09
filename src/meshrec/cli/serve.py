"""``meshrec serve``: serve packages over HTTP."""

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
from meshrec.train.run_folder import CONFIG, DELTAS, run_or_path

TOKEN = "MESHREC_TOKEN"
"""Environment variable with the bearer token."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Serve exported models over HTTP.

    POST /predict takes JSON samples, /v2 is the Open Inference Protocol, /metrics is for Prometheus, and GET
    / lists all paths. SIGHUP reloads the packages; SIGTERM answers received requests and exits.
    """

    models: Annotated[list[str], tyro.conf.Positional, tyro.conf.arg(metavar="[NAME=]PACKAGE ...")]
    """Packages to serve. The default NAME is the name of the package folder."""
    host: str = ServerOptions.host
    """Address to listen on. Beyond loopback, as with 0.0.0.0 (all addresses), a token is required."""
    port: int = ServerOptions.port
    """Port to listen on; 0: a free port."""
    workers: int = 1
    """Number of processes, which share the memory of the weights."""
    max_batch: int = Limits.max_batch
    """Maximum samples per batch."""
    max_wait_ms: float = Limits.max_wait_ms
    """Milliseconds a request may wait for others to join the batch while the model is idle."""
    max_queue: int = Limits.max_queue
    """Maximum number of waiting requests per model; further requests get status 503."""
    max_body: int = ServerOptions.max_body
    """Maximum request body size in bytes."""
    max_header: int = ConnectionLimits.max_header
    """Maximum size of request line and headers, in bytes."""
    max_unanswered: int = ConnectionLimits.max_unanswered
    """Maximum total size of incomplete and waiting requests, in bytes."""
    max_connections: int = ConnectionLimits.max_connections
    """Maximum number of connections per worker."""
    max_per_client: int = ConnectionLimits.max_per_client
    """Maximum number of connections per client address and worker; behind a proxy, raise it to
    max_connections.
    """
    header_seconds: float = ConnectionLimits.header_seconds
    """Maximum seconds until the headers of a request are complete."""
    body_seconds: float = ConnectionLimits.body_seconds
    """Maximum seconds until a request body is complete, or until a client reads the answer."""
    idle_seconds: float = ConnectionLimits.idle_seconds
    """Maximum seconds between two requests on a connection."""
    warm_up: Path | None = None
    """File of samples, a JSON object per line, scored before a model is ready; none: random samples."""
    deltas: Words = ()
    """Deltas (changed weights) to apply to a model, as NAME=RUN or NAME=FOLDER. meshrec follow,
    and meshrec train with --training.publish-every, write them to RUN/deltas.
    """
    token_file: Path | None = None
    """File with the bearer token required from clients; none: environment variable MESHREC_TOKEN, if set."""
    admin: bool = True
    """Allow load, unload and rollback of models over HTTP; SIGHUP always works."""
    hosts: tuple[str, ...] = ()
    """Without a token: additional Host names accepted in load, unload and rollback requests."""
    verify: bool = True
    """Verify package checksums before use."""
    require_signature: Path | None = None
    """PEM file with an ed25519 public key: serve only packages exported with --sign and the private key."""
    copy_weights: bool = False
    """Copy weights to every worker's memory, instead of mapping the package files."""
    keep_histories: int = ServerOptions.keep_histories
    """History cache size in bytes, per worker and model, for requests to /recommend: a request then encodes
    only new items. 0: no cache.
    """
    tls_cert: Path | None = None
    """PEM file with a certificate; enables HTTPS."""
    tls_key: Path | None = None
    """PEM file with the certificate's key."""
    access_log: bool = False
    """Log a line per request."""


def main(arguments: Sequence[str]) -> int:
    """Serve until a signal ends it; return the exit code."""
    options: ServeOptions = parse(ServeOptions, arguments, program="meshrec serve")
    # The token is not an option, because other users can read command lines in the process list.
    token = os.environ.get(TOKEN)
    if options.token_file is not None:
        token = options.token_file.read_text().strip()
    models = parse_packages(options.models)
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
        deltas=_parse_deltas(options.deltas, models),
        token=token,
        admin=options.admin,
        hosts=options.hosts,
        verify=options.verify,
        public_key=options.require_signature,
        copy_weights=options.copy_weights,
        keep_histories=options.keep_histories,
        tls_cert=options.tls_cert,
        tls_key=options.tls_key,
        access_log=options.access_log,
    )
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    serve(models, server, workers=options.workers)
    return 0


def _parse_deltas(named: Sequence[str], models: Mapping[str, Path]) -> dict[str, Path]:
    """Return the delta folders by model name from ``--deltas``: ``NAME=RUN`` or ``NAME=FOLDER`` arguments."""
    folders: dict[str, Path] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        if not equals or name not in models:
            raise ValueError(f"--deltas {text}: give NAME=FOLDER, with the name of a model: {list(models)}.")
        path = run_or_path(Path(folder))
        # For a run, its subfolder with deltas.
        folders[name] = path / DELTAS if (path / CONFIG).is_file() else path
    return folders


def parse_packages(named: Sequence[str]) -> dict[str, Path]:
    """Parse the packages to serve.

    Returns:
        Package folders by model name.

    Raises:
        ValueError: a folder is not a package, a name is invalid or given twice, or no package is given.
    """
    folders: dict[str, Path] = {}
    for text in named:
        name, equals, folder = text.partition("=")
        path = Path(folder if equals else text)
        # `absolute` gives a name for paths such as "." as well.
        name = name if equals else path.absolute().name
        if not name or "/" in name:
            raise ValueError(f"{name!r} cannot name a model. Give NAME=FOLDER, with a name without '/'.")
        if name in folders:
            raise ValueError(f"two models are called {name!r}. Give NAME=FOLDER.")
        if not (path / MANIFEST).is_file():
            raise ValueError(f"{path} is not a package. {_remedy(path)}")
        folders[name] = path
    if not folders:
        raise ValueError("no model was named. Give the folder of a package.")
    return folders


def _remedy(path: Path) -> str:
    """Return advice for a path which is not a package: the command to export a package to a new folder."""
    run = run_or_path(path)
    out = path if path.name else path.absolute()
    while out.exists():
        out = out.with_name(f"{out.name}-package")
    named = run if (run / CONFIG).is_file() else "RUN"
    return f"Make one with `meshrec export {named} --out {out}`, then serve {out}."
