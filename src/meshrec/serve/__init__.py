"""HTTP server for packages: dynamic batching, limits, several models, and updates without downtime."""

from meshrec.serve.batching import Limits
from meshrec.serve.options import ConnectionLimits, ServerOptions
from meshrec.serve.workers import serve

__all__ = ["ConnectionLimits", "Limits", "ServerOptions", "serve"]
