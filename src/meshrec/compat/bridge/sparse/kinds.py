"""What the three types share: how they are made, compared with MeshRec's, and checked."""

from abc import ABCMeta
from typing import Any

import torch
from torch.fx._symbolic_trace import (
    ProxyableClassMeta,
    is_fx_symbolic_tracing,
)


class AssertedError(AssertionError, ValueError):
    """What does not fit: a ValueError as everywhere in MeshRec, and an AssertionError as in TorchRec."""


class Kind(ABCMeta, ProxyableClassMeta):
    """Made of proxies, an object is a node of the program; what MeshRec's own modules return counts too."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        """An object, or the node that makes one."""
        if is_fx_symbolic_tracing():
            return super().__call__(*args, **kwargs)
        return type.__call__(cls, *args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        like = cls.__dict__.get("_like")
        return super().__instancecheck__(instance) or (like is not None and isinstance(instance, like))


def is_traced() -> bool:
    """Whether a program is being recorded, so that numbers and sizes say nothing yet."""
    return torch.compiler.is_compiling() or bool(torch.jit.is_tracing())  # type: ignore[no-untyped-call]
