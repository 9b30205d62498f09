"""TorchRec's awaitable base classes, whose subclasses implement ``_wait_impl``."""

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

from torch.fx._symbolic_trace import ProxyableClassMeta

from meshrec.distributed import awaitable

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """Value that is not computed yet. ``wait()`` computes and returns it.

    Subclasses implement ``_wait_impl``. Functions in ``callbacks`` are applied to the value afterwards.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Compute the value. Subclasses implement this method."""

    def wait(self) -> W:
        """Compute the value, apply the callbacks in order, and return the result."""
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions to apply to the value, in order. Programs may append to the list."""
        return self._callbacks


class _Precomputed(Generic[W]):
    """Common base of both awaitables whose value is already known."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class NoWait(_Precomputed[W], Awaitable[W]):
    """Awaitable whose value is already known, so that ``wait()`` returns at once."""


class _AnyLazy(ABCMeta, ProxyableClassMeta):
    """Metaclass that makes the results of MeshRec's sharded modules instances of LazyAwaitable.

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
    """Value that is computed at first use, for example by a torch function, without an explicit ``wait()``.

    Subclasses implement ``_wait_impl``. Functions in ``callbacks`` are applied to the value once.
    """

    _is_root = True

    def __init__(self) -> None:
        # The base class calls this function at first use and caches the result, so callbacks run once.
        super().__init__(partial(Awaitable.wait, self))  # type: ignore[arg-type]  # registered
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        pass

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions to apply to the value, in order. Programs may append to the list."""
        return self._callbacks


class LazyNoWait(_Precomputed[W], LazyAwaitable[W]):
    """Lazy awaitable whose value is already known."""
