"""Splitting a batch by samples, and joining the results of the splits."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

# B samples of the batch, K splits


def num_samples(value: Any) -> int | None:
    """Return the number of samples B of the first value inside ``value`` that has samples; None if there is
    none.
    """
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, KeyedJaggedTensor):
        return value.stride()
    if isinstance(value, JaggedTensor):
        return value.offsets().numel() - 1
    if isinstance(value, KeyedTensor):
        return value.values().shape[1 - value.key_dim()]
    return next((found for part in _parts(value) if (found := num_samples(part)) is not None), None)


def split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the number of samples of each split: equal, except that the last one has the rest. A batch of
    fewer samples is one split.

    Raises:
        ValueError: ``split_size`` is less than 1, or the batch is empty.
    """
    if split_size < 1 or batch < 1:
        raise ValueError(
            f"split_size is {split_size} and the batch has {batch} samples; both must be at least 1. Leave "
            "out empty batches."
        )
    whole, rest = divmod(batch, split_size)
    return [split_size] * whole + ([rest] if rest else [])


def split(value: Any, sizes: Sequence[int], where: str) -> list[Any]:
    """Split ``value`` by samples into splits of ``sizes``. Every split gets whatever has no samples.

    Tensors become views [size, ...] along dimension 0. Nests (tuples, lists, dicts, dataclasses) are split
    leaf by leaf. ``where`` names the value in errors.

    Raises:
        ValueError: the first dimension of a tensor is not the batch.
    """
    if isinstance(value, LazyAwaitable):
        value = value.wait()
    batch = sum(sizes)
    if isinstance(value, KeyedJaggedTensor | JaggedTensor | KeyedTensor) or (
        isinstance(value, Tensor) and value.dim()
    ):
        samples = num_samples(value)
        if samples != batch:
            raise ValueError(
                f"{where} has {samples} samples in its first dimension, but the batch has {batch}. Stages "
                "cut every tensor of a batch by samples: give tensors [batch, ...], or keep what all samples "
                "share in the module, as a buffer."
            )
    if isinstance(value, Tensor):
        return list(value.split(list(sizes))) if value.dim() else [value] * len(sizes)
    if isinstance(value, KeyedJaggedTensor):
        return _split_keyed_jagged(value, sizes)
    if isinstance(value, JaggedTensor):
        return _split_jagged(value, sizes)
    if isinstance(value, KeyedTensor):
        parts = value.values().split(list(sizes), dim=1 - value.key_dim())
        return [KeyedTensor(value.keys(), value.length_per_key(), part, value.key_dim()) for part in parts]
    if (rebuild := _rebuilder(value)) is None:
        return [value] * len(sizes)
    columns = [split(part, sizes, f"{where}{name}") for name, part in zip(*_named_parts(value), strict=True)]
    return [rebuild([column[k] for column in columns]) for k in range(len(sizes))]


def join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of the splits.

    Tensors [size, ...] are concatenated. A tensor without dimensions is taken for a mean over samples, and
    becomes the mean over the batch.

    Raises:
        ValueError: the results are not the same nest of tensors in every split.
    """
    flat, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            f"the splits gave results of different forms, {specs[0]} and others. Give the same nest for each."
        )
    return pytree.tree_unflatten([join_leaves(leaves, sizes) for leaves in zip(*flat, strict=True)], specs[0])


def join_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join one leaf of the results; see `join`."""
    first = leaves[0]
    if not isinstance(first, Tensor):
        if any(other != first for other in leaves):
            raise ValueError(f"the splits gave different values, {first!r} and others; give tensors.")
        return first
    if first.dim() == 0:
        weights = [size / sum(sizes) for size in sizes]
        return torch.stack([leaf * weight for leaf, weight in zip(leaves, weights, strict=True)]).sum()
    return torch.cat(list(leaves))


def _split_keyed_jagged(value: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    if value.variable_stride_per_key():
        raise ValueError(
            f"the keys {value.keys()} have batch sizes of their own, which cannot be cut by samples. Give "
            "every key the same batch size."
        )
    keys, batch = value.keys(), value.stride()
    lengths = value.lengths().view(len(keys), batch)
    bounds = value.offsets()[:-1].view(len(keys), batch)
    ends = value.offsets()
    weights = value.weights_or_none()
    found, start = [], 0
    for size in sizes:
        firsts = bounds[:, start].tolist()
        lasts = [int(ends[key * batch + start + size]) for key in range(len(keys))]
        spans = list(zip(firsts, lasts, strict=True))
        found.append(
            KeyedJaggedTensor(
                keys,
                torch.cat([value.values()[a:b] for a, b in spans]),
                None if weights is None else torch.cat([weights[a:b] for a, b in spans]),
                lengths[:, start : start + size].reshape(-1),
            )
        )
        start += size
    return found


def _split_jagged(value: JaggedTensor, sizes: Sequence[int]) -> list[JaggedTensor]:
    offsets, weights = value.offsets(), value.weights_or_none()
    bounds = list(itertools.accumulate(sizes, initial=0))
    counts = offsets[torch.tensor(bounds)].diff().tolist()
    rows = value.values().split(counts)  # one operation: its backward is one concatenation
    row_weights = [None] * len(sizes) if weights is None else weights.split(counts)
    return [
        JaggedTensor(own, own_weights, offsets=offsets[first : last + 1] - offsets[first])
        for own, own_weights, (first, last) in zip(rows, row_weights, itertools.pairwise(bounds), strict=True)
    ]


def _parts(value: Any) -> list[Any]:
    return _named_parts(value)[1] if _rebuilder(value) is not None else []


def _named_parts(value: Any) -> tuple[list[str], list[Any]]:
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return [f".{name}" for name in names], [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return [f"[{key!r}]" for key in value], list(value.values())
    return [f"[{index}]" for index in range(len(value))], list(value)


def _rebuilder(value: Any) -> Callable[[list[Any]], Any] | None:
    """Return a function that rebuilds a nest like ``value`` from other parts; None for other values."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return lambda parts: type(value)(*parts)
    if isinstance(value, tuple | list):
        return lambda parts: type(value)(parts)
    if isinstance(value, dict):
        return lambda parts: type(value)(zip(value, parts, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return lambda parts: dataclasses.replace(value, **dict(zip(names, parts, strict=True)))
    return None
