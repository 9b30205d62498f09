"""Binary classification metrics.

All except AUC follow from a few sums over samples, which ranks exchange instead of samples.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import area_of, counted_clicks
from meshrec.metrics.gathering import gathered, stacked

# n samples


class BinarySums(NamedTuple):
    """Weighted sums over samples."""

    weight: float
    labels: float
    predictions: float
    loss: float
    correct: float
    negatives: float
    """The weight of labels 0, which ``weight - labels`` would give with few digits if most labels are 1."""


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log loss per sample; for infinite logits 0 or infinite, never NaN."""
    # 0 * infinity would be NaN, so mask the terms of labels 0 and 1.
    zero = torch.zeros_like(logits)
    positive = torch.where(labels == 0, zero, labels * torch.logaddexp(zero, -logits))
    return positive + torch.where(labels == 1, zero, (1 - labels) * torch.logaddexp(zero, logits))


def binary_sums(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """Return `BinarySums` as a float64 tensor [6].

    Args:
        logits_n: float64.
        labels_n: float64, in [0, 1].
        weights_n: float64, above 0.
    """
    correct = ((logits_n > 0) == (labels_n > 0.5)).double()
    loss = log_losses(logits_n, labels_n)
    ones = torch.ones_like(labels_n)
    return torch.stack([ones, labels_n, torch.sigmoid(logits_n), loss, correct, ones - labels_n]) @ weights_n


def metrics_of(sums: BinarySums) -> dict[str, float]:
    """Return ``loss`` (log loss), ``accuracy``, ``calibration`` and ``normalized_entropy``, where defined.

    All are NaN if a logit was NaN. Calibration is sum(predictions) / sum(labels). Normalized entropy is the
    log loss divided by the log loss of a constant mean-label prediction: He et al., "Practical lessons from
    predicting clicks on ads at Facebook" (2014).
    """
    if sums.weight <= 0:
        return {}
    loss = sums.loss / sums.weight
    metrics = {"loss": loss, "accuracy": sums.correct / sums.weight}
    if sums.labels > 0:
        metrics["calibration"] = sums.predictions / sums.labels
    if sums.labels > 0 and sums.negatives > 0:
        rare, common = sorted((sums.labels / sums.weight, sums.negatives / sums.weight))
        metrics["normalized_entropy"] = loss / -(rare * math.log(rare) + common * math.log1p(-rare))
    return dict.fromkeys(metrics, math.nan) if math.isnan(loss) else metrics


def binary_metrics(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute all metrics over all ranks' samples, with exact AUC as ``auc``; see `metrics_of`.

    Collective if a process group is initialized. Gathers every sample, so use it for validation, and
    `MetricSet` during training.

    Args:
        logits: [n] or [n, 1]; may be infinite. n may differ between ranks.
        labels: same size, in [0, 1].
        weights: sample weights [n]; None: 1.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks. If False, not collective.

    Returns:
        Metrics by name. Metrics undefined for a single class or without samples are omitted; with a NaN
            logit, all are NaN.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.

    Example::

        metrics = binary_metrics(torch.tensor([-2.0, 3.0]), torch.tensor([0.0, 1.0]))
        assert metrics["auc"] == metrics["accuracy"] == 1.0
    """
    columns = stacked(logits, labels, weights=weights)
    columns = counted_clicks(gathered(columns, group) if gather else columns)
    metrics = metrics_of(BinarySums(*binary_sums(*columns).tolist()))
    auc = area_of(columns)
    return metrics if auc is None else {"auc": auc, **metrics}
