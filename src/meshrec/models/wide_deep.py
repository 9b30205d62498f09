"""Wide & deep model: linear terms, boosted trees, pairwise products and MLPs, from one embedding lookup.

The parts are from Cheng et al.: "Wide & deep learning for recommender systems" (2016), Rendle:
"Factorization machines" (2010), and Gorishniy et al. (2022, 2024: numeric embeddings, ensemble). He et al.:
"Practical lessons from predicting clicks on ads at Facebook" (2014) apply boosted trees before a linear
model. Here the trees predict the residual that the linear model leaves.

Shape legend: B samples, F features with IDs, N numeric features, D width, T outputs, M ensemble members.
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
    """Autograd function that returns its input, and adds the gradient of an L2 penalty in the backward pass.

    The penalty is ``strengths * values ** 2 / 2``. The batch loss is a mean over samples, so the additional
    gradient is divided by the batch size.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, strengths: Tensor) -> Tensor:
        """Return ``values`` unchanged, and keep the arguments for the backward pass.

        Args:
            ctx: Autograd context.
            values: Embedding rows, [B, F, D].
            strengths: Penalty strength per feature and column, [F, D].
        """
        ctx.save_for_backward(values, strengths)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, strengths = ctx.saved_tensors
        return gradients[0] + values * strengths / max(1, values.shape[0]), None


class WideDeep(nn.Module):
    """Wide & deep model, whose logit is the sum of linear terms, boosted trees, and an ensemble of MLPs.

    A table row has several purposes, so one lookup is enough for all parts of the model. The first T columns
    are the ID's linear weights. With trees, the next column is the ID's score, which only the trees read. The
    other columns are the embedding. Numeric features have vectors with linear weights and an embedding, too.
    The trees split numeric features and ID scores. Trees and scores receive no gradient, and stay as fitted.

    Args:
        embedding_bag_collection: Tables with equal width D.
        edges: Bin edges per numeric feature; see `meshrec.modules.PiecewiseLinear`.
        layer_sizes: Hidden layer sizes in the MLPs.
        num_outputs: Number of logits, T: 1, or the number of classes.
        num_members: MLPs in the ensemble, M.
        dropout: Dropout probability for hidden values.
        id_dropout: Dropout probability for whole ID embeddings, which prepares the model for unseen IDs.
        wide_scale: Factor for the linear weights in table rows. Optimizers such as Adam take steps that do
            not depend on the gradient scale, so the factor decides how fast the linear terms learn.
        shrink: Strength of an L2 penalty per feature, applied to a row whenever it is looked up in training;
            empty: no penalty. With a strength inverse to a value's mean frequency, all rows get the same
            penalty, as in logistic regression, and rare values stay near 0.
        trees: Trees over the numeric features, then the ID scores, [B, N + F]; None: neither trees nor
            scores.
        dense_device: Device for all parameters except the tables.

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
        # Linear weights and an embedding, as in a table row, but no score for trees.
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
        """Return the logits.

        Args:
            dense_features: Dense values, [B, N].
            sparse_features: IDs for all features.

        Returns:
            In training mode, the logits from all ensemble members, [B, T, M]. In evaluation mode, or with a
            single member, the mean over members, [B, T].
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
        # One value per ID, so an embedding is dropped as a whole.
        keep_mask = self.id_dropout(torch.ones_like(rows[:, :, :1])) if self.training else 1.0
        vectors = torch.cat([rows[:, :, self.first :] * keep_mask, numeric[:, :, num:]], dim=1)
        # Products between all pairs of vectors, added up per column, in linear time.
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
