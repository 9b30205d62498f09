"""The models DLRM and DLRM-DCN, and their parts, with the names in TorchRec.

DLRM is from Naumov et al.: "Deep learning recommendation model for personalization and recommendation
systems" (2019). DLRM-DCN has a cross network instead of dot products, as in Wang et al.: "DCN V2" (2021), and
in the MLPerf training benchmark.
"""

import warnings
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.crossnet import LowRankCrossNet
from meshrec.modules.interaction import DotInteraction
from meshrec.modules.linear import LogitLinear
from meshrec.modules.mlp import MLP
from meshrec.modules.precision import as_activations
from meshrec.sparse import KeyedJaggedTensor

# B batch, F sparse features, D embedding width


class ClickBatch(Protocol):
    """Protocol for a batch: the attributes that `DLRMTrain` reads. `meshrec.data.Batch` has them."""

    dense_features: Tensor
    sparse_features: KeyedJaggedTensor
    labels: Tensor


class TrainOutputs(NamedTuple):
    """Detached values for metrics, from `DLRMTrain`."""

    loss: Tensor
    """Mean loss, a scalar."""
    logits: Tensor
    """Logits, [B]."""
    labels: Tensor
    """Labels, [B]."""


class SparseArch(nn.Module):
    """Module that looks up all features, and returns their pooled embeddings as one tensor, [B, F, D].

    Args:
        embedding_bag_collection: Tables with equal width D.

    Raises:
        ValueError: Table widths differ.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection
        # Embeddings are stacked, so they need the same width.
        configs = embedding_bag_collection.embedding_bag_configs()
        dims = {config.embedding_dim for config in configs}
        if len(dims) != 1:
            raise ValueError(
                f"DLRM needs one embedding_dim for all tables, got {sorted(dims)} in "
                f"{[config.name for config in configs]}. Give all tables the same width."
            )
        self.D: int = dims.pop()
        # Tables with several features count once per feature.
        self.F: int = sum(len(config.feature_names) for config in configs)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        """Return the pooled embedding per sample and feature, [B, F, D]."""
        values: Tensor = self.embedding_bag_collection(features).values()
        return values.view(-1, self.F, self.D)


class DenseArch(nn.Module):
    """MLP that maps dense values to a vector.

    Args:
        in_features: Dense input columns.
        layer_sizes: Layer sizes; the last is the width of the vector.
        device: Device for the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        with warnings.catch_warnings():
            # Without dense features the first layer has only a bias, and torch warns about the empty weight.
            warnings.filterwarnings("ignore", "Initializing zero-element tensors")
            self.model = MLP(in_features, layer_sizes, device=device)

    def forward(self, features: Tensor) -> Tensor:
        """Map dense features [B, in_features] to [B, layer_sizes[-1]]."""
        out: Tensor = self.model(features)
        return out


class InteractionArch(nn.Module):
    """DLRM's interaction. It concatenates the dense vector and the dot products between all pairs of vectors.

    The F + 1 vectors are the dense vector and the F embeddings.

    Args:
        num_sparse_features: Number of embeddings, F.
    """

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.model = DotInteraction(num_sparse_features)

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Map dense [B, D] and sparse [B, F, D] vectors to [B, D + F (F + 1) / 2]."""
        out: Tensor = self.model(dense_features, sparse_features)
        return out


class InteractionDCNArch(nn.Module):
    """DLRM-DCN's interaction: a cross network over the concatenated dense vector and embeddings.

    Args:
        num_sparse_features: Number of embeddings, F.
        crossnet: Cross network that maps [B, (F + 1) D] to [B, (F + 1) D].
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Map dense [B, D] and sparse [B, F, D] vectors to [B, (F + 1) D]."""
        # The dense vector counts as feature 0.
        vectors = [as_activations(dense_features), as_activations(sparse_features.flatten(1))]
        out: Tensor = self.crossnet(torch.cat(vectors, dim=1))
        return out


class OverArch(nn.Module):
    """MLP whose last layer is linear, so that it can return logits.

    Args:
        in_features: Input columns.
        layer_sizes: Layer sizes, two or more.
        device: Device for the parameters.
    """

    def __init__(
        self, in_features: int, layer_sizes: Sequence[int], device: torch.device | None = None
    ) -> None:
        super().__init__()
        if len(layer_sizes) < 2:
            raise ValueError(f"over_arch_layer_sizes needs 2 sizes or more, got {list(layer_sizes)}.")
        self.model = nn.Sequential(
            MLP(in_features, layer_sizes[:-1], device=device),
            LogitLinear(layer_sizes[-2], layer_sizes[-1], device=device),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map features [B, in_features] to [B, layer_sizes[-1]]."""
        out: Tensor = self.model(features)
        return out


