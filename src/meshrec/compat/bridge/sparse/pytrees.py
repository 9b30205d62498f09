"""Pytree registration for the three types, with the tensors as leaves."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.compat.bridge.sparse.jagged import JaggedTensor
from meshrec.compat.bridge.sparse.keyed import KeyedTensor, regrouped
from meshrec.compat.bridge.sparse.keyed_jagged import KeyedJaggedTensor
from meshrec.sparse import pytrees


class KJTContext(NamedTuple):
    """Non-tensor fields of a flattened KeyedJaggedTensor."""

    keys: list[str]
    inverse_keys: list[str] | None
    # Batch size. Only set without keys, because no shape determines it then.
    stride: int | None


class KTContext(NamedTuple):
    """Non-tensor fields of a flattened KeyedTensor."""

    keys: list[str]
    length_per_key: list[int]
    key_dim: int


def _flatten_jagged(jt: JaggedTensor) -> tuple[list[Any], None]:
    return [getattr(jt, name) for name in JaggedTensor._fields], None


def _unflatten_jagged(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor.unchecked(*leaves)


def _flatten_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[list[Any], KJTContext]:
    inverse = kjt._inverse_indices
    leaves = [getattr(kjt, name) for name in KeyedJaggedTensor._fields[:-1]]
    keys = None if inverse is None else inverse[0]
    context = KJTContext(kjt._keys, keys, None if kjt._keys else kjt._stride)
    return [*leaves, None if inverse is None else inverse[1]], context


def _unflatten_keyed_jagged(leaves: Iterable[Any], context: KJTContext) -> KeyedJaggedTensor:
    parts = list(leaves)
    size = len(KeyedJaggedTensor._fields)
    if len(parts) > size:
        raise ValueError(
            f"a KeyedJaggedTensor has {size} parts, got {len(parts)}; give those that it was cut to."
        )
    values, weights, lengths, offsets, strides, inverse = parts + [None] * (size - len(parts))
    return KeyedJaggedTensor.unchecked(
        context.keys,
        values,
        weights,
        lengths,
        offsets,
        stride=context.stride,
        strides=strides,
        inverse_indices=None if inverse is None else (context.inverse_keys or context.keys, inverse),
    )


def _flatten_keyed(kt: KeyedTensor) -> tuple[list[Any], KTContext]:
    return [kt._values], KTContext(kt._keys, kt._length_per_key, kt._key_dim)


def _unflatten_keyed(leaves: Iterable[Any], context: KTContext) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor.unchecked(context.keys, context.length_per_key, values, context.key_dim)


def _flatten_keyed_as(kt: KeyedTensor, spec: pytree.TreeSpec) -> list[Any]:
    # The export fixes a key order; inputs may have another.
    keys = spec.context.keys
    return [kt._values] if keys == kt._keys else regrouped([kt], [keys])


def flatten_kjt_list(kjt_arr: Sequence[KeyedJaggedTensor]) -> tuple[list[Tensor | None], list[KJTContext]]:
    """Return the tensors of all inputs in one list, and a list with the non-tensor fields per input."""
    flat = [_flatten_keyed_jagged(kjt) for kjt in kjt_arr]
    return [leaf for leaves, _ in flat for leaf in leaves], [context for _, context in flat]


def unflatten_kjt_list(
    values: Sequence[Tensor | None], contexts: Sequence[KJTContext]
) -> list[KeyedJaggedTensor]:
    """Return the KeyedJaggedTensors from the two results of ``flatten_kjt_list``."""
    size = len(KeyedJaggedTensor._fields)
    return [
        _unflatten_keyed_jagged(values[i * size : (i + 1) * size], context)
        for i, context in enumerate(contexts)
    ]


# TorchRec's class names, so that exported programs load in either library.
register = functools.partial(pytrees.register, namespace="torchrec.sparse.jagged_tensor")
register(JaggedTensor, JaggedTensor._fields, _flatten_jagged, _unflatten_jagged)
register(
    KeyedJaggedTensor,
    KeyedJaggedTensor._fields,
    _flatten_keyed_jagged,
    _unflatten_keyed_jagged,
    lambda context: KJTContext(*context),
)
register(
    KeyedTensor,
    ["_values"],
    _flatten_keyed,
    _unflatten_keyed,
    lambda context: KTContext(*context),
    flatten_spec=_flatten_keyed_as,
)
