"""``LazyAwaitable``: a placeholder which waits for its value at first use.

Sharded modules return it so that the caller can do other work while embeddings are exchanged between ranks.
"""

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar

from torch.utils import _pytree as pytree

W = TypeVar("W")


class LazyAwaitable(Generic[W]):
    """Placeholder for a value of type ``W``, which is computed at first use.

    Reading an attribute, indexing, iterating, operators, and passing the placeholder to a torch function all
    count as use. Call ``wait()`` to get the value itself, for example before an ``isinstance`` check. A
    subclass may override ``_wait_impl`` instead of passing ``finish``.

    Args:
        finish: function which computes the value. It runs at most once. None: ``_wait_impl`` computes the
            value.
    """

    def __init__(self, finish: Callable[[], W] | None = None) -> None:
        # The function which computes the value, until ``wait`` has called it; then None, or a function which
        # raises.
        self._finish: Callable[[], W] | None = self._wait_impl if finish is None else finish
        self._value: W | None = None

    def _wait_impl(self) -> W:
        """Compute and return the value. Subclasses may override this method, which runs at most once."""
        raise ValueError(
            f"{type(self).__name__} does not say how its value is made. Pass a function to its constructor, "
            "or write a subclass with a method _wait_impl(self) that returns the value."
        )

    def wait(self) -> W:
        """Return the value. The first call computes it, and may wait for other ranks.

        If the computation raises an error, every later call raises the same error.
        """
        if self._finish is not None:
            # Release the closure before it runs, because it keeps the batch's tensors alive.
            finish, self._finish = self._finish, None
            try:
                self._value = finish()
            except BaseException as error:
                self._finish = partial(_raise, error)  # for every further use, too
                raise
        return self._value  # type: ignore[return-value]

    # Called only for attributes which the placeholder itself does not have.
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)  # a check for __array__ must not compute the value
        if name in ("_finish", "_value"):  # unset: wait() would come back here in an endless recursion
            raise RuntimeError(
                f"{type(self).__name__}.__init__ did not call super().__init__(), so that its value cannot "
                "be awaited. Call it first."
            )
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
        # Torch functions take plain values, wherever awaitables are nested in the arguments.
        args, kwargs = pytree.tree_map_only(LazyAwaitable, LazyAwaitable.wait, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def _raise(error: BaseException) -> NoReturn:
    """Raise ``error``. A function, because an expression cannot contain ``raise``."""
    raise error


def _delegate(function: Callable[..., Any], *, swapped: bool = False) -> Callable[..., Any]:
    """Return a method for an operator, such as ``__add__``, which applies ``function`` to the value.

    Args:
        swapped: whether the value is the last operand, as in ``__radd__``.
    """

    def method(self: LazyAwaitable[Any], *operands: Any) -> Any:
        # Both operands may be placeholders.
        operands = tuple(map(awaited, operands))
        return function(*operands, self.wait()) if swapped else function(self.wait(), *operands)

    return method


_BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_UNARY = "neg pos abs invert index"
# Python looks operators up in the class, so ``__getattr__`` never sees them.
for _name in _BINARY.split():
    _function = getattr(operator, f"__{_name}__")
    setattr(LazyAwaitable, f"__{_name}__", _delegate(_function))
    setattr(LazyAwaitable, f"__r{_name}__", _delegate(_function, swapped=True))
for _name in [*_UNARY.split(), "lt", "le", "eq", "ne", "gt", "ge"]:
    setattr(LazyAwaitable, f"__{_name}__", _delegate(getattr(operator, f"__{_name}__")))
for _type in (bool, int, float, complex, round, divmod):
    setattr(LazyAwaitable, f"__{_type.__name__}__", _delegate(_type))
setattr(LazyAwaitable, "__hash__", object.__hash__)  # noqa: B010  as if it were not compared by value


def awaited(value: Any) -> Any:
    """Return the value of a LazyAwaitable, waiting for it if necessary. Return other objects unchanged."""
    return value.wait() if isinstance(value, LazyAwaitable) else value
