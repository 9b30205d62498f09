"""Common base for the three types: construction, instance checks against MeshRec's types, and errors."""

import inspect
from abc import ABCMeta
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.fx._symbolic_trace import ProxyableClassMeta, is_fx_symbolic_tracing

C = TypeVar("C", bound=type)


class AssertedError(AssertionError, ValueError):
    """Invalid argument. A ValueError, as everywhere in MeshRec, and an AssertionError, as in TorchRec."""


class Kind(ABCMeta, ProxyableClassMeta):
    """Metaclass of the bridge's jagged and keyed tensors.

    Under torch.fx tracing, a construction from proxies is recorded in the graph. ``isinstance`` is also True
    for objects of the MeshRec class that ``_like`` names.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Construct an object. Under torch.fx tracing with proxies as arguments, return a proxy for it."""
        # fx's metaclass searches all arguments for proxies, which eager code should not pay for.
        if is_fx_symbolic_tracing():
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        like = cls.__dict__.get("_like")
        return super().__instancecheck__(instance) or (like is not None and isinstance(instance, like))


def is_traced() -> bool:
    """Return whether torch.compile or torch.jit.trace is recording, so that values are placeholders."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[no-untyped-call]


def with_methods_of(*bases: type) -> Callable[[C], C]:
    """Return a class decorator that copies the methods of ``bases`` into the class.

    TorchScript compiles only the methods in a class, not inherited methods.
    """

    def copied(cls: C) -> C:
        for base in bases:
            for name, method in vars(base).items():
                if inspect.isfunction(method) and name not in vars(cls):
                    setattr(cls, name, method)
        return cls

    return copied
