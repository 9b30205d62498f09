"""A value that may still be under way, and behaves like the value as soon as it is used."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch.utils import _pytree as pytree

W = TypeVar("W")


class LazyAwaitable(Generic[W]):
    """A value that is made once, at its first use: by an attribute, an index, a loop, or a torch function.

    ``wait()`` returns the value itself, for code that checks its type. Pass ``finish`` to make the value, or
    write a subclass with a method ``_wait_impl``.

    Args:
        finish: makes the value; None: ``_wait_impl`` does.
    """

    def __init__(self, finish: Callable[[], W] | None = None) -> None:
        self._finish: Callable[[], W] | None = self._wait_impl if finish is None else finish
        self._value: W | None = None

    def _wait_impl(self) -> W:
        """Wait for the value and return it. Subclasses override this."""
        raise ValueError(
            f"{type(self).__name__} does not say how its value is made. Pass a function to its constructor, "
            "or write a subclass with a method _wait_impl(self) that returns the value."
        )

    def wait(self) -> W:
        """Return the value. The first call waits for it."""
        if self._finish is not None:
            finish, self._finish = self._finish, None
            self._value = finish()
        return self._value  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # protocols must not wake the value
        return getattr(self.wait(), name)

    def __getitem__(self, key: Any) -> Any:
        return self.wait()[key]  # type: ignore[index]

    def __len__(self) -> int:
        return len(self.wait())  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.wait())  # type: ignore[call-overload,no-any-return]

    def __contains__(self, key: object) -> bool:
        return key in self.wait()  # type: ignore[operator]

    def __repr__(self) -> str:
        return "LazyAwaitable(on its way)" if self._finish is not None else repr(self._value)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        args, kwargs = pytree.tree_map_only(LazyAwaitable, LazyAwaitable.wait, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def awaited(value: Any) -> Any:
    """Return the value of a LazyAwaitable. Other objects are returned as they are."""
    return value.wait() if isinstance(value, LazyAwaitable) else value
