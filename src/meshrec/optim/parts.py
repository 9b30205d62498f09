"""Marks on parameters that are parts of larger ones, for norms over the whole."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

_PART = "_meshrec_part"


class ParameterPart(NamedTuple):
    """A parameter's place in a split model.

    Attributes:
        group: the ranks among which the model is split.
        counts: whether every rank has other elements, so that norms add up over ranks. Otherwise all ranks
            have the same.
    """

    group: "dist.ProcessGroup"
    counts: bool


def mark_part(parameter: Tensor, group: "dist.ProcessGroup", *, counts: bool) -> None:
    """Record on a parameter of a split model what it is a part of."""
    setattr(parameter, _PART, ParameterPart(group, counts))


def part_of(parameter: Tensor) -> ParameterPart | None:
    """Return what `mark_part` recorded; None if it recorded nothing."""
    part: ParameterPart | None = getattr(parameter, _PART, None)
    return part
