"""Marks on the parameters of a sharded model, by which gradient clipping computes norms over all ranks."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

_SHARD_INFO = "_meshrec_part"  # attribute on a parameter


class ShardInfo(NamedTuple):
    """How a parameter of a sharded model is distributed over ranks.

    Attributes:
        group: Ranks over which the model is sharded.
        is_sharded: True if each rank holds different elements of the parameter, so that squared norms add up
            over ranks. False if every rank holds the same elements (the parameter is replicated).
    """

    group: "dist.ProcessGroup"
    is_sharded: bool


def mark_shard(parameter: Tensor, group: "dist.ProcessGroup", *, is_sharded: bool) -> None:
    """Record on a parameter how it is distributed over ranks, for `shard_info_of`.

    Args:
        parameter: Parameter to mark.
        group: Ranks over which the model is sharded.
        is_sharded: Whether each rank holds different elements; see `ShardInfo`.
    """
    # An attribute on the tensor, because wrappers such as DDP replace modules but keep parameters.
    setattr(parameter, _SHARD_INFO, ShardInfo(group, is_sharded))


def shard_info_of(parameter: Tensor) -> ShardInfo | None:
    """Return what `mark_shard` has recorded on a parameter; None if it was not called for the parameter."""
    info: ShardInfo | None = getattr(parameter, _SHARD_INFO, None)
    return info
