"""``torch.ops.meshrec.dot_interaction``: how vectors of a sample agree with each other; see ``naive.py``."""

from typing import Any

import torch
from torch import Tensor

from meshrec.ops.interaction import naive
from meshrec.ops.library import implement

__all__ = ["dot_interaction"]


def dot_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Dense [B, D], sparse [B, F, D], F > 0 -> [B, D + F (F + 1) / 2], differentiable in both."""
    if not torch.jit.is_scripting():  # type: ignore
        if dense.dtype == sparse.dtype == torch.float32:
            out: Tensor = torch.ops.meshrec.dot_interaction.default(dense, sparse)
            return out
    return naive.dot_interaction(dense, sparse)


def _fake(dense: Tensor, sparse: Tensor) -> Tensor:
    num_sparse = sparse.shape[1]
    return dense.new_empty(dense.shape[0], dense.shape[1] + num_sparse * (num_sparse + 1) // 2)


def _fake_grad(grad: Tensor, dense: Tensor, sparse: Tensor) -> tuple[Tensor, Tensor]:
    return dense.new_empty(dense.shape), sparse.new_empty(sparse.shape)


def _context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    of_dense, of_sparse = torch.ops.meshrec.dot_interaction_grad.default(grad, *ctx.saved_tensors)
    return of_dense, of_sparse


implement([naive.dot_interaction, naive.dot_interaction_grad])
for _name, _fake_of in (("dot_interaction", _fake), ("dot_interaction_grad", _fake_grad)):
    torch.library.register_fake(f"meshrec::{_name}", _fake_of)
torch.library.register_autograd("meshrec::dot_interaction", _backward, setup_context=_context)
