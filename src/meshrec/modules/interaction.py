"""Products of embeddings with each other."""

import torch
from torch import Tensor, nn


class DotInteraction(nn.Module):
    """The dense vector, and the dot products of all pairs of vectors (the dense one and F sparse ones).

    Naumov et al.: "Deep learning recommendation model for personalization and recommendation systems" (2019).

    Args:
        num_sparse_features: F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.num_sparse_features = num_sparse_features
        num_vectors = num_sparse_features + 1
        rows, columns = torch.triu_indices(num_vectors, num_vectors, offset=1)
        self.register_buffer("_pairs", rows * num_vectors + columns, persistent=False)

    def out_features(self, dim: int) -> int:
        """Columns of the result for vectors of ``dim``."""
        return dim + self.num_sparse_features * (self.num_sparse_features + 1) // 2

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        """Dense [B, D], sparse [B, F, D] -> [B, D + F (F + 1) / 2]."""
        if self.num_sparse_features == 0:
            return dense
        vectors = torch.cat([dense.unsqueeze(1), sparse], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1)
        return torch.cat([dense, products.index_select(1, self._pairs)], dim=1)  # type: ignore[arg-type]
