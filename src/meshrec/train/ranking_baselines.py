"""Evaluate baselines for next-item data: popularity, item-kNN, Markov chain, and repeated items."""

import logging
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from meshrec.data import Batch
from meshrec.models.next_item import NO_ITEM, last_ids
from meshrec.sparse import JaggedTensor
from meshrec.train.baselines import Baseline
from meshrec.train.evaluation import Scored
from meshrec.train.linear import Tell
from meshrec.train.losses import NextItem

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

_logger = logging.getLogger("meshrec")

# B samples, I items of the catalogue

# Maximum number of samples per batch.
_BATCH = 512
# Maximum number of scores that are not 0, per block of samples or items: 200 MB as a sparse matrix.
_BLOCK = 1 << 24
# Maximum number of (user, item) pairs from which item-kNN learns: about 1 GB with SciPy's copies.
_MAX_PAIRS = 1 << 24
# Number of transitions that are collected before they are added to the counts.
_TRANSITIONS = 1 << 20
# Options that validation data selects from; see `ranking_baselines`.
_NEIGHBOURS = (20, 100, 500)
_HALF_LIVES = (2.0, 8.0, 32.0)
_SMOOTHING = 1e-6
"""Factor of the popularity that is added to every score. It orders items with equal scores, such as 0."""
Scores = Callable[[Batch], Any]
"""Function from a batch to nonnegative scores of all catalog items, a sparse matrix [B, I]."""


def ranking_baselines(
    dataset: "Dataset", tell: Tell = lambda share: None, *, loss: NextItem | None = None
) -> Iterator[Baseline]:
    """Evaluate ranking baselines, and yield the result of each.

    Baselines rank the same items for the same samples as the model does. A baseline scores all catalog items
    for a user:

    - Item popularity: how often the item is a target in the training data.
    - Item-kNN: the sum of cosine similarities between the item and the user's items. Items are similar if the
      same users had them. An item keeps only the similarities with the 20, 100 or 500 most similar items. The
      validation NDCG selects this number. See Sarwar et al., "Item-based collaborative filtering
      recommendation algorithms" (2001).
    - Markov chain: how often the item followed the user's last item in the training data.
    - Repeated items, only if the ranking includes items from the user's past: how often the item is in the
      user's history. In a second variant, an occurrence counts half as much for every 2, 8 or 32 later items.
      The validation NDCG selects this number.

    Item-kNN learns from the earlier items of the users in the validation data. Above 16 million items in
    all, only every second, fourth or eighth user is used, and so on. The log then states the number of users.

    Args:
        dataset: the dataset.
        tell: called with the finished share for the current baseline, from 0 to 1.
        loss: objective, which determines the metrics; None: `NextItem`.

    Raises:
        ValueError: the dataset names no item, or has no catalog or no validation data.
    """
    if dataset.item is None or dataset.catalogue is None or dataset.validation is None:
        raise ValueError(
            f"dataset {dataset.name!r} names no item to rank among a catalogue on validation data. Set "
            "Dataset.item, catalogue and validation."
        )
    evaluator = _BaselineEvaluator(dataset, loss or NextItem(), tell)
    yield Baseline("item popularity", evaluator.quality(evaluator.zeros), {})
    # Validation data selects among the variants, as it selects a model's best weights.
    yield max((evaluator.by_neighbours(num) for num in _NEIGHBOURS), key=evaluator.of_validation)
    yield Baseline("last-item Markov chain", evaluator.quality(evaluator.transitions()), {})
    if dataset.seen is None:
        yield evaluator.by_history("own most frequent items", float("inf"))
        recent = [evaluator.by_history("own recent items", half_life) for half_life in _HALF_LIVES]
        yield max(recent, key=evaluator.of_validation)


