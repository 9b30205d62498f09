"""Wide and deep: a linear term of every value, boosted trees, products of pairs, and MLPs, over one lookup.

Cheng et al.: "Wide & deep learning for recommender systems" (2016); Rendle: "Factorization machines" (2010);
with the embeddings of numbers and the ensemble of Gorishniy et al. (2022, 2024).

He et al.: "Practical lessons from predicting clicks on ads at Facebook" (2014) put boosted trees before a
linear model; here they predict its residual.

Shape legend: B batch, F features, N numbers, D width, T outputs, M members.
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


class _Shrink(torch.autograd.Function):
    """Identity whose gradient also pulls the values to 0: that of ``strengths * values ** 2 / 2``.

    The loss of a batch is the mean over its samples, so the pull of each is divided by their number.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, strengths: Tensor) -> Tensor:
        ctx.save_for_backward(values, strengths)
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        values, strengths = ctx.saved_tensors
        return gradients[0] + values * strengths / max(1, values.shape[0]), None


class WideDeep(nn.Module):
    """The sum of linear terms, boosted trees, products of pairs, and the MLPs of an ensemble.

    The first T columns of a row are the linear weights of its ID, the others its embedding, so that one set
    of tables is enough. Numbers have embeddings of the same form. With trees, the column after the linear
    weights is the ID's score, which only the trees read: they split numbers, and scores of IDs. No gradient
    reaches scores or trees, so they stay as they were fitted.

    Args:
        embedding_bag_collection: the tables, all of one width D.
        edges: the edges of each number's bins, see `meshrec.modules.PiecewiseLinear`.
        layer_sizes: hidden layer sizes of the MLPs.
        num_outputs: number of logits T: 1, or one for each class.
        num_members: number of members M of the ensemble.
        dropout: share of the hidden values that training drops.
        id_dropout: share of the IDs' embeddings that training drops: the model learns to do without, as it
            must for a value that it has never seen.
        wide_scale: factor of the linear weights of IDs: it multiplies how far an update moves them, where the
            optimizer's steps do not depend on the scale of gradients, as Adam's do not.
        shrink: for each feature, how strongly each lookup pulls its row to 0 in training; none: not at all.
            With the inverse of how often a value of the feature occurs, all rows of all tables together have
            an L2 penalty, as the weights of a logistic regression do: rare values stay near 0.
        trees: trees over the numbers [B, N], then the scores of features [B, F]; none: neither trees nor
            scores.
        dense_device: device of the dense parameters.

    Raises:
        ValueError: the tables differ in width or are too narrow, or trees stand beside several outputs.
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
        # The column where embeddings begin.
        self.first = num_outputs + (trees is not None)
        if self.first >= self.sparse_arch.D:
            raise ValueError(
                f"embedding_dim is {self.sparse_arch.D}, and the first {self.first} columns are linear "
                f"weights{' and scores' if trees else ''}: take {self.first + 8} or more."
            )
        self.num_outputs, self.num_members, self.wide_scale = num_outputs, num_members, wide_scale
        width = self.sparse_arch.D
        scales = torch.ones(width)
        scales[:num_outputs] = wide_scale**2
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
        """Return logits for dense values [B, N] and the IDs of all features.

        In training they are those of every member, [B, T, M]; in evaluation their mean, [B, T].
        """
        arch, num = self.sparse_arch, self.num_outputs
        # Asked for first and read last: sharded tables send embeddings while the numbers are encoded.
        embeddings = arch.embedding_bag_collection(sparse_features)
        numbers = self.numbers(dense_features)
        rows = embeddings.values().view(-1, arch.F, arch.D)
        if self.training and self.shrinks:
            rows = _Shrink.apply(rows, self.shrink)  # type: ignore[no-untyped-call]
        linear = self.wide_scale * rows[:, :, :num].sum(1) + numbers[:, :, :num].sum(1)
        kept = self.id_dropout(torch.ones_like(rows[:, :, :1])) if self.training else 1.0
        vectors = torch.cat([rows[:, :, self.first :] * kept, numbers[:, :, num:]], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        deep = self.mlp(torch.cat([vectors.flatten(1), pairs], dim=1))
        if self.trees is not None:
            scores = rows[:, :, num].detach().float()
            linear = linear + self.trees(torch.cat([dense_features.float(), scores], dim=1)).unsqueeze(1)
        logits: Tensor = linear.unsqueeze(2) + deep
        if self.num_members == 1:
            return logits.squeeze(2)
        return logits if self.training else logits.mean(2)
