"""Lengths, offsets and segments of jagged tensors, in TorchScript's subset."""

import torch
from torch import Tensor


def to_offsets(lengths: Tensor) -> Tensor:
    """Convert lengths [B] to offsets [B + 1]."""
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0).to(lengths.dtype)])


def to_lengths(offsets: Tensor) -> Tensor:
    """Convert offsets [B + 1] to lengths [B]."""
    return offsets[1:] - offsets[:-1]


def running_sum(counts: list[int]) -> list[int]:
    """Return prefix sums, starting with 0."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def positions_of(keys: list[str]) -> dict[str, int]:
    positions: dict[str, int] = {}
    for i, key in enumerate(keys):
        positions[key] = i
    return positions


def value_counts_per_key(offsets: Tensor, bags: list[int], num_values: int) -> list[int]:
    """Return the value count per key.

    Args:
        offsets: bag boundaries [B + 1].
        bags: index of every key's first bag, followed by the number of bags.
    """
    if offsets.numel() == 0:
        return [0] * (len(bags) - 1)
    if offsets.is_meta:  # No values to read: spread them evenly, and give the remainder to the first key.
        counts = [num_values // (len(bags) - 1)] * (len(bags) - 1)
        counts[0] += num_values % (len(bags) - 1)
        return counts
    # A single transfer to the host for all keys.
    ends: list[int] = offsets[torch.tensor(bags, device=offsets.device)].long().tolist()
    return [ends[i + 1] - ends[i] for i in range(len(bags) - 1)]


def sums_of(counts: list[int], groups: list[int]) -> list[int]:
    """Sum consecutive groups of counts. ``groups`` holds the group sizes."""
    ends = running_sum(counts)
    sums: list[int] = []
    first = 0
    for size in groups:
        sums.append(ends[first + size] - ends[first])
        first += size
    return sums


def reordered(order: Tensor, counts: Tensor, rows: Tensor) -> Tensor:
    """Permute variable-length segments. Differentiable.

    Args:
        order: segment permutation.
        counts: rows per segment.
        rows: concatenated segments.
    """
    segments = order.long()
    starts, sizes = to_offsets(counts.long())[:-1][segments], counts.long()[segments]
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
        values: values [N, ...], key-major.
        weights: weight per value, or None.
        bags: index of every key's first bag, followed by the number of bags.
    """
    if len(indices) == 0:
        return values[:0], None if weights is None else weights[:0], lengths[:0]
    sizes: list[int] = []
    for i in range(len(bags) - 1):
        sizes.append(bags[i + 1] - bags[i])
    value_pieces, length_pieces = torch.split(values, counts), torch.split(lengths, sizes)
    if weights is not None:
        weight_pieces = torch.split(weights, counts)
        weights = torch.cat([weight_pieces[i] for i in indices])
    return (
        torch.cat([value_pieces[i] for i in indices]),
        weights,
        torch.cat([length_pieces[i] for i in indices]),
    )


def split_by_key(
    lengths: Tensor, strides: list[int], variable: bool, compute_offsets: bool
) -> tuple[list[Tensor], list[Tensor]]:
    """Return lengths and offsets per key.

    Args:
        compute_offsets: whether to compute offsets; otherwise the second list is empty.
    """
    parts = list(torch.split(lengths, strides))
    offsets: list[Tensor] = []
    if not compute_offsets:
        return parts, offsets
    # Lengths of torch.tensor([]), without bags, are floats. As in TorchRec, offsets then lack the leading 0.
    if lengths.is_floating_point():
        return parts, parts
    if variable or lengths.numel() == 0:
        for part in parts:
            offsets.append(to_offsets(part))
        return parts, offsets
    # With equal strides, a single cumsum serves all keys.
    table = lengths.view(len(strides), strides[0])
    sums = torch.cumsum(table, 1).to(lengths.dtype)
    return parts, list(torch.cat([torch.zeros_like(sums[:, :1]), sums], 1).unbind(0))


def received(
    num_keys: int,
    tensors: list[Tensor],
    variable: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None, int | None]:
    """Rearrange the tensors received from all ranks, from rank-major to key-major order.

    Args:
        tensors: lengths, values, then strides if ``variable``, then weights if present. Rank-major.
        recat: permutation from (rank, key) to (key, rank) order; None: none needed.
        stride_per_rank: batch size per rank; None if ``variable``.
        stagger: number of equal rank blocks. ``recat`` takes the first rank in every block, then the second
            ranks, and so on. 1: rank order.

    Returns:
        A tuple of five.

        - Values, key-major.
        - Weight per value; None without weights.
        - Bag lengths, key-major.
        - Batch sizes [num_keys, num_workers] if ``variable``, else None.
        - Batch size over all ranks if not ``variable``, else None.
    """
    lengths, values = tensors[0], tensors[1]
    # Weights come last, and strides only exist for variable batch sizes.
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
        # Values per (rank, key) segment.
        counts = ends[edges[1:]] - ends[edges[:-1]] if lengths.numel() > 0 else torch.zeros_like(bags)
        values = reordered(recat, counts, values)
        if weights is not None:
            weights = reordered(recat, counts, weights)
        lengths = reordered(recat, bags, lengths)
    return values, weights, lengths, strides, stride
