"""Stand-ins for MeshRec classes whose constructors accept TorchRec's arguments."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Adapted(Generic[T]):
    """Callable that looks like the class ``target``, but is constructed with TorchRec's arguments.

    Calling it returns a plain ``target`` object. ``isinstance``, ``issubclass``, class attributes and
    subclassing also refer to ``target``.
    """

    def __init__(self, target: type[T], construct: Callable[..., T]) -> None:
        self.target = target
        self._construct = construct
        # Pickles, docs and error messages name the target class. The signature and the docstring come from
        # the factory, because they describe TorchRec's arguments.
        self.__name__, self.__qualname__ = target.__name__, target.__qualname__
        self.__module__, self.__doc__ = construct.__module__, construct.__doc__
        self.__wrapped__ = construct

    def __call__(self, *args: Any, **kwargs: Any) -> T:
        """Construct a ``target`` from TorchRec's arguments."""
        return self._construct(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        # copy and pickle look dunders up on the instance. The target's would be unbound methods.
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return getattr(self.target, name)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self.target)

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, self.target)

    # ``class Mine(EmbeddingBagConfig)`` subclasses the target, because this object is not a class.
    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type[T], ...]:
        return (self.target,)

    # Annotations such as ``EmbeddingBagConfig | None`` are evaluated at import.
    def __or__(self, other: Any) -> Any:
        return self.target | other

    def __ror__(self, other: Any) -> Any:
        return other | self.target

    def __repr__(self) -> str:
        return repr(self.target)
