"""Two towers in the form that the trainer needs: in-batch loss for training, ranks for evaluation."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshrec.models.item_frequency import ItemFrequency
from meshrec.models.next_item import CHUNK, ItemChunk, TopItems, judge_targets, last_ids, top_items
from meshrec.models.similarity import DotProduct
from meshrec.models.step_samples import StepSamples
from meshrec.models.two_tower import TwoTower, in_batch_losses
from meshrec.sparse import KeyedJaggedTensor

# B samples, V vector width


class TowerRanking(nn.Module):
    """Two-tower model that returns each sample's in-batch loss and the rank of its item among all items.

    The loss compares a sample's item with those of all samples of the step, on all ranks. It is corrected for
    the frequency of items in batches, see `TwoTowerTrain`.

    Args:
        two_tower: the towers.
        item: name of the feature that holds the one item of a sample.
        catalogue: one sample for each item, with all features of the item tower; the IDs of ``item`` ascend.
        seen: name of the feature with items that must not be recommended again. None: all items are ranked.
        temperature: divisor of the dot products.

    Raises:
        ValueError: the catalogue lacks a feature of the item tower.
    """

    def __init__(
        self,
        two_tower: TwoTower,
        *,
        item: str,
        catalogue: KeyedJaggedTensor,
        seen: str | None = None,
        temperature: float = 0.05,
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
        self._catalogue, self._ids_I = catalogue, catalogue[item].values().long()
        self.frequency = ItemFrequency(catalogue.stride())
        self.samples = StepSamples()

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the loss and the rank of each sample's item, [B, 2]; see `meshrec.models.next_item`."""
        query, item = self.model(dense_features, sparse_features)
        ids = last_ids(sparse_features[self._item])
        if self.training:
            (items, every), first = self.samples(item, ids)
            at = torch.searchsorted(self._ids_I.to(ids.device), every)
            losses = in_batch_losses(
                query,
                items,
                temperature=self._temperature,
                item_ids_I=every,
                log_q_I=self.frequency(at),
                first=first,
            )
            return torch.stack([losses, torch.zeros_like(losses)], dim=1)
        seen = None if self._seen is None else sparse_features[self._seen]
        return judge_targets(
            query, item, ids, self._chunks(ids.device), seen=seen, similarity=self.similarity
        )

    def recommend(self, sparse_features: KeyedJaggedTensor, k: int, *, keep_seen: bool = False) -> TopItems:
        """Return the K best items for each sample; see `HistoryModel.recommend`.

        Raises:
            ValueError: the query tower reads dense values.
        """
        if self.model.num_dense:
            raise ValueError(
                f"the query tower reads {self.model.num_dense} dense values, and recommendations have none. "
                "Train the towers without numbers."
            )
        seen = None if self._seen is None or keep_seen else sparse_features[self._seen]
        dense = sparse_features.values().new_empty(sparse_features.stride(), 0, dtype=torch.float32)
        query = self.model.embed_queries(dense, sparse_features)
        chunks = self._chunks(query.device)
        return top_items(query, chunks, k, seen=seen, similarity=self.similarity)

    def item_vectors(self) -> Tensor:
        """Return the vectors of all items, [I, V], in the order of the catalogue."""
        return torch.cat([each.vectors_CD for each in self._chunks(self._ids_I.device)])

    def _chunks(self, device: torch.device) -> Iterator[ItemChunk]:
        for first in range(0, self._catalogue.stride(), CHUNK):
            features = _samples(self._catalogue, first, first + CHUNK).to(device)
            yield ItemChunk(features[self._item].values().long(), self.model.embed_items(features))


def _samples(features: KeyedJaggedTensor, first: int, last: int) -> KeyedJaggedTensor:
    """Return the samples ``[first, last)``."""
    parts = [(features[key].offsets(), features[key]) for key in features.keys()]  # noqa: SIM118
    last = min(last, features.stride())
    return KeyedJaggedTensor(
        list(features.keys()),
        torch.cat([each.values()[int(offsets[first]) : int(offsets[last])] for offsets, each in parts]),
        lengths=torch.cat([each.lengths()[first:last] for _, each in parts]),
        stride=last - first,
    )
