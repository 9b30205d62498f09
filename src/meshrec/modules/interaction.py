"""Products of embeddings with each other."""

import torch
from torch import Tensor, nn

from meshrec.ops.interaction import dot_interaction

torch.fx.wrap("dot_interaction")


class DotInteraction(nn.Module):
    """The dense vector, and the dot products of all pairs of vectors (the dense one and F sparse ones).

    Naumov et al.: "Deep learning recommendation model for personalization and recommendation systems" (2019).

    Args:
        num_sparse_features: F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features

    def out_features(self, dim: int) -> int:
        """Columns of the result for vectors of ``dim``."""
        return dim + self.num_sparse_features * (self.num_sparse_features + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Dense [B, D], sparse [B, F, D] -> [B, D + F (F + 1) / 2]."""
        if self.num_sparse_features == 0:
            return dense
        return dot_interaction(dense, sparse)
