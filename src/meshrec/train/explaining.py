"""The explanation of a trained model: the AUC that it loses without a feature, and its metrics by value."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from meshrec.data.batch import Batch
from meshrec.data.samples import gather_ranges
from meshrec.metrics import binary_metrics, sliced_metrics
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor
from meshrec.train.ranks import Ranks
from meshrec.train.step import forward

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

_SAMPLES = 8192
"""Samples over all ranks that are looked at: the first of the data."""
_MOST_FEATURES = 64
_MOST_VALUES = 8
_MOST_SLICED = 6
_COVERED = 0.5
"""A feature is sliced if its most frequent values have this share of the samples."""


class Explained(NamedTuple):
    """Permutation importance, and slices, on a sample of the validation data."""

    samples: int
    importance: dict[str, float]
    """The AUC that is lost if the values of a feature are shuffled among the samples, largest first."""
    slices: dict[str, dict[int, dict[str, float]]]
    """Metrics by feature, for the rows of its table that occur most; row -1: all others."""

    def to_json(self, names: "dict[str, dict[int, str]] | None" = None) -> dict[str, Any]:
        """Return plain JSON types. ``names``: values by feature and row, where they are known."""
        slices = {
            feature: {
                "others" if row < 0 else (names or {}).get(feature, {}).get(row, f"row {row}"): metrics
                for row, metrics in found.items()
            }
            for feature, found in self.slices.items()
        }
        return {"samples": self.samples, "importance": self.importance, "slices": slices}


def explain(
    model: nn.Module, dataset: "Dataset", reader: "Reader", ranks: Ranks, *, bf16: bool = False
) -> Explained | None:
    """Compute the AUC without each feature, by shuffling its values. Collective.

    Breiman, "Random forests" (2001), on data that the model was not fitted to. Each rank shuffles within its
    own batches. Features that say the same as others count little, because the others stand in for them.

    Returns:
        None if the samples have labels of one class only. The model is in training mode afterwards.
    """
    batches = list(_first(reader, ranks))
    model.eval()
    try:
        plain = _scored(model, batches, ranks, bf16)
        labels = torch.cat([batch.labels for batch in batches])
        before = binary_metrics(plain, labels, group=ranks.control).get("auc")
        if before is None:
            return None
        importance = {}
        names = [each.name for each in dataset.features]
        numbers = list(dataset.dense_names) or [f"dense {number}" for number in range(dataset.num_dense)]
        for at, name in enumerate([*names, *numbers][:_MOST_FEATURES]):
            feature = name if at < len(names) else at - len(names)
            without = _scored(model, [_shuffled(batch, feature) for batch in batches], ranks, bf16)
            importance[name] = before - binary_metrics(without, labels, group=ranks.control)["auc"]
    finally:
        model.train()
    ids = {name: _rows(batches, name) for name in names}
    gathered = [each for each in ranks.collect((plain, labels, ids)) if len(each[1])]
    plain, labels = (torch.cat([each[part] for each in gathered]) for part in (0, 1))
    slices: dict[str, dict[int, dict[str, float]]] = {}
    for name in sorted(names, key=lambda each: -importance.get(each, 0.0)):
        rows = [each[2][name] for each in gathered]
        if all(each is not None for each in rows) and len(slices) < _MOST_SLICED:
            found = _slices(plain, labels, np.concatenate(rows))
            slices |= {name: found} if found else {}
    ordered = dict(sorted(importance.items(), key=lambda each: -each[1]))
    return Explained(len(labels), ordered, slices)


def _first(reader: "Reader", ranks: Ranks) -> Iterator[Batch]:
    size = 1024
    for number, batch in enumerate(reader.batches(size, rank=ranks.rank, world_size=ranks.size)):
        if number * size * ranks.size >= _SAMPLES:
            return
        yield batch


def _scored(model: nn.Module, batches: list[Batch], ranks: Ranks, bf16: bool) -> Tensor:
    found = []
    for batch in batches:
        with torch.no_grad():
            logits = forward(model, batch.padded(1024).to(ranks.device), ranks.device, bf16=bf16)
        found.append(logits[: len(batch)].cpu())
    return torch.cat(found)


def _shuffled(batch: Batch, feature: str | int) -> Batch:
    """Return the batch with the IDs of a feature, or a dense column, in another order of samples."""
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


def _rows(batches: list[Batch], name: str) -> "np.typing.NDArray[np.int64] | None":
    """Return the row of each sample, or None for a feature that has no single ID."""
    each = [batch.sparse[name] for batch in batches]
    if not all(bool((ids.lengths() == 1).all()) for ids in each):
        return None
    return np.concatenate([ids.values().numpy() for ids in each])


def _slices(
    logits: Tensor, labels: Tensor, rows: "np.typing.NDArray[np.int64]"
) -> dict[int, dict[str, float]]:
    values, places, counts = np.unique(rows, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_VALUES]
    if len(values) < 2 or counts[order].sum() < _COVERED * len(rows):
        return {}
    number = np.full(len(values), len(order))
    number[order] = np.arange(len(order))
    rest = len(order) < len(values)
    found = sliced_metrics(logits, labels, number[places], len(order) + rest)
    names = [*(int(values[at]) for at in order), *([-1] if rest else [])]
    return dict(zip(names, found, strict=True))
