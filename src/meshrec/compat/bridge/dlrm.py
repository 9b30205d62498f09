"""TorchRec's DLRM models, with TorchRec's names, submodules, and initial weights for a seed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from meshrec.compat.bridge.sparse import KeyedJaggedTensor
from meshrec.compat.bridge.sparse.kinds import AssertedError
from meshrec.models import dlrm as core
from meshrec.modules import EmbeddingBagCollection, LowRankCrossNet


@dataclass
class ModelInput:
    """Batch for the model wrappers.

    Attributes:
        float_features: dense features, float32 [B, I].
        idlist_features: IDs of the sparse features.
        idscore_features: IDs with per-sample weights, or None. The models here do not read them.
        label: labels [B].
    """

    float_features: Tensor
    idlist_features: KeyedJaggedTensor
    idscore_features: KeyedJaggedTensor | None
    label: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "ModelInput":
        """Return a copy on another device."""
        scored = self.idscore_features
        return ModelInput(
            self.float_features.to(device, non_blocking=non_blocking),
            self.idlist_features.to(device, non_blocking),
            None if scored is None else scored.to(device, non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep all tensor memory until the work queued on ``stream`` has finished."""
        for part in (self.float_features, self.idlist_features, self.idscore_features, self.label):
            if part is not None:
                part.record_stream(stream)


class SparseArch(core.SparseArch):
    """Embeddings of all sparse features, stacked to [B, F, D]. All tables must have the same width D.

    Raises:
        AssertedError: the collection has no tables, or table widths differ.
    """

    def __init__(self, embedding_bag_collection: EmbeddingBagCollection) -> None:
        check_tables(embedding_bag_collection)
        super().__init__(embedding_bag_collection)
        configs = embedding_bag_collection.embedding_bag_configs()
        self._sparse_feature_names = [name for config in configs for name in config.feature_names]

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        values: Tensor = self.embedding_bag_collection(features).values()
        return values.view(-1, self.F, self.D)

    @property
    def sparse_feature_names(self) -> list[str]:
        """Feature names in the order of the stacked embeddings."""
        return self._sparse_feature_names


class DLRM(core.DLRM):
    """DLRM: dot-product interactions between embeddings and a dense vector, then an MLP; see MeshRec's DLRM.

    Raises:
        AssertedError: the collection has no tables, or widths do not match.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        check_tables(embedding_bag_collection)
        sizes = (dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        super().__init__(embedding_bag_collection, *sizes, dense_device)
        # Replaces MeshRec's arch with one that TorchScript can compile. The tables are shared, nothing is
        # redrawn.
        self.sparse_arch = SparseArch(embedding_bag_collection)
        # Whether the dense parts have been compiled, which must happen only once.
        self._cuda_graph_enabled = False

    @torch.jit.unused
    def compile_dense_path(self, compile_mode: str = "reduce-overhead") -> None:
        """Compile the dense layers with torch.compile, and leave the table lookups eager.

        A second call does nothing.

        Args:
            compile_mode: torch.compile mode. ``"reduce-overhead"`` records CUDA graphs.
        """
        if self._cuda_graph_enabled:
            return
        for name in ("dense_arch", "inter_arch", "over_arch"):
            setattr(self, name, torch.compile(getattr(self, name), mode=compile_mode))
        self._cuda_graph_enabled = True

    # Repeats MeshRec's forward with the bridge's input type: TorchScript cannot compile MeshRec's own type.
    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        embeddings = self.sparse_arch.embedding_bag_collection(sparse_features)
        dense = self.dense_arch(dense_features)
        sparse = embeddings.values().view(-1, self.sparse_arch.F, self.sparse_arch.D)
        out: Tensor = self.over_arch(self.inter_arch(dense, sparse))
        return out


class DLRMWrapper(DLRM):
    """DLRM that takes a whole batch, including labels, as `ModelInput`."""

    def forward(self, model_input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        """Return the logits [B, 1], or in training the pair (loss, logits).

        The loss is the binary cross-entropy against the labels [B].
        """
        logits = super().forward(model_input.float_features, model_input.idlist_features)
        return with_loss(logits, model_input.label) if self.training else logits


class InteractionProjectionArch(nn.Module):
    """Pairwise products between two learned projections of all features.

    Args:
        num_sparse_features: F.
        interaction_branch1: maps [B, (F + 1) D] to [B, F1 D].
        interaction_branch2: maps [B, (F + 1) D] to [B, D F2].
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F: int = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: Tensor, sparse_features: Tensor) -> Tensor:
        """Map dense [B, D] and sparse [B, F, D] to [B, D + F1 F2]."""
        if self.F <= 0:
            return dense_features
        batch_size, width = dense_features.shape
        combined = torch.cat([dense_features, sparse_features.flatten(1)], dim=1)
        left = self.interaction_branch1(combined).reshape([batch_size, -1, width])
        right = self.interaction_branch2(combined).reshape([batch_size, width, -1])
        return torch.cat([dense_features, torch.bmm(left, right).flatten(1)], dim=1)


