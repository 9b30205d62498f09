"""Interactions between embeddings."""

import torch
from torch import Tensor, nn

from meshrec.ops.interaction import dot_interaction

torch.fx.wrap("dot_interaction")


class DotInteraction(nn.Module):
    """The dense vector, followed by the dot products of all pairs among it and F sparse vectors.

    Naumov et al.: "Deep learning recommendation model for personalization and recommendation systems" (2019).

    Args:
        num_sparse_features: number of sparse vectors F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features

    def out_features(self, dim: int) -> int:
        """Return the number of output columns for vectors of width ``dim``."""
        return dim + self.num_sparse_features * (self.num_sparse_features + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Combine dense [B, D] and sparse [B, F, D] into [B, D + F (F + 1) / 2]."""
        if self.num_sparse_features == 0:
            return dense
        return dot_interaction(dense, sparse)
