"""The parts of a KeyedJaggedTensor that ranks send each other, in TorchRec's order."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.counts import running_sum, to_offsets
from meshrec.compat.bridge.sparse.rearranging import reordered


def sums_of(counts: list[int], groups: list[int]) -> list[int]:
    """Return the sums of the first ``groups[0]`` counts, of the next ``groups[1]``, and so on."""
    ends = running_sum(counts)
    sums: list[int] = []
    first = 0
    for size in groups:
        sums.append(ends[first + size] - ends[first])
        first += size
    return sums


def received(
    num_keys: int,
    tensors: list[Tensor],
    variable: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, int | None]:
    """Return values, weights, lengths, strides per key and rank, and stride, key by key."""
    lengths, values = tensors[0], tensors[1]
    has_weights = len(tensors) > (3 if variable else 2)
    weights: Tensor | None = tensors[-1] if has_weights else None
    strides: Tensor | None = None
    stride: int | None = None
    if variable:
        bags = tensors[2]
        strides = bags.view(num_workers, num_keys).t().cpu()
        if stagger > 1:
            strides = strides[:, torch.arange(num_workers).view(stagger, -1).t().reshape(-1)]
    else:
        assert stride_per_rank is not None
        stride = sum(stride_per_rank)
        bags = torch.tensor(stride_per_rank, device=lengths.device).repeat_interleave(num_keys)
    if recat is not None and bags.numel() > 0:
        ends = to_offsets(lengths)
        edges = to_offsets(bags)
        counts = ends[edges[1:]] - ends[edges[:-1]] if lengths.numel() > 0 else torch.zeros_like(bags)
        values, weights = reordered(recat, counts, values), reordered_or_none(recat, counts, weights)
        lengths = reordered(recat, bags, lengths)
    return values, weights, lengths, strides, stride


def reordered_or_none(order: Tensor, counts: Tensor, rows: Tensor | None) -> Tensor | None:
    """Return ``reordered``, or None for None."""
    return None if rows is None else reordered(order, counts, rows)
