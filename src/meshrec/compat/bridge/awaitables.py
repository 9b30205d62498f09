"""Values that are under way, with TorchRec's way of writing your own."""

import operator
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from meshrec.distributed import awaitable

W = TypeVar("W")


class Awaitable(ABC, Generic[W]):
    """A value that ``wait()`` returns. A subclass's ``_wait_impl`` makes it, and ``callbacks`` change it."""

    def __init__(self) -> None:
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    def wait(self) -> W:
        """Return the value."""
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that change the value, in order. Append yours."""
        return self._callbacks


class NoWait(Awaitable[W]):
    """An awaitable whose value exists already."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj


class _AnyLazy(ABCMeta):
    """A metaclass that counts the results of sharded modules as instances."""

    def __instancecheck__(cls, instance: object) -> bool:
        if cls.__dict__.get("_is_root"):
            return isinstance(instance, awaitable.LazyAwaitable)
        return super().__instancecheck__(instance)


class LazyAwaitable(awaitable.LazyAwaitable[W], metaclass=_AnyLazy):
    """A value that is awaited at its first use. A subclass's ``_wait_impl`` makes it.

    It is awaited once, and then changed by the callbacks.
    """

    _is_root = True

    def __init__(self) -> None:
        super().__init__(self._finish_with_callbacks)
        self._callbacks: list[Callable[[W], W]] = []

    @abstractmethod
    def _wait_impl(self) -> W:
        """Wait for the value and return it."""

    @property
    def callbacks(self) -> list[Callable[[W], W]]:
        """Functions that change the value, in order. Append yours."""
        return self._callbacks

    def _finish_with_callbacks(self) -> W:
        value = self._wait_impl()
        for callback in self._callbacks:
            value = callback(value)
        return value


def _on_value(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    def method(self: LazyAwaitable[Any], *others: Any) -> Any:
        others = tuple(map(awaitable.awaited, others))
        return function(*others, self.wait()) if swapped else function(self.wait(), *others)

    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_UNARY = "neg pos abs invert index"
# Python looks operators up in the class, so the value's own are not found by ``__getattr__``.
for _name in _BINARY.split():
    _function = getattr(operator, f"__{_name}__")
    setattr(LazyAwaitable, f"__{_name}__", _on_value(_function))
    setattr(LazyAwaitable, f"__r{_name}__", _on_value(_function, swapped=True))
for _name in [*_UNARY.split(), "lt", "le", "eq", "ne", "gt", "ge"]:
    setattr(LazyAwaitable, f"__{_name}__", _on_value(getattr(operator, f"__{_name}__")))
for _type in (bool, int, float, complex, round, divmod):
    setattr(LazyAwaitable, f"__{_type.__name__}__", _on_value(_type))
setattr(LazyAwaitable, "__hash__", object.__hash__)  # noqa: B010  as if it were not compared by value


class LazyNoWait(LazyAwaitable[W]):
    """A lazy awaitable whose value exists already."""

    def __init__(self, obj: W) -> None:
        super().__init__()
        self._obj = obj

    def _wait_impl(self) -> W:
        return self._obj
