"""Explanation of a trained model: permutation importance, and metrics by feature value."""

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
"""Number of samples over all ranks to examine, from the start of the data."""
_BATCH = 1024
_MAX_FEATURES = 64
_MAX_VALUES = 8
_MAX_SLICED = 6
_COVERED = 0.5
"""Minimum share of samples with the most frequent values, for a feature to get slices."""


class Explanation(NamedTuple):
    """Permutation importance, and metrics by feature value, on a sample of validation data."""

    samples: int
    metric: str
    """The metric in which importance is measured: AUC, NDCG@k, or the loss."""
    importance: dict[str, float]
    """How much worse the metric is with the values of a feature permuted, in decreasing order."""
    slices: dict[str, dict[int, dict[str, float]]]
    """Metrics by feature for the most frequent table rows; row -1: all other rows. Only for clicks."""

    def to_json(self, names: "dict[str, dict[int, str]] | None" = None) -> dict[str, Any]:
        """Return plain JSON types. ``names``: values by feature and row, where they are available."""
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

    Breiman, "Random forests" (2001), on data the model was not fitted to. A rank permutes within
    local batches. Redundant features count little, because they stand in for one another. Histories are
    permuted twice: among samples, and within each sample, so that only the order is random.

    Args:
        model: a model called as ``model(dense, sparse)``; in training mode afterwards.
        dataset: the dataset, which names the features.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.
        loss: computes metrics from outputs and labels. The metric that selects the best weights is used, or
            the loss itself if there is none.

    Returns:
        None if the metric is undefined on the samples, for example if all labels are of one class.
    """
    batches = list(_first_batches(reader, ranks))
    model.eval()
    try:
        plain = _logits(model, batches, ranks)
        labels = torch.cat([batch.labels for batch in batches])
        weights = concat_weights([(batch.weights, len(batch)) for batch in batches])

        def metrics(logits: Tensor) -> dict[str, float]:
            return loss.metrics(logits, labels, weights, group=ranks.control)

        # The metrics are collective, so all ranks leave here together.
        before = metrics(plain)
        metric = leading_metric(before) or ("loss" if "loss" in before else None)
        if metric is None:
            return None
        importance = {}
        for name, change in _permutations(dataset, loss)[:_MAX_FEATURES]:
            without = metrics(_logits(model, [change(batch) for batch in batches], ranks))
            importance[name] = metric_of(metric).better * (before[metric] - without[metric])
    finally:
        model.train()
    ordered = dict(sorted(importance.items(), key=lambda item: -item[1]))
    # Metrics by feature value exist for clicks only.
    has_slices = isinstance(loss, BinaryCrossEntropy)
    names = [feature.name for feature in dataset.features] if has_slices else []
    names.sort(key=lambda name: -importance.get(name, 0.0))
    ids = {name: _table_rows(batches, name) for name in names}
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
    """Return the permutations to compare with the data: a name, and a function that permutes a batch."""
    sequences = [feature.name for feature in dataset.features if feature.sequence]
    sets = [feature.name for feature in dataset.features if not feature.sequence]
    if isinstance(loss, NextItem):
        # The item is the target, and seen items only leave a ranking.
        sets = [name for name in sets if name not in (dataset.item, dataset.seen)]
    # With times, all sequences belong to one history: the time of an item has the item's position.
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
    """Yield this rank's part of the first `_SAMPLES` samples."""
    for number, batch in enumerate(reader.batches(_BATCH, rank=ranks.rank, world_size=ranks.size)):
        if number * _BATCH * ranks.size >= _SAMPLES:
            return
        yield batch


def _logits(model: nn.Module, batches: list[Batch], ranks: Ranks) -> Tensor:
    """Return the logits of all batches, concatenated."""
    return torch.cat([padded_logits(model, batch, _BATCH, ranks) for batch in batches])


def _order(num: int) -> Tensor:
    """Return a random order of samples. The seed is fixed: equal batch sizes have equal orders."""
    return torch.randperm(num, generator=torch.Generator().manual_seed(0))


def _permute_bags(batch: Batch, *, keys: Sequence[str]) -> Batch:
    """Permute the bags of some keys among the samples of a batch, all keys alike."""
    order = _order(len(batch))
    bags = dict(batch.sparse.to_dict())  # the tensor keeps its own
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
    """Permute the IDs of some keys within every bag. Bags of the same lengths are permuted alike."""
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
    """Permute a dense column among the samples of a batch."""
    dense = batch.dense.clone()
    dense[:, column] = dense[_order(len(batch)), column]
    return Batch(dense, batch.sparse, batch.labels)


def _table_rows(batches: list[Batch], name: str) -> "np.typing.NDArray[np.int64] | None":
    """Return the table row of each sample for a feature, [B]; None if a sample has several IDs or none."""
    bags = [batch.sparse[name] for batch in batches]
    if not all(bool((ids.lengths() == 1).all()) for ids in bags):
        return None
    return np.concatenate([ids.values().numpy() for ids in bags])


def _slice_metrics(
    logits: Tensor, labels: Tensor, weights: Tensor | None, rows: "np.typing.NDArray[np.int64]"
) -> dict[int, dict[str, float]]:
    """Return metrics for the most frequent table rows, and for all others as row -1.

    Args:
        logits: [B].
        labels: [B].
        weights: sample weights [B]; None: 1.
        rows: table row of each sample, [B].

    Returns:
        Metrics by row; empty if there is one row only, or the frequent rows cover too few samples.
    """
    values, indices, counts = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MAX_VALUES]
    if len(values) < 2 or counts[order].sum() < _COVERED * len(rows):
        return {}
    number = np.full(len(values), len(order))
    number[order] = np.arange(len(order))
    has_remaining = len(order) < len(values)
    metrics = sliced_metrics(logits, labels, number[indices], len(order) + has_remaining, weights=weights)
    names = [*(int(values[at]) for at in order), *([-1] if has_remaining else [])]
    return dict(zip(names, metrics, strict=True))
