"""Binary classification metrics.

All metrics except AUC are computed from the six sums in `BinarySums`, so ranks can exchange sums instead of
samples.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import auc_of_columns, weighted_clicks
from meshrec.metrics.gathering import gather_columns, stack_columns

# n samples


class BinarySums(NamedTuple):
    """Weighted sums over samples, from which metrics are computed."""

    weight: float
    """Sum of the weights."""
    labels: float
    """Weighted sum of the labels."""
    predictions: float
    """Weighted sum of the predicted probabilities."""
    loss: float
    """Weighted sum of the log losses."""
    correct: float
    """Weight of samples whose probability is on the same side of 0.5 as their label."""
    # Equals `weight - labels`, but the difference would lose digits if most labels are 1.
    negatives: float
    """Weighted sum of ``1 - label``."""


def log_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the log loss per sample. An infinite logit gives a loss of 0 or infinity, never NaN."""
    # 0 * infinity would be NaN, so mask the positive term of labels 0 and the negative term of labels 1.
    zero = torch.zeros_like(logits)
    positive = torch.where(labels == 0, zero, labels * torch.logaddexp(zero, -logits))
    return positive + torch.where(labels == 1, zero, (1 - labels) * torch.logaddexp(zero, logits))


def binary_sums(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """Compute the fields in `BinarySums` for n samples, in order, as a float64 tensor [6].

    Args:
        logits_n: logits, float64.
        labels_n: labels, float64, in [0, 1].
        weights_n: sample weights, float64, above 0.
    """
    correct = ((logits_n > 0) == (labels_n > 0.5)).double()
    loss = log_losses(logits_n, labels_n)
    ones = torch.ones_like(labels_n)
    return torch.stack([ones, labels_n, torch.sigmoid(logits_n), loss, correct, ones - labels_n]) @ weights_n


def metrics_from_sums(sums: BinarySums) -> dict[str, float]:
    """Compute metrics from sums over all samples.

    Returns:
        Metrics by name; empty without samples, and all NaN if a logit was NaN.

        - ``loss``: the log loss.
        - ``accuracy``: the share of samples whose probability is on the same side of 0.5 as their label.
        - ``calibration``: sum(predictions) / sum(labels); omitted if all labels are 0.
        - ``normalized_entropy``: the log loss, divided by the log loss of a model that always predicts the
          mean label; omitted if all labels are 0, or all are 1. See He et al., "Practical lessons from
          predicting clicks on ads at Facebook" (2014).
    """
    if sums.weight <= 0:
        return {}
    loss = sums.loss / sums.weight
    metrics = {"loss": loss, "accuracy": sums.correct / sums.weight}
    if sums.labels > 0:
        metrics["calibration"] = sums.predictions / sums.labels
    if sums.labels > 0 and sums.negatives > 0:
        # With the rarer class, log1p is precise even if nearly all labels are equal.
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
    """Compute the exact AUC, and the metrics in `metrics_from_sums`, over the samples on all ranks.

    Collective if a process group is initialized. Every rank receives all samples, so use this function for
    validation, and `MetricSet` during training.

    Args:
        logits: [n] or [n, 1]; may be infinite. n may differ between ranks.
        labels: same size, in [0, 1].
        weights: sample weights [n]; None: 1.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks. If False, not collective.

    Returns:
        Metrics by name. ``auc`` is omitted if all labels are equal. If a logit is NaN, all are NaN.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.

    Example::

        metrics = binary_metrics(torch.tensor([-2.0, 3.0]), torch.tensor([0.0, 1.0]))
        assert metrics["auc"] == metrics["accuracy"] == 1.0
    """
    columns = stack_columns(logits, labels, weights=weights)
    columns = weighted_clicks(gather_columns(columns, group) if gather else columns)
    metrics = metrics_from_sums(BinarySums(*binary_sums(*columns).tolist()))
    auc = auc_of_columns(columns)
    return metrics if auc is None else {"auc": auc, **metrics}