class DLRM(nn.Module):
    """DLRM: an MLP over the dot products between all embeddings and a vector for the dense values.

    Args:
        embedding_bag_collection: Tables with equal width D.
        dense_in_features: Dense input columns.
        dense_arch_layer_sizes: Layer sizes in the MLP for dense values; the last must be D.
        over_arch_layer_sizes: Layer sizes in the final MLP; the last is the number of logits.
        dense_device: Device for all parameters except the tables.

    Raises:
        ValueError: Table widths differ, or the layer sizes do not match them.

    Example::

        >>> from meshrec.modules import EmbeddingBagConfig
        >>> table = EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["item"])
        >>> model = DLRM(EmbeddingBagCollection([table]), 3, [16, 8], [16, 1])
        >>> ids = KeyedJaggedTensor(["item"], torch.tensor([5, 7]), lengths=torch.tensor([1, 1]))
        >>> model(torch.rand(2, 3), ids).shape
        torch.Size([2, 1])
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
        interaction = InteractionArch(self.sparse_arch.F)
        over_in = interaction.model.out_features(self.sparse_arch.D)
        self.inter_arch: nn.Module = interaction
        self.over_arch = OverArch(over_in, over_arch_layer_sizes, dense_device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, over_arch_layer_sizes[-1]].

        Args:
            dense_features: Dense values, [B, dense_in_features].
            sparse_features: IDs for all features.
        """
        # Lookup first, read last: sharded tables exchange embeddings while the dense MLP runs.
        embeddings = self.sparse_arch.embedding_bag_collection(sparse_features)
        dense = self.dense_arch(dense_features)
        sparse = embeddings.values().view(-1, self.sparse_arch.F, self.sparse_arch.D)
        out: Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return out


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network instead of dot products.

    Args:
        embedding_bag_collection: Tables with equal width D.
        dense_in_features: Dense input columns.
        dense_arch_layer_sizes: Layer sizes in the MLP for dense values; the last must be D.
        over_arch_layer_sizes: Layer sizes in the final MLP; the last is the number of logits.
        dcn_num_layers: Number of cross layers.
        dcn_low_rank_dim: Rank of the weights in a cross layer.
        dense_device: Device for all parameters except the tables.

    Raises:
        ValueError: Table widths differ, or the layer sizes do not match them.
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
        # Not that of DLRM, which has another interaction: building it would draw random numbers.
        nn.Module.__init__(self)
        self.sparse_arch = SparseArch(embedding_bag_collection)
        check_widths(self.sparse_arch, dense_arch_layer_sizes)
        self.dense_arch = DenseArch(dense_in_features, dense_arch_layer_sizes, dense_device)
        width = (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
        self.inter_arch = InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = OverArch(width, over_arch_layer_sizes, dense_device)


class DLRMTrain(nn.Module):
    """Wrapper for a model that returns the binary cross-entropy for a batch, for a training loop.

    Args:
        dlrm_module: Model that returns logits [B, 1] for dense values and IDs.
    """

    def __init__(self, dlrm_module: nn.Module) -> None:
        super().__init__()
        self.model = dlrm_module

    def forward(self, batch: ClickBatch) -> tuple[Tensor, TrainOutputs]:
        """Return the mean loss, and detached values for metrics."""
        logits = self.model(batch.dense_features, batch.sparse_features).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float())
        return loss, TrainOutputs(loss.detach(), logits.detach(), batch.labels.detach())


def check_widths(sparse_arch: SparseArch, dense_arch_layer_sizes: Sequence[int]) -> None:
    """Raise ValueError if the dense vector and the embeddings have different widths."""
    if dense_arch_layer_sizes[-1] != sparse_arch.D:
        raise ValueError(
            f"the last of dense_arch_layer_sizes {list(dense_arch_layer_sizes)} must be the embedding_dim "
            f"{sparse_arch.D}."
        )
