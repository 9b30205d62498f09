"""Wide and deep: a linear term of every value, products of pairs, and an ensemble of MLPs, over one lookup.

Cheng et al.: "Wide & deep learning for recommender systems" (2016); Rendle: "Factorization machines" (2010);
with the embeddings of numbers and the ensemble of Gorishniy et al. (2022, 2024).

Shape legend: B batch, F features, N numbers, D width, T outputs, M members.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import SparseArch
from meshrec.modules import EmbeddingBagCollection
from meshrec.modules.members import MemberMLP
from meshrec.modules.numeric import NumberEmbedding
from meshrec.sparse import KeyedJaggedTensor


class WideDeep(nn.Module):
    """The sum of linear terms, products of pairs, and the MLPs of an ensemble.

    The first T columns of a row are the linear weights of its ID, the others its embedding, so that one set
    of tables is enough. Numbers have embeddings of the same form.

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
        dense_device: device of the dense parameters.

    Raises:
        ValueError: the tables differ in width, or are not wider than ``num_outputs``.
    """

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
        dense_device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.sparse_arch = SparseArch(embedding_bag_collection)
        if num_outputs >= self.sparse_arch.D:
            raise ValueError(
                f"embedding_dim is {self.sparse_arch.D}, and the first {num_outputs} columns are linear "
                f"weights: take {num_outputs + 8} or more."
            )
        self.num_outputs, self.num_members, self.wide_scale = num_outputs, num_members, wide_scale
        width = self.sparse_arch.D
        self.numbers = NumberEmbedding(edges, width, device=dense_device)
        vectors = self.sparse_arch.F + len(edges)
        self.id_dropout = nn.Dropout(id_dropout)
        self.mlp = MemberMLP(
            (vectors + 1) * (width - num_outputs),
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
        linear = self.wide_scale * rows[:, :, :num].sum(1) + numbers[:, :, :num].sum(1)
        kept = self.id_dropout(torch.ones_like(rows[:, :, :1])) if self.training else 1.0
        vectors = torch.cat([rows[:, :, num:] * kept, numbers[:, :, num:]], dim=1)
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1))
        deep = self.mlp(torch.cat([vectors.flatten(1), pairs], dim=1))
        logits = linear.unsqueeze(2) + deep
        if self.num_members == 1:
            return logits.squeeze(2)
        return logits if self.training else logits.mean(2)
