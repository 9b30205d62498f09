"""Encode the plain values in a training state as JSON without loss. Decoding cannot execute code.

JSON has neither tuples nor sets, and only string keys. A tuple is therefore encoded as
``{"__tuple__": [...]}``, a set as ``{"__set__": [...]}``, a frozenset as ``{"__frozenset__": [...]}``, and a
dict with other keys as ``{"__items__": [[key, value], ...]}``. A tensor is stored elsewhere, and encoded by
name: ``{"__tensor__": "model.weight"}``.
"""

import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

_TYPE_TAGS = ("__tuple__", "__set__", "__frozenset__", "__items__", "__counter__", "__tensor__")


def encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Convert a value to JSON types, and collect the tensors in it.

    Args:
        value: plain value, tensor, or a container of these.
        name: position of the value in the state, such as ``model.weight``; also the name of a tensor.
        tensors: receives the tensors by name.

    Returns:
        Value of JSON types only. Tensors are replaced by their names.

    Raises:
        ValueError: the type of a value is not supported, or two tensors would get the same name. The message
            names the position.
    """
    if value is None or isinstance(value, bool | int | float | str):
        # Subclasses (numpy floats, IntEnum) are stored as their base type.
        return value if type(value) in (type(None), bool, int, float, str) else _to_builtin(value)
    if isinstance(value, Tensor):
        if tensors.setdefault(name, value) is not value:
            raise ValueError(
                f"two tensors of the state are called {name}: they are in a set, or their keys join to one "
                "name, such as 'a.b' and 'b' in 'a'. Rename a key, or use a list."
            )
        return {"__tensor__": name}
    if isinstance(value, list):
        return [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"__tuple__": [encode(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, set | frozenset):
        # Sets have no order. Sorting makes equal states have equal manifests.
        tag = "__set__" if isinstance(value, set) else "__frozenset__"
        return {tag: sorted((encode(item, name, tensors) for item in value), key=json.dumps)}
    if isinstance(value, Mapping):
        return _encode_mapping(value, name, tensors)
    raise ValueError(
        f"{name} is a {type(value).__name__}, which checkpoints do not support: they take tensors, numbers, "
        "strings, None, and lists, tuples, sets and dicts of these. Remove it, or implement state_dict() and "
        "load_state_dict()."
    )


def decode(value: Any, tensor: Callable[[str], Tensor]) -> Any:
    """Convert the output of `encode` back to the original value.

    Args:
        value: encoded value.
        tensor: function that returns a tensor for its name.

    Raises:
        ValueError: the value does not come from `encode`.
        TypeError: the value does not come from `encode`: a key or a set item is not hashable.
    """
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    # `_encode_mapping` writes a user's dict that looks like a tag as "__items__", so a tag is never
    # ambiguous.
    mark = next(iter(value), None)
    # A plain dict. Encoded values have exactly one key, a type tag.
    if len(value) != 1 or mark not in _TYPE_TAGS:
        return {key: decode(item, tensor) for key, item in value.items()}
    content = value[mark]
    if mark == "__tensor__":
        return tensor(content)
    if not isinstance(content, list):
        raise ValueError(f"{mark} holds a {type(content).__name__} instead of a list")
    items = [decode(item, tensor) for item in content]
    if mark == "__tuple__":
        return tuple(items)
    if mark == "__set__":
        return set(items)
    if mark == "__frozenset__":
        return frozenset(items)
    if not all(isinstance(item, list) and len(item) == 2 for item in items):
        raise ValueError(f"{mark} holds something other than pairs")
    pairs = {tuple(key) if isinstance(key, list) else key: item for key, item in items}
    return Counter(pairs) if mark == "__counter__" else pairs


def _encode_mapping(value: Mapping[Any, Any], name: str, tensors: dict[str, Tensor]) -> Any:
    """Encode a dict or Counter; see `encode`."""
    counter = isinstance(value, Counter)
    text_keys = all(isinstance(key, str) for key in value)
    # A dict that looks like an encoded tuple or tensor must not be stored as it is: decoding would change it.
    if text_keys and not counter and not (len(value) == 1 and next(iter(value)) in _TYPE_TAGS):
        return {(text := str(key)): encode(item, f"{name}.{text}", tensors) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        key_tensors: dict[str, Tensor] = {}
        encoded_key = encode(key, f"{name} (a key)", key_tensors)
        if key_tensors:
            raise ValueError(
                f"{name} has a tensor as a key, which checkpoints do not support. Use a string key."
            )
        # Name tensors after the decoded key, because a key such as an enum member may print differently.
        pairs.append(
            [encoded_key, encode(item, f"{name}.{decode(encoded_key, key_tensors.__getitem__)}", tensors)]
        )
    return {"__counter__" if counter else "__items__": pairs}


def _to_builtin(value: Any) -> Any:
    """Convert a bool, int, float or str subclass instance to the base type."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    raise AssertionError(value)
