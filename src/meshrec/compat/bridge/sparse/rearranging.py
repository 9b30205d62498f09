"""Segment reordering for jagged tensors, in TorchScript's subset."""

import torch
from torch import Tensor

from meshrec.compat.bridge.sparse.counts import to_offsets


def reordered(order: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Permute variable-length segments. Differentiable.

    Args:
        order: segment permutation.
        counts: rows per segment.
        rows: concatenated segments.
    """
    chosen = order.long()
    starts, sizes = to_offsets(counts.long())[:-1][chosen], counts.long()[chosen]
    ends = to_offsets(sizes)
    pieces = torch.arange(sizes.numel(), device=rows.device).repeat_interleave(sizes)
    return rows[starts[pieces] + torch.arange(pieces.numel(), device=rows.device) - ends[pieces]]


def permuted_segments(
    indices: list[int],
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor,
    counts: list[int],
    bags: list[int],
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return values, weights and lengths for the selected keys.

    Args:
        indices: keys to select, in order.
        values: values [N, ...], key-major.
        weights: weight per value, or None.
        lengths: bag lengths, key-major.
        counts: values per key.
        bags: first bag per key, and the total number of bags.
    """
    if len(indices) == 0:
        return values[:0], None if weights is None else weights[:0], lengths[:0]
    sizes: list[int] = []
    for i in range(len(bags) - 1):
        sizes.append(bags[i + 1] - bags[i])
    pieces = torch.split(values, counts)
    parts = torch.split(lengths, sizes)
    moved: Tensor | None = None
    if weights is not None:
        own = torch.split(weights, counts)
        moved = torch.cat([own[i] for i in indices])
    return torch.cat([pieces[i] for i in indices]), moved, torch.cat([parts[i] for i in indices])


def split_bags(
    lengths: Tensor, strides: list[int], variable: bool, compute_offsets: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return lengths and offsets per key.

    Args:
        lengths: bag lengths, key-major.
        strides: bags per key.
        variable: whether keys differ in batch size.
        compute_offsets: whether to compute offsets; otherwise the second list is empty.
    """
    parts = list(torch.split(lengths, strides))
    offsets: list[Tensor] = []
    if not compute_offsets:
        return parts, offsets
    if lengths.is_floating_point():
        return parts, parts  # as in TorchRec: torch.tensor([]), no bags of no type, and not even the 0
    if variable or lengths.numel() == 0:
        for part in parts:
            offsets.append(to_offsets(part))
        return parts, offsets
    # With equal strides, a single cumsum serves all keys.
    table = lengths.view(len(strides), strides[0])
    sums = torch.cumsum(table, 1).to(lengths.dtype)
    return parts, list(torch.cat([torch.zeros_like(sums[:, :1]), sums], 1).unbind(0))
