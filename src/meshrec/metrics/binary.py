"""Metrics of binary classification.

AUC comes from torchmetrics when all samples are available and unweighted. torchmetrics has no weights for AUC
or accuracy, and no log loss, normalized entropy or calibration ratio. Those follow from a few sums over
samples, and the sums are what ranks exchange.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.data.faults import needs
from meshrec.metrics.gathering import gathered

# n samples, H bins


class BinarySums(NamedTuple):
    """Weighted sums over samples."""

    weight: float
    labels: float
    predictions: float
    loss: float
    correct: float


def binary_sums(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """Return `BinarySums` as a float64 tensor [5] from float64 tensors [n]."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits_n, labels_n, reduction="none")
    correct = ((logits_n > 0) == (labels_n > 0.5)).double()
    return (
        torch.stack([torch.ones_like(labels_n), labels_n, torch.sigmoid(logits_n), loss, correct]) @ weights_n
    )


def metrics_of(sums: BinarySums) -> dict[str, float]:
    """Return ``loss`` (log loss), ``accuracy``, ``calibration`` and ``normalized_entropy``, where they are
    defined.

    Calibration is the sum of the predictions over the sum of the labels. Normalized entropy is the log loss
    divided by the log loss of always predicting the mean label: He et al., "Practical lessons from predicting
    clicks on ads at Facebook" (2014).
    """
    if sums.weight <= 0:
        return {}
    rate, loss = sums.labels / sums.weight, sums.loss / sums.weight
    found = {"loss": loss, "accuracy": sums.correct / sums.weight}
    if rate > 0:
        found["calibration"] = sums.predictions / sums.labels
    if 0 < rate < 1:
        found["normalized_entropy"] = loss / -(rate * math.log(rate) + (1 - rate) * math.log1p(-rate))
    return found


def area_under_histograms(positive_H: Tensor, negative_H: Tensor) -> float | None:
    """Return P(a positive is in a higher bin than a negative), where a pair in one bin counts half.

    None if there are no positives or no negatives.
    """
    below = negative_H.cumsum(0) - negative_H
    pairs = positive_H.sum() * negative_H.sum()
    if not pairs > 0:
        return None
    return float((positive_H * (below + negative_H / 2)).sum() / pairs)


def area_under_curve(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Return the exact area under the ROC curve: P(score of a positive > score of a negative), ties counting
    half.

    Args:
        scores, labels: tensors [n]; labels in [0, 1].
        weights: sample weights [n].

    Returns:
        The area, or None if all labels are equal.
    """
    labels = labels.double()
    distinct, place = torch.unique(scores, return_inverse=True)
    if weights is None and bool(((labels == 0) | (labels == 1)).all()):
        if not 0 < float(labels.sum()) < len(labels):
            return None
        # Places in (0, 1) instead of scores, of which torchmetrics would take the sigmoid: in float32 that is
        # 1 for all logits above 17, and their order is lost.
        functional = needs("torchmetrics.functional.classification", "metrics")
        return float(functional.binary_auroc((place + 1) / (len(distinct) + 1.0), labels.long()))
    weights = torch.ones_like(labels) if weights is None else weights.double()
    positive = torch.bincount(place, weights * labels, minlength=len(distinct))
    negative = torch.bincount(place, weights * (1 - labels), minlength=len(distinct))
    return area_under_histograms(positive, negative)


def binary_metrics(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute all metrics over the samples of all ranks, with the exact AUC under ``auc``; see `metrics_of`.

    Collective if a process group is initialized. This keeps and sends every sample, so it is meant for
    validation data; use `MetricSet` during training.

    Args:
        logits, labels: tensors [n] or [n, 1]. Ranks may have different numbers of samples.
        weights: sample weights, on all ranks or on none.
        group: process group of the ranks; None: all ranks.
        gather: whether to include the samples of other ranks. If False, nothing is collective.

    Raises:
        ValueError: the shapes differ.
    """
    columns = checked(logits, labels, weights)
    if gather:
        columns = gathered(columns, group)
    found = metrics_of(BinarySums(*binary_sums(*columns).tolist()))
    auc = area_under_curve(columns[0], columns[1], None if weights is None else columns[2])
    return found if auc is None else {"auc": auc, **found}


def checked(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Stack logits, labels and weights into a detached float64 tensor [3, n].

    Raises:
        ValueError: their sizes differ.
    """
    flat = logits.detach().reshape(-1)
    sizes = [flat.numel(), labels.numel(), flat.numel() if weights is None else weights.numel()]
    if len(set(sizes)) > 1:
        raise ValueError(f"logits, labels and weights must have one entry per sample, got {sizes} entries.")
    given = torch.ones_like(flat) if weights is None else weights.detach().reshape(-1)
    return torch.stack([flat.double(), labels.detach().reshape(-1).double(), given.double()])
