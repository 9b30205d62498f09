"""Divide a batch into splits (microbatches) by samples, and join the results of all splits."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from meshrec.distributed.awaitable import LazyAwaitable
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor


def num_samples(value: Any) -> int | None:
    """Return the sample count in ``value``, from the first tensor in it; None if it contains no tensor.

    A dense tensor has samples along dimension 0. Tensors without dimensions are skipped.
    """
    if isinstance(value, Tensor):
        return value.shape[0] if value.dim() else None
    if isinstance(value, KeyedJaggedTensor):
        return value.stride()
    if isinstance(value, JaggedTensor):
        return value.offsets().numel() - 1
    if isinstance(value, KeyedTensor):
        # Keys are concatenated along one dimension, and samples are along the other.
        return value.values().shape[1 - value.key_dim()]
    return next((count for part in _parts(value) if (count := num_samples(part)) is not None), None)


def batch_size(args: Sequence[Any], kwargs: Mapping[str, Any]) -> int:
    """Return the sample count in a batch, given as a model's arguments.

    Raises:
        ValueError: the arguments contain no tensor with samples.
    """
    batch = num_samples([args, kwargs])
    if batch is None:
        raise ValueError("the batch has no tensor with samples in its first dimension. Pass at least one.")
    return batch


def split_sizes(batch: int, split_size: int) -> list[int]:
    """Return the sample count in every split (microbatch). For example, ``split_sizes(10, 4)`` is [4, 4, 2].

    Raises:
        ValueError: ``split_size`` is below 1, or the batch is empty.
    """
    if split_size < 1 or batch < 1:
        raise ValueError(
            f"split_size is {split_size} and the batch has {batch} samples; both must be at least 1. Leave "
            "out empty batches."
        )
    whole, remainder = divmod(batch, split_size)
    return [split_size] * whole + ([remainder] if remainder else [])


def split(value: Any, sizes: Sequence[int], where: str) -> list[Any]:
    """Divide a value for the whole batch by samples, and return a value for every split (microbatch).

    Tensors become views [size, ...] along dimension 0. Tuples, lists, dicts and dataclasses are split item by
    item. Values without samples, such as Python scalars and 0-d tensors, are repeated in every split.

    Args:
        value: tensor, jagged tensor, or nested container for the whole batch.
        sizes: samples in every split.
        where: name for the value in error messages.

    Raises:
        ValueError: a tensor has another number of samples than ``sizes`` in total.
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
                "split every tensor of a batch by samples: pass tensors [batch, ...], or store shared values "
                "in the module, as a buffer."
            )
    if isinstance(value, Tensor):
        return list(value.split(list(sizes))) if value.dim() else [value] * len(sizes)
    if isinstance(value, KeyedJaggedTensor):
        return _split_keyed_jagged(value, sizes)
    if isinstance(value, JaggedTensor):
        return _split_jagged(value, sizes)
    if isinstance(value, KeyedTensor):
        # A KeyedTensor has the samples in the other dimension than the keys.
        parts = value.values().split(list(sizes), dim=1 - value.key_dim())
        return [KeyedTensor(value.keys(), value.length_per_key(), part, value.key_dim()) for part in parts]
    # Not a container: a value shared by all samples.
    if (rebuild := _rebuilder(value)) is None:
        return [value] * len(sizes)
    # Every item, split. Transposed below to a container per split.
    columns = [split(part, sizes, f"{where}{name}") for name, part in zip(*_named_parts(value), strict=True)]
    return [rebuild([column[k] for column in columns]) for k in range(len(sizes))]


