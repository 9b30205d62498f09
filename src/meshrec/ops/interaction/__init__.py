"""Pairwise dot products between the vectors of a sample, as in DLRM; see ``naive.py`` for the formula."""

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.interaction import naive

__all__ = ["dot_interaction"]


def dot_interaction(dense: Tensor, sparse: Tensor) -> Tensor:
    """Return the dense vector of each sample, followed by the dot products between all pairs of vectors.

    A sample has 1 + F vectors with D elements: a dense vector and F > 0 sparse vectors. This gives
    F (F + 1) / 2 pairs. Differentiable in both inputs; gradients have the dtype of the input.

    Args:
        dense: dense vectors, [B, D].
        sparse: sparse vectors, [B, F, D].

    Returns:
        [B, D + F (F + 1) / 2], in the dtype of ``dense``. If ``dense`` is bf16, all vectors are rounded to
            bf16, and the CPU kernel adds the products in fp32.

    Example::

        dense, sparse = torch.randn(4, 8), torch.randn(4, 3, 8)
        out = dot_interaction(dense, sparse)
        assert out.shape == (4, 8 + 6)
        assert torch.allclose(out[:, 8], (dense * sparse[:, 0]).sum(1), atol=1e-6)
    """
    if not torch.jit.is_scripting():  # type: ignore
        # No dtype set: TorchScript reads this line too, and does not support sets.
        low = (torch.float32, torch.bfloat16)
        if dense.is_cpu and dense.dtype == torch.float32 and sparse.dtype == torch.bfloat16:
            sparse = sparse.float()
        is_fp32 = dense.dtype == sparse.dtype == torch.float32
        # Tables return fp32: with a bf16 vector, the kernel rounds while it reads, and gives fp32 gradients.
        if is_fp32 or (dense.is_cpu and dense.dtype == torch.bfloat16 and sparse.dtype in low):
            out: Tensor = operators.dot_interaction(dense, sparse)
            return out
    return naive.dot_interaction(dense, sparse)
