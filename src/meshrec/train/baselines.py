"""Evaluate baselines for click labels: global mean, item popularity, logistic regression and LightGBM."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from meshrec.data import Batch
from meshrec.metrics import binary_curves, binary_metrics, score_histograms
from meshrec.train.evaluation import Scored
from meshrec.train.linear import (
    BATCH,
    LabelledSamples,
    Tell,
    design_matrix,
    first_samples,
    fit_regression,
    weighted_mean,
    weights_of,
)
from meshrec.train.trees import TreeBaseline, has_trees

if TYPE_CHECKING:
    from meshrec.data import Dataset, Reader

# Weight of the global mean in an item's popularity, in samples; see `baselines`.
_SMOOTHING = 5.0


class Baseline(NamedTuple):
    """Result of a baseline.

    Attributes:
        name: name shown to users.
        quality: metrics by data part, ``{"validation": {metric: value}, "test": {metric: value}}``. A part
            is missing if the dataset lacks it.
        curves: result of `meshrec.metrics.binary_curves` by data part. Empty for several labels, and for
            next-item models.
    """

    name: str
    quality: dict[str, dict[str, float]]
    curves: dict[str, dict[str, Any]]


def baselines(dataset: "Dataset", tell: Tell = lambda share: None) -> Iterator[Baseline]:
    """Fit and evaluate baselines for click labels, and yield the result of each.

    - Global mean: the mean training label for all samples.
    - Item popularity: the item's mean training label, smoothed with five samples at the global mean. Skipped
      if the dataset does not name an item.
    - Logistic regression: a weight per ID and per dense value. The validation data selects the L2 penalty.
    - LightGBM: boosted trees; see `meshrec.train.trees`. Skipped if LightGBM is not installed.

    All baselines learn from the first 200,000 training samples; see `meshrec.train.linear`. They are
    evaluated on the same samples as the model: all validation and test data, with sample weights. With
    several labels, every label has separate baselines. As in `Tasks`, the first label's metrics also appear
    without a prefix.

    Args:
        dataset: the dataset.
        tell: called with the finished share for the current baseline, from 0 to 1.
    """
    if not dataset.labels:
        yield from _label_baselines(dataset, None, tell)
        return
    by_label = [_label_baselines(dataset, number, tell) for number in range(len(dataset.labels))]
    # Baseline by baseline over all labels, so that each result is yielded as soon as it is complete.
    for results in zip(*by_label, strict=True):
        quality: dict[str, dict[str, float]] = {}
        for label, result in zip(dataset.labels, results, strict=True):
            for data, metrics in result.quality.items():
                of_label = {f"{label}/{name}": value for name, value in metrics.items()}
                # The first label's metrics come without a prefix; later labels only add metrics with a
                # prefix.
                quality[data] = {**(quality.get(data) or metrics), **of_label}
        yield Baseline(results[0].name, quality, {})


def _label_baselines(dataset: "Dataset", number: int | None, tell: Tell) -> Iterator[Baseline]:
    """Fit and evaluate the baselines for a single label, and yield the result of each."""

    def label(batches: Iterator[Batch]) -> Iterator[Batch]:
        """Return the batches with this label as their only label, [B]."""
        return (
            batches
            if number is None
            else (replace(samples, labels=samples.labels[:, number]) for samples in batches)
        )

    # Baselines are evaluated on all held-out samples, but learn from the first training samples only.
    readers = {"validation": dataset.validation, "test": dataset.test}
    held_out_readers = {name: reader for name, reader in readers.items() if reader is not None}

    def read(reader: "Reader") -> Batch:
        """Read the first samples, with this label as their only label, [B]."""
        samples = first_samples(reader)
        return samples if number is None else replace(samples, labels=samples.labels[:, number])

    train = read(dataset.train)
    mean = weighted_mean(train.labels, weights_of(train)).clamp(1e-6, 1 - 1e-6)  # keeps the logit finite

    def evaluated(name: str, logits: Callable[[Batch], Tensor]) -> Baseline:
        """Evaluate a baseline on all validation and test samples."""
        baseline = Baseline(name, {}, {})
        for data, reader in held_out_readers.items():
            scored = _score(label(reader.batches(BATCH)), reader.num_samples, logits, tell)
            # No collective: only rank 0 computes baselines.
            baseline.quality[data] = binary_metrics(*scored, gather=False)
            baseline.curves[data] = binary_curves(score_histograms(*scored))
        return baseline

    # The baselines are yielded one by one, so that the caller can report each before the next is fitted.
    yield evaluated("global mean", lambda batch: torch.logit(mean).expand(len(batch)))
    if dataset.item is not None:
        yield evaluated("item popularity", _popularity(dataset, train))
    chooses = None if dataset.validation is None else read(dataset.validation)
    parts = [
        LabelledSamples.of(samples, design_matrix(dataset, samples, samples.dense))
        for samples in (train, chooses)
        if samples is not None
    ]
    fitted = fit_regression(*parts, tell=tell).weights
    yield evaluated(
        "logistic regression",
        lambda batch: torch.from_numpy(design_matrix(dataset, batch, batch.dense) @ fitted),
    )
    if has_trees():
        yield evaluated(
            "LightGBM", TreeBaseline(dataset, train, lambda reader: label(reader.batches(BATCH)), tell)
        )


def _score(
    batches: Iterator[Batch], num_samples: int, logits: Callable[[Batch], Tensor], tell: Tell
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Score all samples with a baseline.

    Returns:
        The logits, the labels and the sample weights of all samples, [num_samples] each. The weights are
        None if all weights are 1.
    """
    scored: list[Scored] = []
    for number, batch in enumerate(batches):
        tell(min(1.0, number * BATCH / num_samples))
        scored.append(Scored(None, logits(batch), batch.labels, batch.weights))
    tell(1.0)
    _, scores, labels, weights = Scored.concat(scored)
    return scores, labels, weights


def _popularity(dataset: "Dataset", train: Batch) -> Callable[[Batch], Tensor]:
    """Return the popularity baseline: a function from a batch to logits [B].

    The logit of a sample is that of its item's mean training label, smoothed towards the global mean.
    """
    item = dataset.item
    assert item is not None
    rows = next(feature.num_embeddings for feature in dataset.features if feature.name == item)
    items = train.sparse[item]
    samples = torch.repeat_interleave(torch.arange(len(train)), items.lengths())
    weights = weights_of(train)
    # Weighted numbers of training samples, and of positive samples, by item.
    count = torch.bincount(items.values(), weights=weights[samples], minlength=rows)
    positive = torch.bincount(items.values(), weights=(train.labels * weights)[samples], minlength=rows)
    # Smooth with a prior at the global mean, so that rare items do not get a rate of 0 or 1.
    rate = (positive + _SMOOTHING * weighted_mean(train.labels, weights)) / (count + _SMOOTHING)
    score = torch.logit(rate.double().clamp(1e-6, 1 - 1e-6))

    def logits(batch: Batch) -> Tensor:
        item_ids = batch.sparse[item]
        of = torch.repeat_interleave(torch.arange(len(batch)), item_ids.lengths())
        # A bag with several items scores their mean; an empty bag scores 0.
        total = torch.zeros(len(batch), dtype=torch.float64).index_add_(0, of, score[item_ids.values()])
        return total / item_ids.lengths().clamp(min=1)

    return logits
