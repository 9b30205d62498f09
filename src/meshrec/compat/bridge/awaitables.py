"""Values that are on their way, with TorchRec's way to write one's own."""

from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from typing import Generic, TypeVar

from meshrec.distributed import awaitable

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """What ``wait()`` gives is made by ``_wait_impl``, which the subclass writes, and passed through
    ``callbacks``.
    """

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Waits and gives the value."""

    def wait(self) -> W:
        """The value."""
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that change the value, in order; append to it."""
        return self._callbacks


class NoWait(Awaitable[W]):
    """A value that is there."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class _AnyLazy(ABCMeta):
    """What sharded modules return counts as lazy too."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, awaitable.LazyAwaitable)
        return super().__instancecheck__(instance)


class LazyAwaitable(awaitable.LazyAwaitable[W], metaclass=_AnyLazy):
    """A value that is waited for when it is first used; ``_wait_impl``, which the subclass writes, makes it.

    It is waited for once. Callbacks change it before that.
    """

    _is_root = True

    def __init__(self) -> None:
        super().__init__(self._finish_with_callbacks)
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Waits and gives the value."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that change the value, in order; append to it."""
        return self._callbacks

    def _finish_with_callbacks(self) -> W:
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value


class LazyNoWait(LazyAwaitable[W]):
    """A value that is there, in the form of one that is not."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj
