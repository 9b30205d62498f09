"""Explain a trained model: permutation importance of every feature, and metrics by feature value."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.batch import Batch
from meshrec.data.samples import gather_ranges
from meshrec.metrics import sliced_metrics
from meshrec.metrics.named import leading_metric, metric_of
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.train.evaluation import DEFAULT_LOSS, concat_weights, padded_logits
from meshrec.train.losses import BinaryCrossEntropy, Loss, NextItem
from meshrec.train.ranks import Ranks

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

_SAMPLES = 8192
"""Samples to use, over all ranks, from the first rows."""
# Samples per rank and batch. With more than 8 ranks, a batch per rank already exceeds `_SAMPLES`.
_BATCH = 1024
# Permutations to evaluate; each one scores all samples again.
_MAX_FEATURES = 64
# Values per feature, and features, for which metrics by value are computed.
_MAX_VALUES = 8
_MAX_SLICED = 6
_COVERED = 0.5
"""A feature gets metrics by value only if the most frequent values cover at least this share of samples."""


class Explanation(NamedTuple):
    """Permutation importance, and metrics by feature value, on a part of the validation data.

    Attributes:
        samples: number of samples used.
        metric: the metric by which importance is measured: AUC, NDCG@k, or the loss.
        importance: importance by feature, in decreasing order. The importance is the amount by which the
            metric becomes worse if the feature's values are permuted among the samples.
        slices: metrics by feature, table row and metric name, for the most important features. An entry has
            the metrics over the samples with this row. Only the most frequent rows have an entry. Row -1
            stands for all other rows. Empty unless the labels are clicks.
    """

    samples: int
    metric: str
    importance: dict[str, float]
    slices: dict[str, dict[int, dict[str, float]]]

    def to_json(self, names: "dict[str, dict[int, str]] | None" = None) -> dict[str, Any]:
        """Convert to plain JSON types.

        Args:
            names: names of table rows, by feature and row. A row without a name is called "row NUMBER".
        """
        # JSON has no integer keys, and a row number means nothing to a reader, so rows are named by value.
        slices = {
            feature: {
                "others" if row < 0 else (names or {}).get(feature, {}).get(row, f"row {row}"): metrics
                for row, metrics in rows.items()
            }
            for feature, rows in self.slices.items()
        }
        return self._asdict() | {"slices": slices}


def explain(
    model: nn.Module, dataset: "Dataset", reader: "Reader", ranks: Ranks, *, loss: Loss = DEFAULT_LOSS
) -> Explanation | None:
    """Compute permutation importance and metrics by feature value. Collective.

    The importance of a feature is the loss in quality if the feature's values are permuted among the samples
    (Breiman, "Random forests", 2001). The model should not have been fitted to these samples. Every rank
    permutes values within its batches. Redundant features have a low importance, because they can replace
    each other. Histories are permuted twice: among samples, and within every sample, which shows the
    importance of their order.

    Args:
        model: a model called as ``model(dense, sparse)``; in training mode afterwards.
        dataset: the dataset, which names the features.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        loss: the recipe's loss. Importance is measured by the metric that selects the best weights, or by
            the loss itself without such a metric.

    Returns:
        The explanation. None if the metric is undefined on the samples, for example if all labels are of one
        class.
    """
    batches = list(_first_batches(reader, ranks))
    model.eval()
    try:
        # Metrics of the unchanged data, against which permutations are compared.
        plain = _logits(model, batches, ranks)
        labels = torch.cat([batch.labels for batch in batches])
        weights = concat_weights([(batch.weights, len(batch)) for batch in batches])

        def metrics(logits: Tensor) -> dict[str, float]:
            """Compute the metrics of the loss from this rank's logits. Collective."""
            return loss.metrics(logits, labels, weights, group=ranks.control)

        # The metrics are collective, so all ranks leave here together.
        before = metrics(plain)
        metric = leading_metric(before) or ("loss" if "loss" in before else None)
        if metric is None:
            return None
        importance = {}
        for name, change in _permutations(dataset, loss)[:_MAX_FEATURES]:
            without = metrics(_logits(model, [change(batch) for batch in batches], ranks))
            # `better` is 1 if larger values of the metric are better, else -1.
            importance[name] = metric_of(metric).better * (before[metric] - without[metric])
    finally:
        model.train()
    ordered = dict(sorted(importance.items(), key=lambda item: -item[1]))
    # Metrics by feature value exist for clicks only.
    has_slices = isinstance(loss, BinaryCrossEntropy)
    names = [feature.name for feature in dataset.features] if has_slices else []
    # Only the most important features get metrics by value; see `_MAX_SLICED`.
    names.sort(key=lambda name: -importance.get(name, 0.0))
    ids = {name: _table_rows(batches, name) for name in names}
    # A rank may have no samples, and then tensors of another shape.
    by_rank = [values for values in ranks.collect((plain, labels, ids, weights)) if len(values[1])]
    plain, labels = (torch.cat([values[part] for values in by_rank]) for part in (0, 1))
    weights = concat_weights([(values[3], len(values[1])) for values in by_rank])
    slices: dict[str, dict[int, dict[str, float]]] = {}
    for name in names:
        rows = [values[2][name] for values in by_rank]
        if all(part is not None for part in rows) and len(slices) < _MAX_SLICED:
            of_feature = _slice_metrics(plain, labels, weights, np.concatenate(rows))
            slices |= {name: of_feature} if of_feature else {}
    return Explanation(len(labels), metric, ordered, slices)


