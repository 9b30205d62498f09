"""Pytree registration of the sparse types, for torch.compile and torch.export.

The leaves are the constructor's tensors, not tensors cached later. A program exported
with an input therefore accepts any input constructed in the same way. Batch sizes appear only in the
shapes of leaves, never in the context, so that an exported program serves other batch sizes.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.fx import _pytree as fx_pytree
from torch.utils import _pytree as pytree

from meshrec.sparse.jagged_tensor import Jagged, JaggedTensor
from meshrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from meshrec.sparse.keyed_tensor import KeyedTensor

T = TypeVar("T")


class KeyedContext(NamedTuple):
    """Pytree context of a KeyedJaggedTensor: the non-tensor constructor arguments."""

    keys: tuple[str, ...]
    stride: int | None  # set only without keys, when no leaf shape gives the batch size
    inverse_keys: tuple[str, ...] | None


class DenseContext(NamedTuple):
    """Pytree context of a KeyedTensor: the non-tensor constructor arguments."""

    keys: tuple[str, ...]
    length_per_key: tuple[int, ...]
    key_dim: int


def _bag_leaves(jagged: Jagged) -> list[Tensor | None]:
    """Return values, weights, lengths, offsets. Lengths or offsets are None if not given at construction."""
    # None leaves keep the leaf count constant, so that both forms share a registration.
    if jagged._by_offsets:
        return [jagged._values, jagged._weights, None, jagged._offsets]
    return [jagged._values, jagged._weights, jagged._lengths, None]


def _flatten_jagged(jt: JaggedTensor) -> tuple[list[Any], None]:
    """Return the leaves of a JaggedTensor, which needs no context."""
    return _bag_leaves(jt), None


def _unflatten_jagged(leaves: Iterable[Any], context: None) -> JaggedTensor:
    return JaggedTensor.unchecked(*leaves)


def _flatten_keyed_jagged(kjt: KeyedJaggedTensor) -> tuple[list[Any], KeyedContext]:
    strides, inverse = kjt._strides, kjt._inverse_indices
    # A leaf, not context: batch sizes in the context would make torch.compile recompile for every batch.
    if isinstance(strides, list):
        strides = torch.tensor(strides, dtype=torch.int64).view(len(kjt._keys), -1)
    return [*_bag_leaves(kjt), strides, None if inverse is None else inverse[1]], KeyedContext(
        tuple(kjt._keys),
        None if kjt._keys else kjt.stride(),
        None if inverse is None else tuple(inverse[0]),
    )


def _unflatten_keyed_jagged(leaves: Iterable[Any], context: KeyedContext) -> KeyedJaggedTensor:
    # In the order of _KEYED below.
    values, weights, lengths, offsets, strides, inverse = leaves
    # Unchecked, because tracing rebuilds tensors from placeholder leaves.
    return KeyedJaggedTensor.unchecked(
        list(context.keys),
        values,
        weights,
        lengths,
        offsets,
        stride=context.stride,
        strides=strides,
        inverse_indices=None if context.inverse_keys is None else (list(context.inverse_keys), inverse),
    )


def _flatten_keyed(kt: KeyedTensor) -> tuple[list[Any], DenseContext]:
    """Return the values as the only leaf of a KeyedTensor, and the context."""
    return [kt._values], DenseContext(tuple(kt._keys), tuple(kt._length_per_key), kt._key_dim)


def _unflatten_keyed(leaves: Iterable[Any], context: DenseContext) -> KeyedTensor:
    (values,) = leaves
    return KeyedTensor.unchecked(list(context.keys), list(context.length_per_key), values, context.key_dim)


def _keyed_context(dumped: Any) -> KeyedContext:
    """Rebuild the context from its JSON form, in which tuples became lists."""
    keys, stride, inverse_keys = dumped
    return KeyedContext(tuple(keys), stride, None if inverse_keys is None else tuple(inverse_keys))


def _dense_context(dumped: Any) -> DenseContext:
    """Rebuild the context from its JSON form, in which tuples became lists."""
    keys, length_per_key, key_dim = dumped
    return DenseContext(tuple(keys), tuple(length_per_key), key_dim)


def register(
    cls: type[T],
    leaf_names: Sequence[str],
    flatten: Callable[[T], tuple[list[Any], Any]],
    unflatten: Callable[[Iterable[Any], Any], T],
    from_dumpable: Callable[[Any], Any] | None = None,
    *,
    namespace: str = "meshrec",
    flatten_spec: Callable[[T, pytree.TreeSpec], list[Any]] | None = None,
) -> None:
    """Register a class so that torch.compile, torch.export, FX and torch.load accept its objects.

    Args:
        cls: Class to register.
        leaf_names: Attribute name per leaf, in the order of ``flatten``.
        flatten: Maps an object to (leaves, context).
        unflatten: Maps (leaves, context) to an object.
        from_dumpable: Maps the context as loaded from JSON to the context; None without a context.
        namespace: Class name prefix in exported programs.
        flatten_spec: Maps an object and the spec of an FX graph to leaves; None: as ``flatten``.
    """

    def flatten_with_keys(tensor: T) -> tuple[list[tuple[pytree.KeyEntry, Any]], Any]:
        """Return the leaves with their attribute names, and the context."""
        leaves, context = flatten(tensor)
        # Leaf paths such as ``.values``, for torch.export.
        return list(zip(map(pytree.GetAttrKey, leaf_names), leaves, strict=True)), context

    # The context goes through JSON, which has no tuples: hence lists.
    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"{namespace}.{cls.__name__}",
        to_dumpable_context=None if from_dumpable is None else list,
        from_dumpable_context=from_dumpable,
        flatten_with_keys_fn=flatten_with_keys,
    )
    # FX graph modules flatten their inputs through a registry separate from torch.utils._pytree.
    fx_pytree.register_pytree_flatten_spec(cls, flatten_spec or (lambda tensor, _: flatten(tensor)[0]))
    torch.serialization.add_safe_globals([cls])  # an exported program carries its example inputs


_JAGGED = ["values", "weights", "lengths", "offsets"]
_KEYED = [*_JAGGED, "stride_per_key_per_rank", "inverse_indices"]
register(JaggedTensor, _JAGGED, _flatten_jagged, _unflatten_jagged)
register(KeyedJaggedTensor, _KEYED, _flatten_keyed_jagged, _unflatten_keyed_jagged, _keyed_context)
register(KeyedTensor, ["values"], _flatten_keyed, _unflatten_keyed, _dense_context)
