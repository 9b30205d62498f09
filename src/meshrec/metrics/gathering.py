"""Samples of all ranks."""

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.data.faults import needs


def gathered(columns: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Concatenate columns [k, n] of all ranks, which may have different n; alone, return them as they are."""
    if not (dist.is_available() and dist.is_initialized()):
        return columns
    distributed = needs("torchmetrics.utilities.distributed", "metrics")
    return torch.cat(distributed.gather_all_tensors(columns, group), dim=1)