class DLRM_Projection(DLRM):
    """DLRM with dot products between two learned projections.

    Args:
        interaction_branch1_layer_sizes: layer sizes of the first projection MLP. The last size must be a
            multiple of embedding_dim.
        interaction_branch2_layer_sizes: the same for the second projection.

    The remaining arguments are DLRM's.

    Raises:
        ValueError: the last layer size is not a multiple of embedding_dim.
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        dense_in_features: int,
        dense_arch_layer_sizes: Sequence[int],
        over_arch_layer_sizes: Sequence[int],
        interaction_branch1_layer_sizes: Sequence[int],
        interaction_branch2_layer_sizes: Sequence[int],
        dense_device: torch.device | None = None,
    ) -> None:
        sizes = (dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        super().__init__(embedding_bag_collection, *sizes, dense_device)
        width, count = self.sparse_arch.D, self.sparse_arch.F
        branches, vectors = [], []
        # Every branch reads the embeddings of all features, and the dense vector.
        for branch in (interaction_branch1_layer_sizes, interaction_branch2_layer_sizes):
            if branch[-1] % width:
                raise ValueError(
                    f"the last size of an interaction branch must be a multiple of embedding_dim {width}, "
                    f"got {list(branch)}."
                )
            branches.append(core.DenseArch((count + 1) * width, branch, dense_device))
            vectors.append(branch[-1] // width)
        self.inter_arch = InteractionProjectionArch(count, *branches)
        self.over_arch = core.OverArch(width + vectors[0] * vectors[1], over_arch_layer_sizes, dense_device)


class DLRM_DCN(DLRM):
    """DLRM with a low-rank cross network (DCN v2) instead of dot products; see MeshRec's model for the
    arguments.

    Draws the same initial weights as TorchRec for a seed. TorchRec first initializes a plain DLRM, and then
    replaces two submodules.
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
        sizes = (dense_in_features, dense_arch_layer_sizes, over_arch_layer_sizes)
        super().__init__(embedding_bag_collection, *sizes, dense_device)
        # Constructed after the base class has drawn its layers: this order gives TorchRec's weights.
        width = (self.sparse_arch.F + 1) * self.sparse_arch.D
        crossnet = LowRankCrossNet(width, dcn_num_layers, dcn_low_rank_dim, dense_device)
        self.inter_arch = core.InteractionDCNArch(self.sparse_arch.F, crossnet)
        self.over_arch = core.OverArch(width, over_arch_layer_sizes, dense_device)


def choose(n: int, k: int) -> int:
    """Return the binomial coefficient "n choose k"; 0 unless 0 <= k <= n."""
    return math.comb(n, k) if 0 <= k <= n else 0


def with_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return nn.functional.binary_cross_entropy_with_logits(logits.squeeze(-1), labels), logits


def check_tables(embedding_bag_collection: EmbeddingBagCollection) -> None:
    """Raise AssertedError if the collection has no tables, or if table widths differ."""
    configs = embedding_bag_collection.embedding_bag_configs()
    if not configs:
        raise AssertedError("the model needs tables, and the collection has none. Give it at least one.")
    widths = sorted({config.embedding_dim for config in configs})
    if len(widths) > 1:
        raise AssertedError(f"all tables must have one embedding_dim, got {widths}. Make them as wide.")
