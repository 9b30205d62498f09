"""The common part of the three types: construction, comparison with MeshRec's types, and errors."""

from abc import ABCMeta
from typing import Any

import torch
from torch.fx._symbolic_trace import (
    ProxyableClassMeta,
    is_fx_symbolic_tracing,
)


class AssertedError(AssertionError, ValueError):
    """An invalid argument: a ValueError as everywhere in MeshRec, and an AssertionError as in TorchRec."""


class Kind(ABCMeta, ProxyableClassMeta):
    """A metaclass that records a node if an object is made of proxies, and counts MeshRec's types as
    instances.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """Return an object, or the node that makes one."""
        if is_fx_symbolic_tracing():
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        like = cls.__dict__.get("_like")
        return super().__instancecheck__(instance) or (like is not None and isinstance(instance, like))


def is_traced() -> bool:
    """Return whether a program is being recorded, so that values and sizes mean nothing yet."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[no-untyped-call]
