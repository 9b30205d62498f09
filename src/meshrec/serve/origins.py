"""Check that requests which change models do not come from web pages.

A server without a token trusts all programs on its machine, including browsers. So any web page could post to
it (cross-site request forgery; the header ``Origin`` then names the page), or resolve the page's name to
127.0.0.1 (DNS rebinding; the header ``Host`` then has that name).
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from meshrec.serve.requests import RequestError


def check_origin(headers: Mapping[bytes, bytes], server_names: Collection[str]) -> None:
    """Check that a request does not come from a web page of another server.

    Args:
        headers: request headers with lower-case names.

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
