"""Deep interest network (DIN): attention over a user's history that depends on the offered item.

Zhou et al.: "Deep interest network for click-through rate prediction" (2018).
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from meshrec.models.dlrm import OverArch
from meshrec.modules import EmbeddingBagCollection, EmbeddingCollection
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items of all histories, D embedding width


class InterestPooling(nn.Module):
    """Weighted sum of a history's vectors; an MLP computes each weight from the vector and the offered item.

    The weights are not normalised to sum to 1, because their sum carries the strength of the interest.
    Nothing is padded.

    Args:
        width: the width D of all vectors.
        layer_sizes: hidden layers of the MLP, which reads history vector, offered vector, difference and
            product.
        device: device of the MLP.
    """

    def __init__(self, width: int, layer_sizes: Sequence[int], device: torch.device | None = None) -> None:
        super().__init__()
        self.weigh = OverArch(4 * width, [*layer_sizes, 1], device)

    def forward(self, history: JaggedTensor, offered_BD: Tensor) -> Tensor:
        """Sum B bags of history vectors by the offered vectors [B, D]; returns [B, D]."""
        values_ND, lengths_B = history.values(), history.lengths()
        # Sizes are read from shapes: `len` would make them constants of an exported program.
        num_samples, num_items = lengths_B.shape[0], values_ND.shape[0]
        of_N = torch.repeat_interleave(
            torch.arange(num_samples, device=lengths_B.device), lengths_B, output_size=num_items
        )
        offered_ND = offered_BD[of_N]
        both = [values_ND, offered_ND, values_ND - offered_ND, values_ND * offered_ND]
        weighted = values_ND * self.weigh(torch.cat(both, dim=1))
        pooled: Tensor = weighted.new_zeros(num_samples, values_ND.shape[1]).index_add(0, of_N, weighted)
        return pooled


class DIN(nn.Module):
    """Click model that reads a history, an offered item, other IDs and dense values.

    Args:
        embedding_collection: a collection of one table, read by the features ``history`` and ``item``.
        embedding_bag_collection: the tables of all other IDs; None if there are none.
        history: name of the feature that holds the earlier items.
        item: name of the feature that holds the offered item. If a bag has several IDs, the last one is used.
        dense_in_features: number of columns of the dense input.
        attention: hidden layers of the MLP that weights the history.
        over: layers of the MLP over all vectors; the last size must be 1.
        device: device of the MLPs.

    Raises:
        ValueError: history and item do not share a table.
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
        (table, *more) = embedding_collection.embedding_configs()
        if more or not {history, item} <= {*table.feature_names}:
            raise ValueError(
                f"the features {history!r} and {item!r} must share the one table of the collection, which "
                f"has {[each.name for each in (table, *more)]}. Give the features one table (Feature.table)."
            )
        self.embedding_collection = embedding_collection
        self.embedding_bag_collection = embedding_bag_collection
        self._history, self._item = history, item
        self.pooling = InterestPooling(table.embedding_dim, attention, device)
        others = 0
        if embedding_bag_collection is not None:
            configs = embedding_bag_collection.embedding_bag_configs()
            others = sum(each.embedding_dim * len(each.feature_names) for each in configs)
        self.over = OverArch(3 * table.embedding_dim + others + dense_in_features, over, device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return logits [B, 1] for dense values [B, dense_in_features] and the IDs of all features."""
        found = self.embedding_collection(sparse_features)
        history, items = found[self._history], found[self._item]
        item_BD = _last_rows(items)
        interest_BD = self.pooling(history, item_BD)
        parts = [interest_BD, item_BD, interest_BD * item_BD, dense_features]
        if self.embedding_bag_collection is not None:
            parts.append(self.embedding_bag_collection(sparse_features).values())
        logits: Tensor = self.over(torch.cat(parts, dim=1))
        return logits


def _last_rows(bags: JaggedTensor) -> Tensor:
    """Return the last row of each bag, [B, D]; zeros for an empty bag."""
    rows = bags.values()
    last_B = torch.where(bags.lengths() > 0, bags.offsets()[1:] - 1, rows.shape[0])
    return torch.cat([rows, rows.new_zeros(1, rows.shape[1])])[last_B]
