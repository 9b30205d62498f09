"""``torch.ops.meshrec.dot_interaction``: the dot products of a sample's vectors; see ``naive.py``."""

import torch
from torch import Tensor

from meshrec.ops.interaction import (
    autograd,  # noqa: F401 - registers the gradient
    fakes,  # noqa: F401 - registers the shapes
    naive,
)

__all__ = ["dot_interaction"]


def dot_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Map dense [B, D] and sparse [B, F, D], F > 0, to [B, D + F (F + 1) / 2]; differentiable in both."""
    if not torch.jit.is_scripting():  # type: ignore
        if dense.dtype == sparse.dtype == torch.float32:
            out: Tensor = torch.ops.meshrec.dot_interaction.default(dense, sparse)
            return out
    return naive.dot_interaction(dense, sparse)
