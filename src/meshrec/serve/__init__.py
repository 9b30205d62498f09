"""An HTTP server for packages: batching, limits, several models, versions that replace each other."""

from meshrec.serve.batching import Limits
from meshrec.serve.options import ConnectionLimits, ServerOptions
from meshrec.serve.workers import serve

__all__ = ["ConnectionLimits", "Limits", "ServerOptions", "serve"]