class _BaselineEvaluator:
    """Evaluator of baselines, fitted to training data, on validation and test data."""

    def __init__(self, dataset: "Dataset", loss: NextItem, tell: Tell) -> None:
        assert dataset.catalogue is not None
        assert dataset.item is not None
        self._dataset, self._loss, self._tell, self._item = dataset, loss, tell, dataset.item
        # Ascending catalog IDs, in which _indices searches.
        self._ids_I = dataset.catalogue[dataset.item].values().long()
        # Rows per block of scores, of which all may differ from 0.
        self._block = max(_BLOCK // len(self._ids_I), 1)
        # Exactly one sequence feature has a table: the item history. Times have none.
        (self._history,) = (
            feature.name for feature in dataset.features if feature.sequence and feature.num_embeddings
        )
        counts_I = torch.zeros(len(self._ids_I), dtype=torch.float64)
        for batch in dataset.train.batches(_BATCH):
            ids = batch.sparse[self._item]
            weights = torch.repeat_interleave(batch.labels, ids.lengths()).double()
            counts_I += torch.bincount(self._indices(ids.values()), weights, minlength=len(counts_I))
        # Additive smoothing keeps the logarithm finite for items that never occur.
        popularity_I = (counts_I + 1e-3) / (counts_I + 1e-3).sum()
        self._ranking = _SparseRanking(self._ids_I.numpy(), _SMOOTHING * popularity_I.numpy())
        # Similarities of item-kNN, with the largest number of neighbors; computed when they are first needed.
        self._nearest: Any = None

    def of_validation(self, baseline: Baseline) -> float:
        """Return a baseline's validation NDCG, at the loss's first cut-off."""
        return baseline.quality["validation"][f"ndcg@{self._loss.ks[0]}"]

    def quality(self, scores: Scores) -> dict[str, dict[str, float]]:
        """Evaluate a baseline on validation and test data. Return metrics by data part."""
        readers = {"validation": self._dataset.validation, "test": self._dataset.test}
        return {name: self._metrics(reader, scores) for name, reader in readers.items() if reader is not None}

    def _metrics(self, reader: "Reader", scores: Scores) -> dict[str, float]:
        """Rank all items for the samples of a reader by scores, and return the metrics."""
        scored = []
        batch_size = min(_BATCH, self._block)
        for number, batch in enumerate(reader.batches(batch_size)):
            self._tell(min(1.0, number * batch_size / reader.num_samples))
            seen = None if self._dataset.seen is None else batch.sparse[self._dataset.seen]
            evaluated = self._ranking.evaluate(scores(batch), last_ids(batch.sparse[self._item]), seen)
            scored.append(Scored(None, evaluated, batch.labels, batch.weights))
        self._tell(1.0)
        _, outputs, labels, weights = Scored.concat(scored)
        return self._loss.metrics(outputs, labels, weights, gather=False)

    def zeros(self, batch: Batch) -> Any:
        """Return the score 0 for all items."""
        from scipy import sparse

        return sparse.csr_matrix((len(batch), len(self._ids_I)))

    def by_neighbours(self, num: int) -> Baseline:
        """Evaluate item-kNN, in which an item has similarities with the ``num`` most similar items only."""
        if self._nearest is None:
            self._nearest = self._similarities(max(_NEIGHBOURS))
        nearest = _largest_in_rows(self._nearest, num)
        return Baseline("item-kNN", self.quality(lambda batch: self._items_of_batch(batch) @ nearest), {})

    def _similarities(self, num: int) -> Any:
        """Return the cosine similarities of every item to the ``num`` most similar items, sparse [I, I]."""
        from scipy import sparse

        rows = self._items_of_users()
        norms_I = np.sqrt(np.asarray(rows.sum(0)).ravel())
        unit = (rows @ sparse.diags(1 / np.maximum(norms_I, 1e-9))).tocsr()
        # Up to 1 GB, which the blocks below can use.
        del rows
        # Compute the item similarities a block of rows at a time, and keep only the largest in a row.
        by_item, blocks = unit.tocsc(), []
        for first in range(0, unit.shape[1], self._block):
            cosines = (by_item[:, first : first + self._block].T @ unit).tocoo()
            # An item is not a neighbor of itself.
            is_other = cosines.row + first != cosines.col
            pairs = cosines.row[is_other], cosines.col[is_other]
            cosines = sparse.csr_matrix((cosines.data[is_other], pairs), shape=cosines.shape)
            blocks.append(_largest_in_rows(cosines, num))
        return sparse.vstack(blocks).tocsr()

    def by_history(self, name: str, half_life: float) -> Baseline:
        """Evaluate the baseline that ranks items by their weighted count in the user's history.

        Args:
            half_life: number of later items after which the weight of a history item is halved.
        """
        from scipy import sparse

        def scores(batch: Batch) -> Any:
            history = batch.sparse[self._history]
            ends_B, lengths_B = history.offsets()[1:], history.lengths()
            # Number of later items in the same history: 0 for the last item.
            age_N = torch.repeat_interleave(ends_B, lengths_B) - 1 - torch.arange(len(history.values()))
            weights_N = torch.exp2(-age_N / half_life).double().numpy()
            columns_N, offsets = self._indices(history.values()).numpy(), history.offsets().numpy()
            shape = (len(batch), len(self._ids_I))
            return sparse.csr_matrix((weights_N, columns_N, offsets), shape=shape)

        return Baseline(name, self.quality(scores), {})

    def transitions(self) -> Scores:
        """Count transitions in the training data, and return the Markov chain's score function.

        The function maps a batch to scores [B, I]. The score of an item is how often it followed the user's
        last item in the training data. All scores are 0 for a user without a history.
        """
        from scipy import sparse

        size = (len(self._ids_I), len(self._ids_I))
        counts, before, after, num = sparse.csr_matrix(size, dtype=np.int32), [], [], 0
        for batch in self._dataset.train.batches(_BATCH):
            history, targets = batch.sparse[self._history], batch.sparse[self._item]
            # Targets and history end at the same position: the last target follows the last history item.
            shift_B = history.offsets()[1:] - targets.offsets()[1:]
            at_T = torch.arange(len(targets.values())) + torch.repeat_interleave(shift_B, targets.lengths())
            before.append(self._indices(history.values()[at_T]))
            after.append(self._indices(targets.values()))
            num += len(at_T)
            # Counts take memory per distinct pair. An addition copies all counts, so additions must be few.
            if num >= max(_TRANSITIONS, counts.nnz // 8):
                counts, before, after, num = counts + _transition_counts(before, after, size), [], [], 0
        if num:
            counts = counts + _transition_counts(before, after, size)

        def scores(batch: Batch) -> Any:
            history = batch.sparse[self._history]
            rows = counts[self._indices(last_ids(history)).numpy()]
            # Without a history, there is no last item. `last_ids` has given some ID for it.
            return sparse.diags((history.lengths() > 0).double().numpy()) @ rows

        return scores

    def _items_of_users(self) -> Any:
        """Return the items that users in the validation data had earlier, as a sparse 0/1 matrix [users, I].

        If the matrix would have more than `_MAX_PAIRS` entries, only every second, fourth or eighth user, and
        so on, is included.
        """
        from scipy import sparse

        assert self._dataset.validation is not None
        every, first, num, parts = 1, 0, 0, []
        for batch in self._dataset.validation.batches(_BATCH):
            # Take the users whose number is a multiple of `every`, which doubles when memory is full.
            part = self._items_of_batch(batch)[-first % every :: every]
            first, num = first + len(batch), num + part.nnz
            parts.append(part)
            # Drop every second user until the remaining pairs fit.
            while num > _MAX_PAIRS and sum(part.shape[0] for part in parts) > 1:
                parts, every = [sparse.vstack(parts).tocsr()[::2]], 2 * every
                num = parts[0].nnz
        if every > 1:
            _logger.info(
                "item-kNN learns from %d of %d users, evenly spaced, who have at most %d items in all",
                sum(part.shape[0] for part in parts),
                first,
                _MAX_PAIRS,
            )
        return sparse.vstack(parts)

    def _items_of_batch(self, batch: Batch) -> Any:
        """Return the items that the users in a batch had, as a sparse 0/1 matrix [B, I]."""
        from scipy import sparse

        bags: JaggedTensor = batch.sparse[self._dataset.seen or self._history]
        columns = self._indices(bags.values()).numpy()
        ends = np.concatenate([[0], np.cumsum(bags.lengths().numpy())])
        matrix = sparse.csr_matrix(
            (np.ones(len(columns)), columns, ends), shape=(len(batch), len(self._ids_I))
        )
        # A user may have had an item several times; 0/1 entries count it once.
        matrix.sum_duplicates()
        matrix.data[:] = 1.0
        return matrix

    def _indices(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the catalog index of every item ID."""
        # An ID that is not in the catalog gets the index of a neighbor; `clamp` keeps it in range.
        return torch.searchsorted(self._ids_I, ids.long()).clamp(max=len(self._ids_I) - 1)


class _SparseRanking:
    """Ranking of all items by ``score / sum of the sample's scores + prior``, where most scores are 0.

    The work per sample does not grow with the catalog. An item with the score 0 has only the prior, so these
    items are counted by binary search in the sorted priors. Items with other scores, and items that are not
    ranked, are counted one by one.
    """

    def __init__(self, ids_I: Any, prior_I: Any) -> None:
        self._ids_I, self._prior_I = ids_I, prior_I
        self._sorted_I, self._total = np.sort(prior_I), prior_I.sum()

    def evaluate(self, scores: Any, target_B: torch.Tensor, seen: JaggedTensor | None) -> torch.Tensor:
        """Return loss, rank and ties for every sample's target; see `meshrec.models.evaluate_targets`.

        The loss is that of a softmax over the logarithms of the ranked values.

        Args:
            scores: Nonnegative scores, a sparse matrix [B, I].
            target_B: Target IDs; `NO_ITEM` for a sample without a target.
            seen: B bags with item IDs that are not ranked, besides the target. None: all items are ranked.
        """
        num_items = len(self._ids_I)
        scores = scores.tocsr().astype(np.float64)
        scores.sum_duplicates()
        sums_B = np.maximum(np.asarray(scores.sum(1)).ravel(), 1e-300)
        num_samples, sample_B = len(sums_B), np.arange(len(sums_B))
        sample_N = np.repeat(sample_B, np.diff(scores.indptr))
        # A pair of a sample and an item is a single integer, ascending like the entries of a matrix.
        pair_N = sample_N * num_items + scores.indices
        value_N = scores.data / sums_B[sample_N] + self._prior_I[scores.indices]
        position_B, is_item_B = _search(self._ids_I, target_B.numpy())
        target_pair_B = sample_B * num_items + position_B
        index_B, is_scored_B = _search(pair_N, target_pair_B)
        target_value_B = self._prior_I[position_B]
        target_value_B[is_scored_B] = value_N[index_B[is_scored_B]]
        # Pairs that do not compete with the target: items that are not ranked, and the target itself.
        excluded = [target_pair_B[is_item_B]]
        if seen is not None:
            position_S, is_item_S = _search(self._ids_I, seen.values().numpy())
            sample_S = np.repeat(sample_B, seen.lengths().numpy())
            excluded.append((sample_S * num_items + position_S)[is_item_S])
        pair_O = np.unique(np.concatenate(excluded))
        index_O, is_scored_O = _search(pair_N, pair_O)
        competes_N = np.ones(len(pair_N), bool)
        competes_N[index_O[is_scored_O]] = False
        # Items that must not be counted by their priors: they have another value, or do not compete.
        pair_O = pair_O[~is_scored_O]
        other_sample = np.concatenate([sample_N, pair_O // num_items])
        other_value = self._prior_I[np.concatenate([scores.indices, pair_O % num_items])]
        sample_N, value_N = sample_N[competes_N], value_N[competes_N]

        def per_sample(samples: Any, values: Any = None) -> Any:
            """Return the sum of values, or the number of entries, per sample."""
            return np.bincount(samples, values, minlength=num_samples)

        right_B = np.searchsorted(self._sorted_I, target_value_B, side="right")
        left_B = np.searchsorted(self._sorted_I, target_value_B, side="left")
        above_B = num_items - right_B - per_sample(other_sample, other_value > target_value_B[other_sample])
        above_B = above_B + per_sample(sample_N, value_N > target_value_B[sample_N])
        ties_B = right_B - left_B - per_sample(other_sample, other_value == target_value_B[other_sample])
        ties_B = ties_B + per_sample(sample_N, value_N == target_value_B[sample_N])
        totals_B = (
            self._total
            - per_sample(other_sample, other_value)
            + per_sample(sample_N, value_N)
            + target_value_B
        )
        loss_B = np.log(totals_B) - np.log(target_value_B)
        columns = np.stack([loss_B, 1 + above_B + ties_B / 2, ties_B], axis=1)
        return torch.from_numpy(columns) * (target_B != NO_ITEM)[:, None]


def _search(ascending: Any, values: Any) -> tuple[Any, Any]:
    """Return the index of every value in an ascending array, and whether it is there."""
    if not len(ascending):
        return np.zeros(len(values), np.int64), np.zeros(len(values), bool)
    index = np.searchsorted(ascending, values).clip(max=len(ascending) - 1)
    return index, ascending[index] == values


def _largest_in_rows(matrix: Any, num: int) -> Any:
    """Return a sparse matrix with only the ``num`` largest entries per row, and entries equal to these."""
    from scipy import sparse

    matrix = matrix.tocsr()
    is_largest = np.ones(matrix.nnz, bool)
    for row in np.flatnonzero(np.diff(matrix.indptr) > num):
        entries = slice(matrix.indptr[row], matrix.indptr[row + 1])
        values = matrix.data[entries]
        is_largest[entries] = values >= np.partition(values, -num)[-num]
    rows = np.repeat(np.arange(matrix.shape[0]), np.diff(matrix.indptr))
    pairs = rows[is_largest], matrix.indices[is_largest]
    return sparse.csr_matrix((matrix.data[is_largest], pairs), shape=matrix.shape)


def _transition_counts(before: list[torch.Tensor], after: list[torch.Tensor], size: tuple[int, int]) -> Any:
    """Return a sparse matrix [I, I] whose entry (i, j) is how often item j follows item i."""
    from scipy import sparse

    pairs = (torch.cat(before).numpy(), torch.cat(after).numpy())
    return sparse.coo_matrix((np.ones(len(pairs[0]), np.int32), pairs), shape=size).tocsr()
