"""Classes of MeshRec that are constructed with TorchRec's arguments."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Adapted(Generic[T]):
    """A stand-in for the class ``target``. Called, it makes an object from TorchRec's arguments.

    ``isinstance``, ``issubclass``, class attributes and inheritance refer to ``target`` itself, so objects
    are MeshRec's own.

    Args:
        target: the class.
        construct: makes an object from TorchRec's arguments.
    """

    def __init__(self, target: type[T], construct: Callable[..., T]) -> None:
        self.target = target
        self._construct = construct
        self.__name__, self.__qualname__ = target.__name__, target.__qualname__
        self.__module__, self.__doc__ = construct.__module__, construct.__doc__
        self.__wrapped__ = construct

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Make an object."""
        return self._construct(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(self.target, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.target)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.target)

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type[T], ...]:
        return (self.target,)

    def __or__(self, other: Any) -> Any:
        return self.target | other

    def __ror__(self, other: Any) -> Any:
        return other | self.target

    def __repr__(self) -> str:
        return repr(self.target)
