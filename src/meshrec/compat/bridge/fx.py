"""torchrec.fx: torch's symbolic tracer with support for awaitables."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from meshrec.compat.bridge.awaitables import NoWait
from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.model_parallel import DistributedModelParallel


class Tracer(torch.fx.Tracer):
    """Symbolic tracer for programs with awaitables. Traces the module inside a DistributedModelParallel.

    Args:
        leaf_modules: class names of modules to record as a single call.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or [])

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether to record a module as a single call: torch's own modules and ``leaf_modules``."""
        return type(m).__name__ in self._leaf_modules or super().is_leaf_module(m, module_qualified_name)

    def trace(
        self, root: torch.nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> torch.fx.Graph:
        """Return the graph of ``root``."""
        inner = root.module if isinstance(root, DistributedModelParallel) else root
        return super().trace(inner, concrete_args)

    def create_arg(self, a: Any) -> Any:
        """Convert an argument of a traced call to a graph argument. Lazy awaitables are replaced by their
        value.
        """
        if isinstance(a, NoWait):
            return self.create_node(
                "call_function", NoWait, (self.create_arg(a.wait()),), {}, type_expr=NoWait
            )
        if isinstance(a, LazyAwaitable):
            return super().create_arg(a.wait())
        return super().create_arg(a)


def symbolic_trace(
    root: torch.nn.Module | Callable[..., Any],
    concrete_args: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
) -> torch.fx.GraphModule:
    """Trace ``root`` into a GraphModule.

    Args:
        root: module or function.
        concrete_args: arguments to specialize on, as for torch's tracer.
        leaf_modules: class names of modules to record as a single call.
    """
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return torch.fx.GraphModule(tracer.root, graph)


def is_fx_tracing() -> bool:
    """Return whether torch.fx is tracing."""
    return bool(is_fx_symbolic_tracing())
