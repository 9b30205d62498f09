"""Options of a server, and the socket on which it listens."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshrec.export.signing import read_public_key
from meshrec.serve.batching import Limits


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on connections and unfinished requests, for every server process.

    A client is an IPv4 address or a 64-bit IPv6 network. Above a limit on connections, the server closes the
    connection with the request which has been incomplete longest. Without such a request, it refuses the new
    connection.
    """

    max_connections: int = 4096
    """Maximum number of connections in total."""
    max_per_client: int = 256
    """Maximum number of connections per client."""
    max_header: int = 64 << 10
    """Maximum size of request line and headers, in bytes (status 431 above)."""
    max_unanswered: int = 256 << 20
    """Maximum total size of incomplete and waiting requests, in bytes (status 503 above)."""
    header_seconds: float = 10.0
    """Maximum seconds until the headers are complete, from connection or first byte (status 408 above)."""
    body_seconds: float = 30.0
    """Maximum seconds until a body is complete (status 408 above), or until a client reads the answer."""
    idle_seconds: float = 30.0
    """Maximum seconds between requests on a connection."""

    def __post_init__(self) -> None:
        for name in ("max_connections", "max_per_client", "max_unanswered"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}.")
        if self.max_header < 1024:
            raise ValueError(f"max_header must be at least 1024 bytes, got {self.max_header}.")
        for name in ("header_seconds", "body_seconds", "idle_seconds"):
            if not 0 < getattr(self, name) < 86400:
                raise ValueError(f"{name} must lie between 0 and 86400, got {getattr(self, name)}.")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server."""

    host: str = "127.0.0.1"
    """Address to listen on. A token is required beyond loopback, for example with 0.0.0.0 (all addresses)."""
    port: int = 8080
    """Port to listen on; 0: a free port."""
    limits: Limits = field(default_factory=Limits)
    """Batch and queue limits."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Connection limits."""
    max_body: int = 16 << 20
    """Maximum body size in bytes."""
    warm_up: Path | None = None
    """File with samples, a JSON object per line, which models score before they are ready; None: random
    samples.
    """
    deltas: Mapping[str, Path] = field(default_factory=dict)
    """Delta folders to follow, by model name."""
    token: str | None = None
    """Bearer token that clients must send; None: no token is needed."""
    admin: bool = True
    """Whether load, unload and rollback are allowed over HTTP (status 403 otherwise)."""
    hosts: tuple[str, ...] = ()
    """Additional ``Host`` names accepted in load, unload and rollback requests without a token.
    Addresses, ``localhost`` and ``host`` are always accepted.
    """
    verify: bool = True
    """Verify package checksums before use."""
    public_key: Path | None = None
    """PEM file with the ed25519 public key which must have signed every package."""
    copy_weights: bool = False
    """Copy weights to every worker's memory, instead of mapping files shared by all workers."""
    keep_histories: int = 0
    """Size of the KV cache for user histories in bytes, per worker and model; 0: no cache. Only next-item
    models which support such a cache use it.
    """
    tls_cert: Path | None = None
    """PEM file of a certificate; enables HTTPS."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    access_log: bool = False
    """Log a line per request."""
    linger: float = 1.0
    """Seconds for which a stopping server waits for clients to close idle connections."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must lie in [0, 65536), got {self.port}.")
        if self.keep_histories < 0:
            raise ValueError(f"keep_histories must be at least 0 bytes, got {self.keep_histories}.")
        if self.max_body < 1:
            raise ValueError(f"max_body must be at least 1 byte, got {self.max_body}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key must be given together. Give both, or neither.")
        if self.public_key is not None:
            if not self.verify:
                raise ValueError(
                    "public_key needs verify=True, since a signature covers every file. Use one of them."
                )
            read_public_key(self.public_key)  # fail now, and not when the first package is loaded
        if self.token is not None and (not self.token.isascii() or not self.token.strip()):
            raise ValueError("token must be nonempty ASCII.")


def listen(options: ServerOptions) -> socket.socket:
    """Return a listening socket, which all workers share.

    Raises:
        ValueError: the address or port is unavailable, or other machines can reach it and no token is set.
    """
    try:
        family, *_, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        if options.token is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
            raise ValueError(
                f"other machines can reach {options.host}, so clients must send a token, but none is set. "
                "Give one with --token-file or the variable MESHREC_TOKEN, or listen at 127.0.0.1."
            )
        bound = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror}. Use another host or port."
        ) from error
    # Connections inherit the option; asyncio only sets it on sockets with an explicit protocol number.
    # Without it, an answer's second part waits 40 ms for the client to acknowledge the first.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setblocking(False)
    return bound
