"""Paths to tensors in a batch with any structure: dataclasses, tuples, dicts, objects with attributes."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.jagged_tensor import Jagged


class PathStep(NamedTuple):
    """A step from an object to a part: an attribute, or an item in a mapping or sequence."""

    name: Any
    is_item: bool

    def __str__(self) -> str:
        return f"[{self.name!r}]" if self.is_item else f".{self.name}"


Path = tuple[PathStep, ...]
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module)


def walk(batch: Any) -> list[tuple[Path, Tensor | Jagged]]:
    """List (path, tensor or jagged tensor) pairs in ``batch``. An object appears once."""
    leaves: list[tuple[Path, Tensor | Jagged]] = []
    seen: set[int] = set()
    # A stack instead of recursion: every step walks a batch, and most time was spent in calls.
    stack: list[tuple[Path, Any]] = [((), batch)]
    while stack:
        path, part = stack.pop()
        if isinstance(part, _LEAVES) or id(part) in seen:
            continue
        seen.add(id(part))
        if isinstance(part, Tensor | Jagged):
            leaves.append((path, part))
            continue
        children: list[tuple[Path, Any]] = []
        if isinstance(part, Mapping):
            for name, child in part.items():
                children.append(((*path, PathStep(name, True)), child))
        elif isinstance(part, Sequence):
            for number, child in enumerate(part):
                children.append(((*path, PathStep(number, True)), child))
        else:
            slots = _slots(type(part))  # type: ignore[arg-type]  # the type's hash is not that of its instances
            for name in (*getattr(part, "__dict__", ()), *slots):
                children.append(((*path, PathStep(name, False)), getattr(part, name, None)))
        # Reversed, so leaves are listed in batch order.
        stack += reversed(children)
    return leaves


def find(batch: Any, features: KeyedJaggedTensor) -> Path | None:
    """Return the path to this very object in the batch; None if the batch does not contain it."""
    return next((path for path, part in walk(batch) if part is features), None)


def follow(batch: Any, path: Path) -> Any:
    """Return the object at ``path``; None if there is none."""
    for name, is_item in path:
        try:
            batch = batch[name] if is_item else getattr(batch, name)
        except (AttributeError, IndexError, KeyError, TypeError):
            return None
    return batch


def text_of(path: Path) -> str:
    """Return the path as Python code, such as ``batch.sparse['user']``."""
    return "batch" + "".join(map(str, path))


@functools.lru_cache
def _slots(kind: type) -> Sequence[str]:
    """Return a type's instance attributes outside ``__dict__``."""
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [name for name in names if name not in ("__weakref__", "__dict__")]
