"""TorchRec's DeepFM model, which predicts a probability from sparse and dense features.

Guo et al.: "DeepFM: a factorization-machine based neural network" (2017). A deep half (MLP) and a
factorization machine read the same embeddings. Parameter names and their initialization order are TorchRec's,
so seeds and checkpoints carry over.
"""

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.dlrm import ModelInput, check_tables, with_loss
from meshrec.compat.bridge.sparse import KeyedJaggedTensor, KeyedTensor
from meshrec.modules import DeepFM, EmbeddingBagCollection, FactorizationMachine

# B batch, D embedding width


class SparseArch(nn.Module):
    """Embedding tables of DeepFM."""

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        super().__init__()
        self.embedding_bag_collection = embedding_bag_collection

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Return pooled embeddings by feature, [B, sum of D]."""
        return self.embedding_bag_collection(features)  # type: ignore[no-any-return]


class DenseArch(nn.Module):
    """MLP with two layers, which maps dense features to a vector with the width of the embeddings."""

    def __init__(self, in_features: int, hidden_layer_size: int, embedding_dim: int) -> None:
        super().__init__()
        self.model = nn.Sequential(
            nn.Linear(in_features, hidden_layer_size),
            nn.ReLU(),
            nn.Linear(hidden_layer_size, embedding_dim),
            nn.ReLU(),
        )

    def forward(self, features: Tensor) -> Tensor:
        """Map [B, in_features] to [B, embedding_dim]."""
        return self.model(features)  # type: ignore[no-any-return]


class FMInteractionArch(nn.Module):
    """Concatenation of the dense vector, the deep output, and the factorization machine's output.

    A linear layer with ReLU computes the deep output from the dense vector and all embeddings. Without sparse
    features, the result is the dense vector alone.

    Args:
        fm_in_features: total width of the dense vector and all embeddings.
        sparse_feature_names: sparse features, in the order of the embeddings.
        deep_fm_dimension: columns of the deep output.
    """

    def __init__(self, fm_in_features: int, sparse_feature_names: list[str], deep_fm_dimension: int) -> None:
        super().__init__()
        self.sparse_feature_names = sparse_feature_names
        self.deep_fm = DeepFM(nn.Sequential(nn.Linear(fm_in_features, deep_fm_dimension), nn.ReLU()))
        self.fm = FactorizationMachine()

    def forward(self, dense_features: Tensor, sparse_features: KeyedTensor) -> Tensor:
        """Map dense [B, D] and embeddings to [B, D + deep_fm_dimension + 1]."""
        if not self.sparse_feature_names:
            return dense_features
        vectors = [dense_features, *(sparse_features[name] for name in self.sparse_feature_names)]
        return torch.cat([dense_features, self.deep_fm(vectors), self.fm(vectors)], dim=1)


class OverArch(nn.Module):
    """Output layer with a sigmoid."""

    def __init__(self, in_features: int) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(in_features, 1), nn.Sigmoid())

    def forward(self, features: Tensor) -> Tensor:
        """Map [B, in_features] to [B, 1]."""
        return self.model(features)  # type: ignore[no-any-return]


class SimpleDeepFMNN(nn.Module):
    """DeepFM over an EmbeddingBagCollection and dense features.

    Args:
        num_dense_features: dense input columns.
        embedding_bag_collection: tables, all with the same width D.
        hidden_layer_size: hidden units in the dense MLP.
        deep_fm_dimension: columns of the deep output; see `FMInteractionArch`.

    Raises:
        AssertedError: the collection has no tables, or table widths differ.
    """

    def __init__(
        self,
        num_dense_features: int,
        embedding_bag_collection: EmbeddingBagCollection,
        hidden_layer_size: int,
        deep_fm_dimension: int,
    ) -> None:
        super().__init__()
        check_tables(embedding_bag_collection)
        configs = embedding_bag_collection.embedding_bag_configs()
        width = configs[0].embedding_dim
        names = [name for config in configs for name in config.feature_names]
        # This order of submodules draws the same initial weights as TorchRec for a seed.
        self.sparse_arch = SparseArch(embedding_bag_collection)
        self.dense_arch = DenseArch(num_dense_features, hidden_layer_size, width)
        self.inter_arch = FMInteractionArch(width * (len(names) + 1), names, deep_fm_dimension)
        self.over_arch = OverArch(width + deep_fm_dimension + 1)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Map dense [B, num_dense_features] and IDs to probabilities [B, 1]."""
        dense = self.dense_arch(dense_features)
        sparse = self.sparse_arch(sparse_features)
        return self.over_arch(self.inter_arch(dense, sparse))  # type: ignore[no-any-return]


class SimpleDeepFMNNWrapper(SimpleDeepFMNN):
    """SimpleDeepFMNN that takes a whole batch, including labels, as `ModelInput`."""

    def forward(self, model_input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return the output [B, 1]; in training, (loss, output).

        The loss is the binary cross-entropy against the labels [B], with the output as logits.
        """
        output = super().forward(model_input.float_features, model_input.idlist_features)
        # TorchRec's wrapper also applies the logit loss after the sigmoid. Changing this would change
        # training.
        return with_loss(output, model_input.label) if self.training else output