def _permutations(dataset: "Dataset", loss: Loss) -> list[tuple[str, Callable[[Batch], Batch]]]:
    """Return all permutations to evaluate, as pairs (name, function that permutes a batch)."""
    sequences = [feature.name for feature in dataset.features if feature.sequence]
    sets = [feature.name for feature in dataset.features if not feature.sequence]
    if isinstance(loss, NextItem):
        # The item is the target, and seen items are only excluded from a ranking. Neither is an input.
        sets = [name for name in sets if name not in (dataset.item, dataset.seen)]
    # With times, all sequences belong to one history, in which an item and its time have the same position.
    # They must be permuted together.
    groups = [[name] for name in sequences]
    if dataset.times is not None:
        groups = [list(dict.fromkeys([*sequences, dataset.times]))]
        sets = [name for name in sets if name != dataset.times]
    changes: list[tuple[str, Callable[[Batch], Batch]]] = []
    for keys in groups:
        without_times = [key for key in keys if key != dataset.times]
        name = ", ".join(without_times)
        changes.append((name, partial(_permute_bags, keys=keys)))
        changes.append((f"order of {name}", partial(_permute_within_bags, keys=without_times)))
    changes += [(key, partial(_permute_bags, keys=[key])) for key in sets]
    dense_names = list(dataset.dense_names) or [f"dense {index}" for index in range(dataset.num_dense)]
    changes += [(name, partial(_permute_column, column=column)) for column, name in enumerate(dense_names)]
    return changes


def _first_batches(reader: "Reader", ranks: Ranks) -> Iterator[Batch]:
    """Yield this rank's share of the first `_SAMPLES` samples."""
    for number, batch in enumerate(reader.batches(_BATCH, rank=ranks.rank, world_size=ranks.size)):
        if number * _BATCH * ranks.size >= _SAMPLES:
            return
        yield batch


def _logits(model: nn.Module, batches: list[Batch], ranks: Ranks) -> Tensor:
    """Return the logits for all batches, concatenated."""
    return torch.cat([padded_logits(model, batch, _BATCH, ranks) for batch in batches])


def _order(num: int) -> Tensor:
    """Return a random permutation of ``num`` indices. The seed is fixed, so it depends only on ``num``."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(0))


def _permute_bags(batch: Batch, *, keys: Sequence[str]) -> Batch:
    """Permute the bags (ID lists) of some features among the samples, all features in the same order."""
    order = _order(len(batch))
    bags = dict(batch.sparse.to_dict())  # a copy, because the batch keeps its dict
    for key in keys:
        bag = bags[key]
        starts, lengths = bag.offsets()[:-1][order].numpy(), bag.lengths()[order].numpy()
        weights = bag.weights_or_none()
        taken = gather_ranges(
            bag.values().numpy(), starts, lengths, None if weights is None else weights.numpy()
        )
        bags[key] = JaggedTensor(
            torch.from_numpy(taken.values),
            weights=None if taken.weights is None else torch.from_numpy(taken.weights),
            lengths=torch.from_numpy(lengths),
        )
    return Batch(batch.dense, KeyedJaggedTensor.from_jt_dict(bags), batch.labels)


def _permute_within_bags(batch: Batch, *, keys: Sequence[str]) -> Batch:
    """Permute the IDs within every bag of some features.

    Features whose bags have the same lengths get the same order.
    """
    bags = dict(batch.sparse.to_dict())
    for key in keys:
        bag = bags[key]
        samples = torch.repeat_interleave(torch.arange(len(batch)), bag.lengths())
        order = _order(len(samples))
        # A stable sort by sample keeps the random order within each bag.
        order = order[samples[order].argsort(stable=True)]
        weights = bag.weights_or_none()
        bags[key] = JaggedTensor(
            bag.values()[order], weights=None if weights is None else weights[order], lengths=bag.lengths()
        )
    return Batch(batch.dense, KeyedJaggedTensor.from_jt_dict(bags), batch.labels)


def _permute_column(batch: Batch, *, column: int) -> Batch:
    """Permute the values of a dense column among the samples of a batch."""
    dense = batch.dense.clone()
    dense[:, column] = dense[_order(len(batch)), column]
    return Batch(dense, batch.sparse, batch.labels)


def _table_rows(batches: list[Batch], name: str) -> "np.typing.NDArray[np.int64] | None":
    """Return every sample's table row for a feature, [B]; None unless every sample has exactly one ID."""
    bags = [batch.sparse[name] for batch in batches]
    if not all(bool((ids.lengths() == 1).all()) for ids in bags):
        return None
    return np.concatenate([ids.values().numpy() for ids in bags])


def _slice_metrics(
    logits: Tensor, labels: Tensor, weights: Tensor | None, rows: "np.typing.NDArray[np.int64]"
) -> dict[int, dict[str, float]]:
    """Compute separate metrics for the samples with each of the most frequent table rows.

    Returns:
        Metrics by name, by row. Row -1 stands for all other rows. Empty if there is only one row, or if the
        frequent rows cover less than the share `_COVERED` of the samples.
    """
    values, indices, counts = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MAX_VALUES]
    if len(values) < 2 or counts[order].sum() < _COVERED * len(rows):
        return {}
    # Slice number of every distinct row: the frequent rows by rank, and one more slice for all other rows.
    number = np.full(len(values), len(order))
    number[order] = np.arange(len(order))
    has_remaining = len(order) < len(values)
    metrics = sliced_metrics(logits, labels, number[indices], len(order) + has_remaining, weights=weights)
    names = [*(int(values[at]) for at in order), *([-1] if has_remaining else [])]
    return dict(zip(names, metrics, strict=True))
