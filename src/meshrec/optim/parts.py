"""Which parameters are parts of something larger, for norms over all of it."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

_PART = "_meshrec_part"


class ParameterPart(NamedTuple):
    """``group``: the ranks among which a model is split. ``counts``: whether every rank has other elements,
    so that norms add up over the ranks; otherwise all have the same ones.
    """

    group: "dist.ProcessGroup"
    counts: bool


def mark_part(parameter: Tensor, group: "dist.ProcessGroup", *, counts: bool) -> None:
    """Records on a parameter of a split model what it is a part of."""
    setattr(parameter, _PART, ParameterPart(group, counts))


def part_of(parameter: Tensor) -> ParameterPart | None:
    """What ``mark_part`` recorded."""
    part: ParameterPart | None = getattr(parameter, _PART, None)
    return part
