"""Interactions between embeddings."""

import torch
from torch import Tensor, nn

from meshrec.ops.interaction import dot_interaction

# Traced as a single node: it dispatches on the device.
torch.fx.wrap("dot_interaction")


class DotInteraction(nn.Module):
    """DLRM interaction: a dense vector, followed by pairwise dot products.

    The pairs are all pairs among the dense vector and F sparse vectors (embeddings).

    Source: Naumov et al., "Deep learning recommendation model for personalization and recommendation systems"
    (2019).

    Args:
        num_sparse_features: Sparse vector count F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features

    def out_features(self, dim: int) -> int:
        """Return the number of output columns for vectors of width ``dim``."""
        return dim + self.num_sparse_features * (self.num_sparse_features + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Map dense [B, D] and sparse [B, F, D] to [B, D + F (F + 1) / 2]."""
        if self.num_sparse_features == 0:
            return dense
        return dot_interaction(dense, sparse)
