"""TorchRec's awaitable base classes, whose subclasses implement ``_wait_impl``."""

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from torch.fx._symbolic_trace import ProxyableClassMeta

from meshrec.distributed import awaitable

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """Value that ``wait()`` returns. Subclasses compute it in ``_wait_impl``; ``callbacks`` transform it."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    def wait(self) -> W:
        """Compute the value, apply the callbacks in order, and return the result."""
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Mutable list of functions to apply to the value, in order."""
        return self._callbacks


class _Precomputed(Generic[W]):
    """Common base for both awaitables with a precomputed value."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class NoWait(_Precomputed[W], Awaitable[W]):
    """Awaitable with a precomputed value."""


class _AnyLazy(ABCMeta, ProxyableClassMeta):
    """Metaclass: the results of sharded modules count as LazyAwaitable instances.

    Under torch.fx tracing, a construction is recorded as a call to the class.
    """

    def __instancecheck__(cls, instance: object) -> bool:
        # Only the root class matches MeshRec's results. A program's subclass matches its instances alone.
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, awaitable.LazyAwaitable)
        return super().__instancecheck__(instance)


# Sharded modules return MeshRec's LazyAwaitable. Registration also covers every subclass, including the
# bridge's LazyAwaitable below.
Awaitable.register(awaitable.LazyAwaitable)


class LazyAwaitable(awaitable.LazyAwaitable[W], metaclass=_AnyLazy):
    """Value that is awaited once, at first use, and then transformed by the callbacks.

    Subclasses compute it in ``_wait_impl``.
    """

    _is_root = True

    def __init__(self) -> None:
        # The base class calls this function at first use and caches the result, so callbacks run once.
        super().__init__(partial(Awaitable.wait, self))  # type: ignore[arg-type]  # registered
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Mutable list of functions to apply to the value, in order."""
        return self._callbacks


class LazyNoWait(_Precomputed[W], LazyAwaitable[W]):
    """Lazy awaitable with a precomputed value."""
