"""Conversions between lengths, offsets and counts, in TorchScript's subset."""

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


def counts_between(offsets: Tensor, bags: list[int], num_values: int) -> list[int]:
    """Return the value count per key.

    Args:
        offsets: bag boundaries [B + 1].
        bags: first bag per key, and the total number of bags.
        num_values: total number of values.
    """
    if offsets.numel() == 0:
        return [0] * (len(bags) - 1)
    if offsets.is_meta:  # No values to read: spread them evenly, and give the remainder to the first key.
        counts = [num_values // (len(bags) - 1)] * (len(bags) - 1)
        counts[0] += num_values % (len(bags) - 1)
        return counts
    ends: list[int] = offsets[torch.tensor(bags, device=offsets.device)].long().tolist()
    return [ends[i + 1] - ends[i] for i in range(len(bags) - 1)]
