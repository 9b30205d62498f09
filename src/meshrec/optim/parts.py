"""Marks on the parameters of a sharded model, from which gradient norms over all ranks are computed."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

_SHARD_INFO = "_meshrec_part"  # attribute on a parameter


class ShardInfo(NamedTuple):
    """How a parameter of a sharded model is distributed.

    Attributes:
        group: Ranks over which the model is sharded.
        is_sharded: True if each rank holds different elements, so that squared norms add up over ranks. False
            if the parameter is replicated.
    """

    group: "dist.ProcessGroup"
    is_sharded: bool


def mark_shard(parameter: Tensor, group: "dist.ProcessGroup", *, is_sharded: bool) -> None:
    """Record how a parameter of a sharded model is distributed.

    Args:
        parameter: Parameter to mark.
        group: Ranks over which the model is sharded.
        is_sharded: Whether each rank holds different elements; see `ShardInfo`.
    """
    # An attribute on the tensor, because wrappers such as DDP replace modules but keep parameters.
    setattr(parameter, _SHARD_INFO, ShardInfo(group, is_sharded))


def shard_info_of(parameter: Tensor) -> ShardInfo | None:
    """Return the information recorded by `mark_shard`, or None."""
    info: ShardInfo | None = getattr(parameter, _SHARD_INFO, None)
    return info
