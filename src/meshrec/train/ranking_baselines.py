"""Baselines of next-item models: popularity, item-kNN, and the Markov chain of the last item."""

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meshrec.data import Batch
from meshrec.metrics import place_metrics
from meshrec.models.next_item import ItemChunk, judge_targets, last_ids
from meshrec.sparse import JaggedTensor
from meshrec.train.baselines import Baseline
from meshrec.train.linear import Tell
from meshrec.train.losses import NextItem

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

# B samples, I items of the catalogue

_BATCH = 512
_ROWS = 1024
_NEIGHBOURS = (20, 100, 500)
_SMOOTHING = 1e-6
"""Share of popularity in every score, which orders the items that a baseline knows nothing of."""
Scores = Callable[[Batch], Any]
"""A function that returns scores of at least 0 for each sample and item of the catalogue, [B, I]."""


def ranking_baselines(
    dataset: "Dataset", tell: Tell = lambda done: None, *, loss: NextItem | None = None
) -> Iterator[Baseline]:
    """Yield baselines one after the other, judged on the same samples as the model and by the same ranks.

    - Popularity: how often an item is a target in the training data.
    - Item-kNN: the sum of the cosines between an item and the items that the user had; an item has cosines
      with its most similar items only, 20, 100 or 500, by validation NDCG. Two items are similar if the same
      users had them. Sarwar et al., "Item-based collaborative filtering recommendation algorithms" (2001).
    - Markov chain: how often an item follows the user's last one in training.

    The users of item-kNN are those of the validation data, with the items that they had before.

    Raises:
        ValueError: the dataset names no item, or has no catalogue or no validation data.
    """
    if dataset.item is None or dataset.catalogue is None or dataset.validation is None:
        raise ValueError(
            f"dataset {dataset.name!r} names no item to rank among a catalogue on validation data. Set "
            "Dataset.item, catalogue and validation."
        )
    found = _Judge(dataset, loss or NextItem(), tell)
    yield Baseline("item popularity", found.quality(lambda batch: np.zeros((len(batch), 1))))
    yield max((found.by_neighbours(num) for num in _NEIGHBOURS), key=found.of_validation)
    yield Baseline("last-item Markov chain", found.quality(found.transitions()))


