"""How a server listens and what it allows."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from meshrec.serve.batching import Limits


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server listens and what it allows."""

    host: str = "127.0.0.1"
    """The address to listen at; 0.0.0.0 is all of the machine's."""
    port: int = 8080
    """0 takes a free one."""
    limits: Limits = field(default_factory=Limits)
    """Of batches and queues."""
    max_body: int = 16 << 20
    """Most bytes of a request's body."""
    warm_up: Path | None = None
    """A file of samples, one JSON object a line, that models score before they are ready."""
    deltas: Mapping[str, Path] = field(default_factory=dict)
    """By model the folder of the deltas that it follows."""
    token: str | None = None
    """What clients must show as a bearer token."""
    tls_cert: Path | None = None
    """A PEM file with the certificate."""
    tls_key: Path | None = None
    """A PEM file with its key."""
    access_log: bool = False
    """Write a line of the log for each request."""
    linger: float = 1.0
    """Seconds that a server which stops waits for clients to close idle connections."""

    def __post_init__(self) -> None:
        if not 0 <= self.port < 1 << 16:
            raise ValueError(f"port must lie in [0, 65536), got {self.port}.")
        if self.max_body < 1:
            raise ValueError(f"max_body must be at least 1 byte, got {self.max_body}.")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together. Give both, or none.")
        if self.token is not None and (not self.token.isascii() or not self.token.strip()):
            raise ValueError("token must be of ASCII characters, and not empty.")


def listen(options: ServerOptions) -> socket.socket:
    """A bound socket, which all workers share.

    Raises:
        ValueError: for an address or a port that cannot be had.
    """
    try:
        family = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM)[0][0]
        bound = socket.create_server((options.host, options.port), family=family, backlog=2048)
    except OSError as error:
        raise ValueError(
            f"cannot listen at {options.host}:{options.port}: {error.strerror}. Use another host or port."
        ) from error
    # Connections inherit it; asyncio sets it only on sockets that were made with the protocol's number.
    # Without it the second part of each answer waits 40 ms for the client to acknowledge the first.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    bound.setblocking(False)
    return bound
