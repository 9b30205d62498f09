"""DLRM and DLRM-DCN, from parts that can be recombined.

Naumov et al.: "Deep learning recommendation model for personalization and recommendation systems" (2019);
with a cross network in place of dot products: Wang et al.: "DCN V2" (2021), as in the MLPerf training
benchmark.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.crossnet import LowRankCrossNet
from meshrec.modules.interaction import DotInteraction
from meshrec.modules.mlp import MLP
from meshrec.sparse import KeyedJaggedTensor

# B batch, F sparse features, D embedding width


class ClickBatch(Protocol):
    """The fields of a batch that DLRMTrain reads."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class TrainOutputs(NamedTuple):
    """Detached values for metrics: the loss, logits [B] and labels [B]."""

    loss: Tensor
    logits: Tensor
    labels: Tensor


class SparseArch(nn.Module):
    """Embeddings of all features, which must have one width.

    Raises:
        ValueError: the tables differ in width.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = {config.embedding_dim for config in configs}
        if len(dims) != 1:
            raise ValueError(
                f"DLRM needs one embedding_dim for all tables, got {sorted(dims)} in "
                f"{[config.name for config in configs]}. Give all tables the same width."
            )
        self.D: int = dims.pop()
        self.F: int = sum(len(config.feature_names) for config in configs)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Look up the pooled embeddings, [B, F, D]."""
        values: Tensor = self.embedding_bag_collection(features).values()
        return values.view(-1, self.F, self.D)


class DenseArch(nn.Module):
    """An MLP over the dense features."""

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # Without dense values the first layer has no inputs, only a bias, and torch warns of it.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """Map dense features [B, in_features] to [B, layer_sizes[-1]]."""
        out: Tensor = self.model(features)
        return out


class InteractionArch(nn.Module):
    """Dot products of all pairs of features."""

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.model = DotInteraction(num_sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Join dense [B, D] and sparse [B, F, D] vectors into [B, D + F (F + 1) / 2]."""
        out: Tensor = self.model(dense_features, sparse_features)
        return out


class InteractionDCNArch(nn.Module):
    """A cross network over the concatenated vectors of all features."""

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Join dense [B, D] and sparse [B, F, D] vectors into [B, (F + 1) D]."""
        out: Tensor = self.crossnet(torch.cat([dense_features, sparse_features.flatten(1)], dim=1))
        return out


class OverArch(nn.Module):
    """An MLP whose last layer is linear."""

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(f"over_arch_layer_sizes needs 2 sizes or more, got {list(layer_sizes)}.")
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device=device),
            nn.Linear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, in_features] to [B, layer_sizes[-1]]."""
        out: Tensor = self.model(features)
        return out


class DLRM(nn.Module):
    """DLRM: embeddings and a dense vector, the dot products of all pairs, and an MLP over the result.

    Args:
        embedding_bag_collection: the tables, all of one width D.
        dense_in_features: number of columns of the dense input.
        dense_arch_layer_sizes: layer sizes of the MLP over the dense input; the last size must be D.
        over_arch_layer_sizes: layer sizes of the final MLP; the last size is the number of logits.
        dense_device: device of the dense parameters.

    Raises:
        ValueError: the tables differ in width, or the layer sizes do not fit them.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        check_widths(self.sparse_arch, dense_arch_layer_sizes)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        self.inter_arch = InteractionArch(self.sparse_arch.F)
        over_in = self.inter_arch.model.out_features(self.sparse_arch.D)
        self.over_arch = OverArch(over_in, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, over_arch_layer_sizes[-1]] for dense values [B, dense_in_features] and IDs."""
        # The embeddings are asked for first and read last: sharded tables send them while the dense MLP runs.
        embeddings = self.sparse_arch.embedding_bag_collection(sparse_features)
        dense = self.dense_arch(dense_features)
        sparse = embeddings.values().view(-1, self.sparse_arch.F, self.sparse_arch.D)
        out: Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return out


class DLRM_DCN(nn.Module):
    """DLRM with a low-rank cross network in place of the dot products.

    Args:
        dcn_num_layers: number of cross layers.
        dcn_low_rank_dim: number of columns inside a cross layer.

    The other arguments are those of `DLRM`.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dcn_num_layers: int,
        dcn_low_rank_dim: int,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        check_widths(self.sparse_arch, dense_arch_layer_sizes)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        width = (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
        self.inter_arch = InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, over_arch_layer_sizes[-1]] for dense values [B, dense_in_features] and IDs."""
        # The embeddings are asked for first and read last: sharded tables send them while the dense MLP runs.
        embeddings = self.sparse_arch.embedding_bag_collection(sparse_features)
        dense = self.dense_arch(dense_features)
        sparse = embeddings.values().view(-1, self.sparse_arch.F, self.sparse_arch.D)
        out: Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return out


class DLRMTrain(nn.Module):
    """A model with its loss: binary cross-entropy of logits [B, 1] and labels [B]."""

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: ClickBatch) -> tuple[Tensor, TrainOutputs]:
        """Return the loss, and detached values for metrics."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, TrainOutputs(loss.detach(), logits.detach(), batch.labels.detach())


def check_widths(sparse_arch: SparseArch, dense_arch_layer_sizes: Sequence[int]) -> None:
    """Raise ValueError unless the dense vector is as wide as an embedding."""
    if dense_arch_layer_sizes[-1] != sparse_arch.D:
        raise ValueError(
            f"the last of dense_arch_layer_sizes {list(dense_arch_layer_sizes)} must be the embedding_dim "
            f"{sparse_arch.D}."
        )
