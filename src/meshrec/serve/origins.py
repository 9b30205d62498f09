"""The check that a request to change the server does not come from a web page.

A server at loopback trusts the programs of its machine, and a browser is one of them. A page can post to it
(``Origin`` then names the page), or have its own name resolve to 127.0.0.1 (``Host`` then has that name).
"""

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from meshrec.serve.requests import RequestError


def check_origin(headers: Mapping[bytes, bytes], known: Collection[str]) -> None:
    """Check that a request does not come from another server's web page.

    Args:
        headers: headers of the request, with names in lower case.
        known: names of this server other than its addresses and ``localhost``.

    Raises:
        RequestError: it does, or may (status 403).
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    if not _is_own(_name_of("//" + host), known):
        raise RequestError(
            f"the header Host is {host[:80]!r}, which is not known to be this server. Use its address, "
            "name it with --hosts, or start the server with a token.",
            403,
        )
    origin = headers.get(b"origin")
    if origin is not None and _place_of(origin.decode("latin-1").lower()) != host:
        raise RequestError(
            f"the header Origin is {origin[:80].decode('latin-1')!r}: web pages may not change this server. "
            "Start it with a token, and send that.",
            403,
        )
    if headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
        raise RequestError("web pages of other sites may not change this server.", 403)


def _name_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


def _place_of(origin: str) -> str | None:
    try:
        return urlsplit(origin).netloc or None
    except ValueError:
        return None


def _is_own(name: str, known: Collection[str]) -> bool:
    """Return whether a name belongs to this server. Every address counts, because nobody can redirect one."""
    if name == "localhost" or name in known:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