def join(values: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of all splits (microbatches) into a result for the whole batch. Inverts `split`.

    Tensors [size, ...] are concatenated along dimension 0. A 0-d tensor is taken for a mean over samples, and
    the result is the mean over the whole batch. Other leaves must be equal in all splits.

    Raises:
        ValueError: the results have different structures, or leaves other than tensors differ.
    """
    flat, specs = zip(*(pytree.tree_flatten(value) for value in values), strict=True)
    # Leaves are joined by position, so all splits must have the same structure.
    if any(spec != specs[0] for spec in specs):
        raise ValueError(
            f"the splits returned different nests, {specs[0]} and others. Return the same nest for all."
        )
    return pytree.tree_unflatten([join_leaves(leaves, sizes) for leaves in zip(*flat, strict=True)], specs[0])


def join_leaves(leaves: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the values which a leaf of the results has in all splits (microbatches); see `join`.

    Raises:
        ValueError: the values are not tensors, and differ.
    """
    first = leaves[0]
    if not isinstance(first, Tensor):
        if any(other != first for other in leaves):
            raise ValueError(f"the splits returned different values, {first!r} and others; return tensors.")
        return first
    if first.dim() == 0:
        # The mean over the batch is the mean over splits weighted by their sizes.
        weights = [size / sum(sizes) for size in sizes]
        return torch.stack([leaf * weight for leaf, weight in zip(leaves, weights, strict=True)]).sum()
    return torch.cat(list(leaves))


def _split_keyed_jagged(value: KeyedJaggedTensor, sizes: Sequence[int]) -> list[KeyedJaggedTensor]:
    """Divide a KeyedJaggedTensor by samples; see `split`. All keys must have the same number of bags."""
    # Values are stored key by key, so a split takes a contiguous span from every key.
    if value.variable_stride_per_key():
        raise ValueError(
            f"the keys {value.keys()} have different batch sizes, which cannot be split by samples. Give "
            "every key the same batch size."
        )
    keys, batch = value.keys(), value.stride()
    lengths = value.lengths().view(len(keys), batch)
    # Start of every bag in ``values``, [keys, batch].
    bounds = value.offsets()[:-1].view(len(keys), batch)
    ends = value.offsets()
    weights = value.weights_or_none()
    splits, start = [], 0
    for size in sizes:
        firsts = bounds[:, start].tolist()
        lasts = [int(ends[key * batch + start + size]) for key in range(len(keys))]
        spans = list(zip(firsts, lasts, strict=True))
        splits.append(
            KeyedJaggedTensor(
                keys,
                torch.cat([value.values()[a:b] for a, b in spans]),
                None if weights is None else torch.cat([weights[a:b] for a, b in spans]),
                lengths[:, start : start + size].reshape(-1),
            )
        )
        start += size
    return splits


def _split_jagged(value: JaggedTensor, sizes: Sequence[int]) -> list[JaggedTensor]:
    """Divide a JaggedTensor by samples; see `split`."""
    offsets, weights = value.offsets(), value.weights_or_none()
    # First sample of every split, and the batch size.
    bounds = list(itertools.accumulate(sizes, initial=0))
    # Number of rows in every split.
    counts = offsets[torch.tensor(bounds)].diff().tolist()
    rows = value.values().split(counts)  # a single operation, so the backward is a single concatenation
    row_weights = [None] * len(sizes) if weights is None else weights.split(counts)
    return [
        JaggedTensor(split_rows, split_weights, offsets=offsets[first : last + 1] - offsets[first])
        for split_rows, split_weights, (first, last) in zip(
            rows, row_weights, itertools.pairwise(bounds), strict=True
        )
    ]


def _parts(value: Any) -> list[Any]:
    """Return the items in a container (tuple, list, dict or dataclass); an empty list for other values."""
    return _named_parts(value)[1] if _rebuilder(value) is not None else []


def _named_parts(value: Any) -> tuple[list[str], list[Any]]:
    """Return the names and the items of a container. A name is a suffix for errors: ".x" or "[0]"."""
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return [f".{name}" for name in names], [getattr(value, name) for name in names]
    if isinstance(value, dict):
        return [f"[{key!r}]" for key in value], list(value.values())
    return [f"[{index}]" for index in range(len(value))], list(value)


def _rebuilder(value: Any) -> Callable[[list[Any]], Any] | None:
    """Return a function which builds a container like ``value`` from a list of items.

    The result is None if ``value`` is not a container.
    """
    # Not by pytree, for which dataclasses are leaves.
    # Named tuples take their items as separate arguments.
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
