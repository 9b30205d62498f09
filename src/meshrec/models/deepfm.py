"""DeepFM: a linear term, a factorization machine and an MLP over the same embeddings.

See Guo et al.: "DeepFM: a factorization-machine based neural network for CTR prediction" (2017).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import DenseArch, OverArch, SparseArch, check_widths
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.linear import LogitLinear
from meshrec.sparse import KeyedJaggedTensor

# B batch, F sparse features, D embedding width


class FMInteractionArch(nn.Module):
    """Factorization machine: adds up the dot products between all pairs of feature vectors.

    Takes O(F D) time, although there are O(F^2) pairs.
    """

    def forward(self, vectors: Tensor) -> Tensor:
        """Return the sum over all pairs, [B, 1].

        Args:
            vectors: Feature vectors, [B, F, D].
        """
        # Per column, (sum of values)^2 - sum of squares counts every pair twice.
        pairs = vectors.sum(1).square() - vectors.square().sum(1)
        return 0.5 * pairs.sum(1, keepdim=True)


class DeepFMModel(nn.Module):
    """DeepFM: adds up three logits, from a linear term, a factorization machine and an MLP.

    All three read the same vectors: an embedding per feature, and a vector with width D for the dense values.
    In the paper, the linear term has a weight per ID. Here it is a linear function of the vectors, which
    needs no additional tables.

    Args:
        embedding_bag_collection: Tables with equal width D.
        dense_in_features: Dense input columns.
        dense_arch_layer_sizes: Layer sizes in the MLP for dense values; the last must be D.
        deep_layer_sizes: Layer sizes in the MLP over all vectors; the last must be 1.
        dense_device: Device for all parameters except the tables.

    Raises:
        ValueError: Table widths differ, or the last layer sizes are not D and 1.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        deep_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        check_widths(self.sparse_arch, dense_arch_layer_sizes)
        if deep_layer_sizes[-1] != 1:
            raise ValueError(f"the last of deep_layer_sizes must be 1, got {list(deep_layer_sizes)}.")
        # All embeddings and the dense vector.
        width = (self.sparse_arch.F + 1) * self.sparse_arch.D
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.linear = LogitLinear(width, 1, device=dense_device)
        self.inter_arch = FMInteractionArch()
        self.over_arch = OverArch(width, deep_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits, [B, 1].

        Args:
            dense_features: Dense values, [B, dense_in_features].
            sparse_features: IDs for all features.
        """
        arch = self.sparse_arch
        # Lookup first, read last: sharded tables exchange embeddings while the dense MLP runs.
        embeddings = arch.embedding_bag_collection(sparse_features)
        dense = self.dense_arch(dense_features).unsqueeze(1)
        vectors = torch.cat([dense, embeddings.values().view(-1, arch.F, arch.D)], dim=1)
        flat = vectors.flatten(1)
        logits: Tensor = self.linear(flat) + self.inter_arch(vectors) + self.over_arch(flat)
        return logits