class _Judge:
    """The training data as counts, and the evaluation of scores.

    Args:
        dataset: the data.
        loss: says which metrics.
        tell: is called with the finished share of the work.
    """

    def __init__(self, dataset: "Dataset", loss: NextItem, tell: Tell) -> None:
        assert dataset.catalogue is not None
        assert dataset.item is not None
        self._dataset, self._loss, self._tell, self._item = dataset, loss, tell, dataset.item
        self._ids_I = dataset.catalogue[dataset.item].values().long()
        (self._history,) = (each.name for each in dataset.features if each.sequence and each.num_embeddings)
        counts_I = torch.zeros(len(self._ids_I), dtype=torch.float64)
        for batch in dataset.train.batches(_BATCH):
            ids = batch.sparse[self._item]
            chosen = torch.repeat_interleave(batch.labels, ids.lengths()).double()
            counts_I += torch.bincount(self._places(ids.values()), chosen, minlength=len(counts_I))
        self._popularity_I = (counts_I + 1e-3) / (counts_I + 1e-3).sum()

    def of_validation(self, found: Baseline) -> float:
        """Return the NDCG on validation data."""
        return found.quality["validation"][f"ndcg@{self._loss.ks[0]}"]

    def quality(self, scores: Scores) -> dict[str, dict[str, float]]:
        """Return the metrics of scores on validation and test data."""
        readers = {"validation": self._dataset.validation, "test": self._dataset.test}
        return {name: self._metrics(each, scores) for name, each in readers.items() if each is not None}

    def _metrics(self, reader: "Reader", scores: Scores) -> dict[str, float]:
        found = []
        for number, batch in enumerate(reader.batches(_BATCH)):
            self._tell(min(1.0, number * _BATCH / reader.num_samples))
            of_items = torch.from_numpy(scores(batch)).double()
            of_items = of_items / of_items.sum(1, keepdim=True).clamp(min=1e-300)
            logs_BI = (of_items + _SMOOTHING * self._popularity_I).log()
            # The "vector" of an item is its column, that of a sample a row of the identity.
            target_B, one = last_ids(batch.sparse[self._item]), torch.eye(len(batch), dtype=torch.float64)
            own_BB = logs_BI[:, self._places(target_B)].T
            seen = None if self._dataset.seen is None else batch.sparse[self._dataset.seen]
            chunks = iter([ItemChunk(self._ids_I, logs_BI.T)])
            judged = judge_targets(one, own_BB, target_B, chunks, seen=seen)
            found.append(judged[batch.labels > 0])
        self._tell(1.0)
        losses, places = torch.cat(found).unbind(1)
        return place_metrics(losses, places, ks=self._loss.ks, gather=False)

    def by_neighbours(self, num: int) -> Baseline:
        """Return the quality of item-kNN with so many neighbours."""
        from scipy import sparse

        assert self._dataset.validation is not None
        rows = sparse.vstack([self._had(batch) for batch in self._dataset.validation.batches(_BATCH)])
        norms_I = np.sqrt(np.asarray(rows.sum(0)).ravel())
        unit = (rows @ sparse.diags(1 / np.maximum(norms_I, 1e-9))).tocsc()
        kept = []
        for first in range(0, unit.shape[1], _ROWS):
            cosines = (unit[:, first : first + _ROWS].T @ unit).toarray()
            at = np.arange(len(cosines))
            cosines[at, first + at] = 0.0
            least = np.partition(cosines, -min(num, cosines.shape[1]), axis=1)[:, -min(num, cosines.shape[1])]
            kept.append(sparse.csr_matrix(np.where(cosines >= least[:, None], cosines, 0.0)))
        nearest = sparse.vstack(kept).tocsr()
        return Baseline("item-kNN", self.quality(lambda batch: (self._had(batch) @ nearest).toarray()))

    def transitions(self) -> Scores:
        """Return scores by how often an item followed the last one in training."""
        from scipy import sparse

        before, after = [], []
        for batch in self._dataset.train.batches(_BATCH):
            history, targets = batch.sparse[self._history], batch.sparse[self._item]
            # The last target follows the last item.
            shift_B = history.offsets()[1:] - targets.offsets()[1:]
            at_T = torch.arange(len(targets.values())) + torch.repeat_interleave(shift_B, targets.lengths())
            before.append(self._places(history.values()[at_T]))
            after.append(self._places(targets.values()))
        at = (torch.cat(before).numpy(), torch.cat(after).numpy())
        size = (len(self._ids_I), len(self._ids_I))
        counts = sparse.coo_matrix((np.ones(len(at[0])), at), shape=size).tocsr()

        def scores(batch: Batch) -> Any:
            history = batch.sparse[self._history]
            found = counts[self._places(last_ids(history)).numpy()].toarray()
            found[history.lengths().numpy() == 0] = 0.0
            return found

        return scores

    def _had(self, batch: Batch) -> Any:
        """Return which items each user had, as a sparse matrix [B, I] of 0 and 1."""
        from scipy import sparse

        bags: JaggedTensor = batch.sparse[self._dataset.seen or self._history]
        columns = self._places(bags.values()).numpy()
        ends = np.concatenate([[0], np.cumsum(bags.lengths().numpy())])
        found = sparse.csr_matrix(
            (np.ones(len(columns)), columns, ends), shape=(len(batch), len(self._ids_I))
        )
        found.sum_duplicates()
        found.data[:] = 1.0
        return found

    def _places(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the places of IDs in the catalogue."""
        return torch.searchsorted(self._ids_I, ids.long()).clamp(max=len(self._ids_I) - 1)
