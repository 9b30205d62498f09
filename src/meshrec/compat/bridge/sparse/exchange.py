"""KeyedJaggedTensor exchange between ranks, in TorchRec's order."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.counts import running_sum, to_offsets
from meshrec.compat.bridge.sparse.rearranging import reordered


def sums_of(counts: list[int], groups: list[int]) -> list[int]:
    """Sum consecutive groups of counts. ``groups`` holds the group sizes."""
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
    """Rearrange received tensors to key-major order.

    Args:
        num_keys: keys on this rank.
        tensors: lengths, values, then strides if ``variable``, then weights if present. Rank-major.
        variable: whether keys have different batch sizes.
        num_workers: number of sending ranks.
        recat: permutation from (rank, key) to (key, rank) order; None: none needed.
        stride_per_rank: batch size per rank; None if ``variable``.
        stagger: number of equal rank blocks that ``recat`` interleaves; 1: rank order.

    Returns:
        Values, weights, lengths, strides per key and rank, and stride.
    """
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
        # Bags per (rank, key) segment, like the tensor that is sent for variable strides.
        bags = torch.tensor(stride_per_rank, device=lengths.device).repeat_interleave(num_keys)
    if recat is not None and bags.numel() > 0:
        ends = to_offsets(lengths)
        edges = to_offsets(bags)
        counts = ends[edges[1:]] - ends[edges[:-1]] if lengths.numel() > 0 else torch.zeros_like(bags)
        values, weights = reordered(recat, counts, values), reordered_or_none(recat, counts, weights)
        lengths = reordered(recat, bags, lengths)
    return values, weights, lengths, strides, stride


def reordered_or_none(order: Tensor, counts: Tensor, rows: Tensor | None) -> Tensor | None:
    """Return ``reordered(order, counts, rows)``; None if ``rows`` is None.

    Args:
        order: segment permutation.
        counts: rows per segment.
        rows: rows, or None.
    """
    return None if rows is None else reordered(order, counts, rows)
