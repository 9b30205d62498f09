"""torchrec.fx: torch's tracer, extended to awaitables."""

from collections.abc import Callable
from typing import Any

import torch
from torch.fx._symbolic_trace import is_fx_symbolic_tracing

from meshrec.compat.bridge.awaitables import NoWait
from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.model_parallel import DistributedModelParallel


class Tracer(torch.fx.Tracer):
    """A tracer of programs with awaitables. A model in DistributedModelParallel is recorded without the
    wrapper.

    Args:
        leaf_modules: names of classes whose modules are recorded as one call.
    """

    def __init__(self, leaf_modules: list[str] | None = None) -> None:
        super().__init__()
        self._leaf_modules = list(leaf_modules or [])

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is recorded as one call: torch's own, and those in ``leaf_modules``."""
        return type(m).__name__ in self._leaf_modules or super().is_leaf_module(m, module_qualified_name)

    def trace(
        self, root: torch.nn.Module | Callable[..., Any], concrete_args: dict[str, Any] | None = None
    ) -> torch.fx.Graph:
        """Return the graph of ``root``."""
        inner = root.module if isinstance(root, DistributedModelParallel) else root
        return super().trace(inner, concrete_args)

    def create_arg(self, a: Any) -> Any:
        """Return an argument of a node; of an awaitable, its value."""
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
    """Return a module that repeats what ``root`` did when it was recorded."""
    tracer = Tracer(leaf_modules)
    graph = tracer.trace(root, concrete_args)
    return torch.fx.GraphModule(tracer.root, graph)


def is_fx_tracing() -> bool:
    """Return whether torch.fx is recording."""
    return bool(is_fx_symbolic_tracing())
