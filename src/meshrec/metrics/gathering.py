"""Samples of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor, nn


def gathered(columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate columns [k, n] of all ranks, which may have different n; alone, return them as they are."""
    if not (dist.is_available() and dist.is_initialized()):
        return columns
    ranks, own = dist.get_world_size(group), columns.size(1)
    sizes = torch.empty(ranks, dtype=torch.int64, device=columns.device)
    dist.all_gather_into_tensor(sizes, torch.full_like(sizes[:1], own), group)
    padded = nn.functional.pad(columns, (0, int(sizes.max()) - own))
    found = padded.new_empty(ranks * len(padded), padded.size(1))
    dist.all_gather_into_tensor(found, padded, group)
    return torch.cat([part[:, :n] for part, n in zip(found.chunk(ranks), sizes.tolist(), strict=True)], dim=1)
