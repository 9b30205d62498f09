"""Wide and deep: linear terms, boosted trees, pairwise products and MLPs over a single lookup.

Cheng et al.: "Wide & deep learning for recommender systems" (2016); Rendle: "Factorization machines" (2010);
numeric embeddings and the ensemble from Gorishniy et al. (2022, 2024). He et al.: "Practical lessons from
predicting clicks on ads at Facebook" (2014) apply boosted trees before a linear model; here they predict its
residual.

Shape legend: B batch, F features, N numeric features, D width, T outputs, M members.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import SparseArch
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.boosted_trees import BoostedTrees
from meshrec.modules.members import MemberMLP
from meshrec.modules.numeric import NumberEmbedding
from meshrec.sparse import KeyedJaggedTensor


class _ShrinkGradient(torch.autograd.Function):
    """Identity whose backward adds the gradient of an L2 penalty, ``strengths * values ** 2 / 2``.

    The batch loss is a mean over samples, so the additional gradient is divided by the batch size.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, strengths: Tensor) -> Tensor:
        """Return ``values``.

        Args:
            ctx: Autograd context.
            values: Rows, [B, F, D].
            strengths: Shrinkage, [F, D].
        """
        ctx.save_for_backward(values, strengths)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, strengths = ctx.saved_tensors
        return gradients[0] + values * strengths / max(1, values.shape[0]), None


class WideDeep(nn.Module):
    """Wide & deep model: the sum of linear terms, boosted trees, and an ensemble of MLPs over embeddings.

    The first T columns of a row are the ID's linear weights, the remaining columns its embedding, so that a
    single set of tables is enough. Numeric features have embeddings with the same layout. With trees, the
    column after the linear weights is the ID's score, read by the trees only: they split numeric features and
    ID scores. Scores and trees receive no gradient and stay as fitted.

    Args:
        embedding_bag_collection: Tables with equal width D.
        edges: Bin edges per numeric feature; see `meshrec.modules.PiecewiseLinear`.
        layer_sizes: Hidden layer sizes of the MLPs.
        num_outputs: Number of logits T: 1, or one per class.
        num_members: Ensemble members M.
        dropout: Dropout probability of hidden values.
        id_dropout: Dropout probability of whole ID embeddings, which prepares the model for unseen IDs.
        wide_scale: Factor for the linear weights of IDs. With optimizers such as Adam, whose steps do not
            depend on the gradient scale, it scales how far an update moves the linear term.
        shrink: Shrinkage per feature, applied to a row at every lookup in training; empty: none. The inverse
            frequency of the feature's values gives all rows an L2 penalty as in logistic regression: rare
            values stay near 0.
        trees: Trees over numeric features [B, N], then ID scores [B, F]; None: neither trees nor scores.
        dense_device: Device for dense parameters.

    Raises:
        ValueError: Table widths differ or are too small, or trees are combined with several outputs.
    """

    constant_buffers = ("shrink",)

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        edges: Sequence[Sequence[float]],
        layer_sizes: Sequence[int],
        *,
        num_outputs: int = 1,
        num_members: int = 1,
        dropout: float = 0.0,
        id_dropout: float = 0.0,
        wide_scale: float = 1.0,
        shrink: Sequence[float] = (),
        trees: BoostedTrees | None = None,
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        if trees is not None and num_outputs != 1:
            raise ValueError(
                f"trees have one output, and num_outputs is {num_outputs}. Take one output, or no trees."
            )
        # First embedding column.
        self.first = num_outputs + (trees is not None)
        if self.first >= self.sparse_arch.D:
            raise ValueError(
                f"embedding_dim is {self.sparse_arch.D}, and the first {self.first} columns are linear "
                f"weights{' and scores' if trees else ''}: take {self.first + 8} or more."
            )
        self.num_outputs, self.num_members, self.wide_scale = num_outputs, num_members, wide_scale
        width = self.sparse_arch.D
        scales = torch.ones(width)
        # The linear term is wide_scale * weight, so a penalty on it scales with the square.
        scales[:num_outputs] = wide_scale**2
        # Tree scores receive no gradient, so they must not shrink either.
        scales[num_outputs : self.first] = 0.0
        strengths = torch.tensor(list(shrink), dtype=torch.float32)[:, None] * scales
        self.register_buffer("shrink", strengths.to(dense_device), persistent=False)
        self.shrinks = len(shrink) > 0
        self.numbers = NumberEmbedding(edges, width - self.first + num_outputs, device=dense_device)
        self.trees = trees
        vectors = self.sparse_arch.F + len(edges)
        self.id_dropout = nn.Dropout(id_dropout)
        self.mlp = MemberMLP(
            (vectors + 1) * (width - self.first),
            layer_sizes,
            num_outputs,
            num_members,
            dropout=dropout,
            device=dense_device,
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits.

        Args:
            dense_features: Dense values, [B, N].
            sparse_features: IDs for all features.

        Returns:
            In training the logits of every member, [B, T, M]; in evaluation their mean, [B, T].
        """
        arch, num = self.sparse_arch, self.num_outputs
        # Lookup first, read last: sharded tables exchange embeddings while numeric features are encoded.
        embeddings = arch.embedding_bag_collection(sparse_features)
        numeric = self.numbers(dense_features)
        rows = embeddings.values().view(-1, arch.F, arch.D)
        if self.training and self.shrinks:
            rows = _ShrinkGradient.apply(rows, self.shrink)  # type: ignore[no-untyped-call]
        # [B, T]
        linear = self.wide_scale * rows[:, :, :num].sum(1) + numeric[:, :, :num].sum(1)
        keep_mask = self.id_dropout(torch.ones_like(rows[:, :, :1])) if self.training else 1.0
        vectors = torch.cat([rows[:, :, self.first :] * keep_mask, numeric[:, :, num:]], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        deep = self.mlp(torch.cat([vectors.flatten(1), pairs], dim=1))
        if self.trees is not None:
            # Detached: trees and scores stay as fitted.
            scores = rows[:, :, num].detach().float()
            linear = linear + self.trees(torch.cat([dense_features.float(), scores], dim=1)).unsqueeze(1)
        # [B, T, 1] + [B, T, M]: all members share the linear term and the trees.
        logits: Tensor = linear.unsqueeze(2) + deep
        if self.num_members == 1:
            return logits.squeeze(2)
        return logits if self.training else logits.mean(2)
