"""Test helpers that TorchRec users import."""

import os
import socket
import unittest
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_HAS_SANITIZER = "ASAN_OPTIONS" in os.environ
_REASON = "not with the address sanitizer"


def get_free_port() -> int:
    """Return a local port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return int(listener.getsockname()[1])


def skip_if_asan(func: F) -> F:
    """Skip a test under the address sanitizer."""
    return unittest.skipIf(_HAS_SANITIZER, _REASON)(func)


skip_if_asan_class = skip_if_asan
