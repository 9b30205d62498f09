"""Paths to the tensors in a batch of any shape: dataclasses, tuples, dicts, objects with attributes."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from meshrec.sparse import KeyedJaggedTensor
from meshrec.sparse.jagged_tensor import Jagged


class PathStep(NamedTuple):
    """A step from an object to a part of it: an attribute, or an item of a mapping or sequence."""

    name: Any
    is_item: bool

    def __str__(self) -> str:
        return f"[{self.name!r}]" if self.is_item else f".{self.name}"


Path = tuple[PathStep, ...]
_LEAVES = (str, bytes, int, float, complex, type(None), type, nn.Module)


def walk(thing: Any) -> Iterator[tuple[Path, Any]]:
    """Find every tensor and jagged tensor in ``thing`` with its path. Each object appears once."""
    yield from _walk(thing, (), set())


def find(batch: Any, features: KeyedJaggedTensor) -> Path | None:
    """Return the path of this very object in the batch; None if it is not part of the batch."""
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


def tensors_of(thing: Any) -> list[tuple[Path, Tensor]]:
    """Return every tensor with its path, including the tensors inside jagged tensors."""
    found: list[tuple[Path, Tensor]] = []
    for path, part in walk(thing):
        if isinstance(part, Jagged):
            found += [(path, tensor) for tensor in part._tensors()]
        else:
            found.append((path, part))
    return found


def _walk(thing: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    if isinstance(thing, _LEAVES) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor | Jagged):
        yield path, thing
        return
    for step, part in _parts(thing):
        yield from _walk(part, (*path, step), seen)


def _parts(thing: Any) -> list[tuple[PathStep, Any]]:
    if isinstance(thing, Mapping):
        return [(PathStep(name, True), part) for name, part in thing.items()]
    if isinstance(thing, Sequence):
        return [(PathStep(number, True), part) for number, part in enumerate(thing)]
    slots = [name for kind in type(thing).__mro__ for name in _slots(kind)]
    names = [*getattr(thing, "__dict__", ()), *slots]
    return [(PathStep(name, False), getattr(thing, name, None)) for name in names]


def _slots(kind: type) -> Sequence[str]:
    slots = kind.__dict__.get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return [name for name in named if name not in ("__weakref__", "__dict__")]
