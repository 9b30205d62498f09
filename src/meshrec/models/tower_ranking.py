"""Two-tower model with the interface of next-item models, for the trainer."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshrec.models.item_frequency import ItemFrequency
from meshrec.models.next_item import CHUNK, ItemChunk, TopItems, evaluate_targets, last_ids, top_items
from meshrec.models.similarity import DotProduct
from meshrec.models.step_samples import StepSamples
from meshrec.models.trends import TrendScores
from meshrec.models.two_tower import TwoTower, in_batch_losses
from meshrec.sparse import KeyedJaggedTensor

# B samples, V vector width


class TowerRanking(nn.Module):
    """Two-tower model for the trainer: an in-batch loss in training, and ranks among all items in evaluation.

    The training loss compares a sample's target with the targets in all samples of the step, on all ranks.

    Frequent items are also frequent among these targets. Without a correction, the model learns to avoid
    popular items, and retrieves worse than a list with the most popular items. The loss is therefore
    corrected for item frequency, with shares estimated from the steps.

    Args:
        two_tower: The towers.
        item: Feature with the target item, a single ID per sample.
        catalogue: The catalog: a sample per item, with all features that the item tower reads. The IDs in
            the feature ``item`` ascend.
        seen: Feature with items that must not be recommended again. None: all items are ranked.
        temperature: Number by which dot products are divided.
        trends: Term that is added to the scores of the catalog's items. None: no term.

    Raises:
        ValueError: The catalog lacks a feature that the item tower reads.
    """

    def __init__(
        self,
        two_tower: TwoTower,
        *,
        item: str,
        catalogue: KeyedJaggedTensor,
        seen: str | None = None,
        temperature: float = 0.05,
        trends: TrendScores | None = None,
    ) -> None:
        super().__init__()
        missing = sorted({*two_tower.item_features} - {*catalogue.keys()})
        if missing:
            raise ValueError(
                f"the catalogue has {catalogue.keys()} and lacks {missing}, which the item tower sees. Add "
                "them, or leave them out of item_features."
            )
        self.model = two_tower
        self.similarity = DotProduct(temperature=temperature)
        self._item, self._seen, self._temperature = item, seen, temperature
        # Plain attributes, not buffers: the catalogue is data, and does not belong in checkpoints.
        self._catalogue, self._ids_I = catalogue, catalogue[item].values().long()
        self.trends = trends
        self.frequency = ItemFrequency(catalogue.stride())
        self.samples = StepSamples()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the loss per sample and, in evaluation mode, also the target's rank and ties.

        Args:
            dense_features: Dense values, [B, dense_in_features].
            sparse_features: IDs for all features.

        Returns:
            In training mode, [B, 2]: a column with the in-batch loss, and a column with zeros. In evaluation
            mode, [B, 3]: loss over all ranked items, rank and number of ties, see `evaluate_targets`.
        """
        query, item = self.model(dense_features, sparse_features)
        ids = last_ids(sparse_features[self._item])
        if self.training:
            (items, all_ids), first = self.samples(item, ids)
            # Frequencies are kept by catalogue index, not by ID.
            index = torch.searchsorted(self._ids_I.to(ids.device), all_ids)
            losses = in_batch_losses(
                query,
                items,
                temperature=self._temperature,
                item_ids_I=all_ids,
                log_q_I=self.frequency(index),
                first=first,
            )
            # Rank 0 stands for "not ranked": training does not score the whole catalog.
            return torch.stack([losses, torch.zeros_like(losses)], dim=1)
        seen = None if self._seen is None else sparse_features[self._seen]
        return evaluate_targets(
            query,
            item,
            ids,
            self._item_chunks(ids.device),
            seen=seen,
            similarity=self.similarity,
            trends=self.trends,
        )

    def recommend(
        self, sparse_features: KeyedJaggedTensor, k: int, *, keep_seen: bool = False, seen: str | None = None
    ) -> TopItems:
        """Return the K items with the highest scores per sample; see `HistoryModel.recommend`.

        Args:
            sparse_features: IDs for the query features.
            k: Number of items to recommend, K.
            keep_seen: Whether to recommend items that the user has seen, too.
            seen: Feature with the seen items; None: the feature given to the constructor, if any.

        Raises:
            ValueError: The query tower reads dense values.
        """
        if self.model.num_dense:
            raise ValueError(
                f"the query tower reads {self.model.num_dense} dense values, and recommendations have none. "
                "Train the towers without numbers."
            )
        name = self._seen if seen is None else seen
        hidden = None if name is None or keep_seen else sparse_features[name]
        # The tower has no dense inputs, as checked above.
        dense = sparse_features.values().new_empty(sparse_features.stride(), 0, dtype=torch.float32)
        query = self.model.embed_queries(dense, sparse_features)
        chunks = self._item_chunks(query.device)
        return top_items(query, chunks, k, seen=hidden, similarity=self.similarity, trends=self.trends)

    def item_vectors(self) -> Tensor:
        """Return the vectors for all items, in catalog order, [I, V]."""
        return torch.cat([chunk.vectors_CD for chunk in self._item_chunks(self._ids_I.device)])

    def _item_chunks(self, device: torch.device) -> Iterator[ItemChunk]:
        """Iterate over the catalog, and compute item vectors, `CHUNK` items at a time."""
        for first in range(0, self._catalogue.stride(), CHUNK):
            features = _slice_samples(self._catalogue, first, first + CHUNK).to(device)
            yield ItemChunk(features[self._item].values().long(), self.model.embed_items(features))


def _slice_samples(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    """Return the samples ``first`` to ``last``, exclusive."""
    parts = [(features[key].offsets(), features[key]) for key in features.keys()]  # noqa: SIM118
    # The last chunk may be smaller.
    last = min(last, features.stride())
    return KeyedJaggedTensor(
        list(features.keys()),
        torch.cat([bags.values()[int(offsets[first]) : int(offsets[last])] for offsets, bags in parts]),
        lengths=torch.cat([bags.lengths()[first:last] for _, bags in parts]),
        stride=last - first,
    )
