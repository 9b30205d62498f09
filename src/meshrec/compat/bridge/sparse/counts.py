"""Lengths, offsets and numbers of values, in TorchScript's language."""

import torch
from torch import Tensor


def to_offsets(lengths: Tensor) -> Tensor:
    """Return the start of each bag, and the number of values at the end."""
    return torch.cat([lengths.new_zeros(1), torch.cumsum(lengths, 0).to(lengths.dtype)])


def to_lengths(offsets: Tensor) -> Tensor:
    """Return the number of values of each bag."""
    return offsets[1:] - offsets[:-1]


def running_sum(counts: list[int]) -> list[int]:
    """Return 0, and the sums of the first 1, 2, ... counts."""
    sums = [0]
    for count in counts:
        sums.append(sums[-1] + count)
    return sums


def counts_between(offsets: Tensor, bags: list[int], num_values: int) -> list[int]:
    """Return the number of values of each key. ``bags`` has the first bag of each key, and the number of
    bags.
    """
    if offsets.numel() == 0:
        return [0] * (len(bags) - 1)
    if offsets.is_meta:  # nothing to read: as if the first key had what does not divide
        counts = [num_values // (len(bags) - 1)] * (len(bags) - 1)
        counts[0] += num_values % (len(bags) - 1)
        return counts
    ends: list[int] = offsets[torch.tensor(bags, device=offsets.device)].long().tolist()
    return [ends[i + 1] - ends[i] for i in range(len(bags) - 1)]
