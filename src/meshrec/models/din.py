"""Deep interest network (DIN): click model that weights a user's history items by the candidate item.

See Zhou et al.: "Deep interest network for click-through rate prediction" (2018).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import OverArch
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.modules.precision import as_activations
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items of all histories, D embedding width


class InterestPooling(nn.Module):
    """Pooling that adds up history vectors, weighted by an MLP that compares them with the candidate vector.

    Weights are not normalized, because their sum shows how strong the user's interest is.

    Args:
        width: Vector width D.
        layer_sizes: Hidden layer sizes in the MLP. Its input is the history vector, the candidate vector,
            their difference and their product.
        device: Device for the MLP.
    """

    def __init__(self, width: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        # A single output column: the weight.
        self.weigh = OverArch(4 * width, [*layer_sizes, 1], device)

    def forward(self, history: JaggedTensor, candidate_BD: Tensor) -> Tensor:
        """Return the pooled history per sample, [B, D]; zeros for an empty history.

        Args:
            history: B bags with history vectors, values [N, D].
            candidate_BD: Vector of the candidate item, per sample.
        """
        values_ND, lengths_B = as_activations(history.values()), history.lengths()
        # Read sizes from shapes: `len` would make them constants in an exported program.
        num_samples, num_items = lengths_B.shape[0], values_ND.shape[0]
        sample_N = torch.repeat_interleave(
            torch.arange(num_samples, device=lengths_B.device), lengths_B, output_size=num_items
        )
        candidate_ND = as_activations(candidate_BD)[sample_N]
        mlp_input = [values_ND, candidate_ND, values_ND - candidate_ND, values_ND * candidate_ND]
        # [N, D] * [N, 1]
        weighted = values_ND * self.weigh(torch.cat(mlp_input, dim=1))
        # index_add sums per sample; samples with an empty history stay 0.
        pooled: Tensor = weighted.new_zeros(num_samples, values_ND.shape[1]).index_add(0, sample_N, weighted)
        return pooled


class DIN(nn.Module):
    """Deep interest network: click model that reads a history, a candidate item, other IDs and dense values.

    Args:
        embedding_collection: Collection with a single table, which ``history`` and ``item`` read.
        embedding_bag_collection: Tables for all other features; None: there are none.
        history: Feature with the user's earlier items.
        item: Feature with the candidate item. If a sample has several IDs, the last is used.
        dense_in_features: Dense input columns.
        attention: Hidden layer sizes in the MLP that weights history items.
        over: Layer sizes in the final MLP; the last must be 1.
        device: Device for the MLPs.

    Raises:
        ValueError: History and item do not share a table.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        embedding_bag_collection: EmbeddingBagCollection | None,
        *,
        history: str,
        item: str,
        dense_in_features: int = 0,
        attention: Sequence[int] = (64, 32),
        over: Sequence[int] = (128, 64, 1),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        (table, *extra_tables) = embedding_collection.embedding_configs()
        if extra_tables or not {history, item} <= {*table.feature_names}:
            raise ValueError(
                f"the features {history!r} and {item!r} must share the one table of the collection, which "
                f"has {[config.name for config in (table, *extra_tables)]}. Give the features one table "
                "(Feature.table)."
            )
        self.embedding_collection = embedding_collection
        self.embedding_bag_collection = embedding_bag_collection
        self._history, self._item = history, item
        self.pooling = InterestPooling(table.embedding_dim, attention, device)
        pooled_width = 0
        if embedding_bag_collection is not None:
            configs = embedding_bag_collection.embedding_bag_configs()
            pooled_width = sum(config.embedding_dim * len(config.feature_names) for config in configs)
        # Interest, candidate and their product have the table's width.
        self.over = OverArch(3 * table.embedding_dim + pooled_width + dense_in_features, over, device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the logits, [B, 1].

        Args:
            dense_features: Dense values, [B, dense_in_features].
            sparse_features: IDs for all features.
        """
        embeddings = self.embedding_collection(sparse_features)
        # Both features share the table, so a single lookup returns both.
        history, items = embeddings[self._history], embeddings[self._item]
        item_BD = _last_rows(items)
        interest_BD = self.pooling(history, item_BD)
        parts = [interest_BD, item_BD, interest_BD * item_BD, dense_features]
        if self.embedding_bag_collection is not None:
            parts.append(self.embedding_bag_collection(sparse_features).values())
        logits: Tensor = self.over(torch.cat(parts, dim=1))
        return logits


def _last_rows(bags: JaggedTensor) -> Tensor:
    """Return the last row in every bag, [B, D]; zeros for an empty bag."""
    rows = bags.values()
    # Empty bags read the zero row appended below.
    last_B = torch.where(bags.lengths() > 0, bags.offsets()[1:] - 1, rows.shape[0])
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[last_B]
