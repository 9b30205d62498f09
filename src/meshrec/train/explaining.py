"""Explanation of a trained model: permutation importance, and metrics by feature value."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.batch import Batch
from meshrec.data.samples import gather_ranges
from meshrec.metrics import binary_metrics, sliced_metrics
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.train.evaluation import concat_weights, padded_logits
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
    importance: dict[str, float]
    """Drop of the AUC by feature if its values are permuted among samples, in decreasing order."""
    slices: dict[str, dict[int, dict[str, float]]]
    """Metrics by feature for the most frequent table rows; row -1: all other rows."""

    def to_json(self, names: "dict[str, dict[int, str]] | None" = None) -> dict[str, Any]:
        """Return plain JSON types. ``names``: values by feature and row, where they are available."""
        slices = {
            feature: {
                "others" if row < 0 else (names or {}).get(feature, {}).get(row, f"row {row}"): metrics
                for row, metrics in rows.items()
            }
            for feature, rows in self.slices.items()
        }
        return {"samples": self.samples, "importance": self.importance, "slices": slices}


def explain(model: nn.Module, dataset: "Dataset", reader: "Reader", ranks: Ranks) -> Explanation | None:
    """Compute permutation importance and metrics by feature value. Collective.

    Breiman, "Random forests" (2001), on data the model was not fitted to. A rank shuffles within local
    batches. Redundant features count little, because they stand in for one another.

    Args:
        model: a model called as ``model(dense, sparse)``; in training mode afterwards.
        dataset: the dataset, which names the features.
        reader: the samples, which are divided among the ranks.
        ranks: the ranks, from `join`.

    Returns:
        None if the samples have labels of only one class.
    """
    batches = list(_first_batches(reader, ranks))
    model.eval()
    try:
        plain = _logits(model, batches, ranks)
        labels = torch.cat([batch.labels for batch in batches])
        weights = concat_weights([(batch.weights, len(batch)) for batch in batches])
        # The metrics are collective, so all ranks leave here together.
        before = binary_metrics(plain, labels, weights, group=ranks.control).get("auc")
        if before is None:
            return None
        importance = {}
        names = [feature.name for feature in dataset.features]
        dense_names = list(dataset.dense_names) or [f"dense {index}" for index in range(dataset.num_dense)]
        for index, name in enumerate([*names, *dense_names][:_MAX_FEATURES]):
            feature = name if index < len(names) else index - len(names)
            without = _logits(model, [_permute_feature(batch, feature) for batch in batches], ranks)
            importance[name] = before - binary_metrics(without, labels, weights, group=ranks.control)["auc"]
    finally:
        model.train()
    ids = {name: _table_rows(batches, name) for name in names}
    by_rank = [values for values in ranks.collect((plain, labels, ids, weights)) if len(values[1])]
    plain, labels = (torch.cat([values[part] for values in by_rank]) for part in (0, 1))
    weights = concat_weights([(values[3], len(values[1])) for values in by_rank])
    slices: dict[str, dict[int, dict[str, float]]] = {}
    for name in sorted(names, key=lambda name: -importance.get(name, 0.0)):
        rows = [values[2][name] for values in by_rank]
        if all(part is not None for part in rows) and len(slices) < _MAX_SLICED:
            metrics = _slice_metrics(plain, labels, weights, np.concatenate(rows))
            slices |= {name: metrics} if metrics else {}
    ordered = dict(sorted(importance.items(), key=lambda item: -item[1]))
    return Explanation(len(labels), ordered, slices)


def _first_batches(reader: "Reader", ranks: Ranks) -> Iterator[Batch]:
    """Yield this rank's part of the first `_SAMPLES` samples."""
    for number, batch in enumerate(reader.batches(_BATCH, rank=ranks.rank, world_size=ranks.size)):
        if number * _BATCH * ranks.size >= _SAMPLES:
            return
        yield batch


def _logits(model: nn.Module, batches: list[Batch], ranks: Ranks) -> Tensor:
    """Return the logits of all batches, concatenated."""
    return torch.cat([padded_logits(model, batch, _BATCH, ranks) for batch in batches])


def _permute_feature(batch: Batch, feature: str | int) -> Batch:
    """Permute a feature's IDs, or a dense column, among the samples of a batch."""
    # A fixed seed: the order is a function of the batch size, and equal for all features.
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(0))
    if isinstance(feature, int):
        dense = batch.dense.clone()
        dense[:, feature] = dense[order, feature]
        return Batch(dense, batch.sparse, batch.labels)
    bags = dict(batch.sparse.to_dict())  # the tensor keeps its own
    mine = bags[feature]
    starts, lengths = mine.offsets()[:-1][order].numpy(), mine.lengths()[order].numpy()
    weights = mine.weights_or_none()
    taken = gather_ranges(
        mine.values().numpy(), starts, lengths, None if weights is None else weights.numpy()
    )
    bags[feature] = JaggedTensor(
        torch.from_numpy(taken.values),
        weights=None if taken.weights is None else torch.from_numpy(taken.weights),
        lengths=torch.from_numpy(lengths),
    )
    return Batch(batch.dense, KeyedJaggedTensor.from_jt_dict(bags), batch.labels)


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
