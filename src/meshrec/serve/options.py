"""The options of a server."""

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshrec.export.signing import read_public_key
from meshrec.serve.batching import Limits


@dataclass(frozen=True, kw_only=True)
class ConnectionLimits:
    """Limits on what clients may hold of one server process, and for how long.

    A client is an IPv4 address or an IPv6 network of 64 bits. If there are too many connections, the server
    closes the one whose request has been unfinished longest. If there is none, it refuses the new one.
    """

    max_connections: int = 4096
    """Largest number of connections of all clients."""
    max_per_client: int = 256
    """Largest number of connections of one client."""
    max_header: int = 64 << 10
    """Largest size of a request's first line and headers, in bytes (431 beyond)."""
    max_unanswered: int = 256 << 20
    """Largest total size of the requests that are being read or wait, in bytes (503 beyond)."""
    header_seconds: float = 10.0
    """Seconds to wait for a request's headers, from the connection or their first byte (408 beyond)."""
    body_seconds: float = 30.0
    """Seconds to wait for a body (408 beyond), and for a client to read its answer."""
    idle_seconds: float = 30.0
    """Seconds that a connection may stay open between two requests."""

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
    """The options of a server."""

    host: str = "127.0.0.1"
    """The address to listen at. Beyond loopback, as with 0.0.0.0 for all addresses, a token is required."""
    port: int = 8080
    """Port to listen on; 0 takes a free one."""
    limits: Limits = field(default_factory=Limits)
    """Limits of batches and queues."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Limits of connections and unfinished requests."""
    max_body: int = 16 << 20
    """Largest body of a request, in bytes."""
    warm_up: Path | None = None
    """File of samples, one JSON object per line, that models score before they are ready."""
    deltas: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the deltas that models follow, by the model's name."""
    token: str | None = None
    """The bearer token that clients must send."""
    admin: bool = True
    """Whether load, unload and rollback can be asked for over HTTP (403 otherwise)."""
    hosts: tuple[str, ...] = ()
    """Without a token: further names of this server that the header ``Host`` may have in requests to load,
    unload and roll back. Addresses, ``localhost`` and ``host`` are always allowed."""
    verify: bool = True
    """Compare packages with their checksums before they are used."""
    public_key: Path | None = None
    """PEM file of the ed25519 public key that must have signed every package."""
    copy_weights: bool = False
    """Copy the weights into memory of each worker, instead of mapping the files that all workers share."""
    keep_histories: int = 0
    """Largest size, in bytes, of what each worker keeps of histories between requests for recommendations,
    for each model that can continue from it; 0 keeps nothing.
    """
    tls_cert: Path | None = None
    """PEM file of a certificate: serve HTTPS."""
    tls_key: Path | None = None
    """PEM file of the certificate's key."""
    access_log: bool = False
    """Log one line per request."""
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
            raise ValueError("tls_cert and tls_key go together. Give both, or none.")
        if self.public_key is not None:
            if not self.verify:
                raise ValueError(
                    "a signature is checked by reading every file. Leave out verify=False or the key."
                )
            read_public_key(self.public_key)  # fail now, and not when the first package is loaded
        if self.token is not None and (not self.token.isascii() or not self.token.strip()):
            raise ValueError("token must be of ASCII characters, and not empty.")


def listen(options: ServerOptions) -> socket.socket:
    """Return a bound socket, which all workers share.

    Raises:
        ValueError: the address or port is not available, or other machines can reach it and there is no
            token.
    """
    try:
        family, *_, address = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0]
        if options.token is None and not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback:
            raise ValueError(
                f"other machines can reach {options.host}, so clients must show a token, and none is set. "
                "Give one with --token-file or the variable MESHREC_TOKEN, or listen at 127.0.0.1."
            )
        bound = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror}. Use another host or port."
        ) from error
    # Connections inherit the option; asyncio sets it only on sockets created with the protocol's number.
    # Without it the second part of each answer waits 40 ms for the client to acknowledge the first.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setblocking(False)
    return bound
