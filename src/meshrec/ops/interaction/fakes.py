"""Output shapes for the interaction operators (fake kernels), for tracing."""

import torch
from torch import Tensor

import meshrec.ops.interaction.naive  # noqa: F401 - the ops must exist before fakes are registered for them


def _fake(dense: Tensor, sparse: Tensor) -> Tensor:
    """Return the result shape of ``dot_interaction``."""
    num_sparse = sparse.shape[1]
    return dense.new_empty(dense.shape[0], dense.shape[1] + num_sparse * (num_sparse + 1) // 2)


def _fake_grad(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the result shapes of ``dot_interaction_grad``."""
    return dense.new_empty(dense.shape), sparse.new_empty(sparse.shape)


for _name, _fake_of in (("dot_interaction", _fake), ("dot_interaction_grad", _fake_grad)):
    torch.library.register_fake(f"meshrec::{_name}", _fake_of)
