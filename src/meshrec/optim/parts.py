"""Marks on sharded parameters, for gradient norms over the whole model."""

from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

_PART = "_meshrec_part"


class ParameterPart(NamedTuple):
    """Role of a parameter in a sharded model.

    Attributes:
        group: Ranks over which the model is sharded.
        counts: True if every rank holds different elements, so that norms add up over ranks. False if the
            parameter is replicated.
    """

    group: "dist.ProcessGroup"
    counts: bool


def mark_part(parameter: Tensor, group: "dist.ProcessGroup", *, counts: bool) -> None:
    """Mark a parameter of a sharded model.

    Args:
        parameter: Parameter to mark.
        group: Ranks over which the model is sharded.
        counts: Whether every rank holds different elements; see `ParameterPart`.
    """
    # An attribute on the tensor, because wrappers such as DDP replace modules but keep parameters.
    setattr(parameter, _PART, ParameterPart(group, counts))


def part_of(parameter: Tensor) -> ParameterPart | None:
    """Return the mark set by `mark_part`, or None."""
    part: ParameterPart | None = getattr(parameter, _PART, None)
    return part
