"""Metrics of click models.

AUC is that of torchmetrics where all samples are at hand and count alike; torchmetrics has no weights for it,
nor for accuracy, and neither log loss, normalized entropy nor calibration as a ratio. These follow from a few
sums over samples, which is what ranks exchange.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.data.faults import needs

# n samples, H bins


class BinarySums(NamedTuple):
    """Sums over samples, each times its weight."""

    weight: float
    labels: float
    predictions: float
    loss: float
    correct: float


def binary_sums(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor) -> Tensor:
    """`BinarySums` as a float64 tensor; takes float64 tensors."""
    loss = nn.functional.binary_cross_entropy_with_logits(logits_n, labels_n, reduction="none")
    correct = ((logits_n > 0) == (labels_n > 0.5)).double()
    return (
        torch.stack([torch.ones_like(labels_n), labels_n, torch.sigmoid(logits_n), loss, correct]) @ weights_n
    )


def metrics_of(sums: BinarySums) -> dict[str, float]:
    """``loss`` (log loss), ``accuracy``, ``calibration``, ``normalized_entropy``; without what is undefined.

    Calibration is the sum of predictions over the sum of labels. Normalized entropy is the log loss over that
    of predicting the mean label: He et al., "Practical lessons from predicting clicks on ads at Facebook"
    (2014).
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
    """P(a positive lies in a higher bin than a negative), one bin counting half; None without both kinds."""
    below = negative_H.cumsum(0) - negative_H
    pairs = positive_H.sum() * negative_H.sum()
    if not pairs > 0:
        return None
    return float((positive_H * (below + negative_H / 2)).sum() / pairs)


def area_under_curve(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """The exact area under the ROC curve: P(score of a positive > score of a negative), ties counting half.

    None where labels are of one kind.

    Args:
        scores, labels: [n], labels in [0, 1].
        weights: [n], of samples.
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
    """All metrics of all ranks' samples, with the exact AUC under ``auc``; see :func:`metrics_of`.

    Collective where a process group is initialized. Keeps and sends all samples: for validation data.

    Args:
        logits, labels: [n] or [n, 1]; ranks may have different numbers of samples.
        weights: of samples; on all ranks or on none.
        group: the ranks; without it all.
        gather: whether other ranks' samples count; otherwise this is not collective.

    Raises:
        ValueError: shapes differ.
    """
    columns = checked(logits, labels, weights)
    if gather and dist.is_available() and dist.is_initialized():
        distributed = needs("torchmetrics.utilities.distributed", "metrics")
        columns = torch.cat(distributed.gather_all_tensors(columns, group), dim=1)
    found = metrics_of(BinarySums(*binary_sums(*columns).tolist()))
    auc = area_under_curve(columns[0], columns[1], None if weights is None else columns[2])
    return found if auc is None else {"auc": auc, **found}


def checked(logits: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
    """Logits, labels, weights [3, n] in float64, detached.

    Raises:
        ValueError: their numbers differ.
    """
    flat = logits.detach().reshape(-1)
    sizes = [flat.numel(), labels.numel(), flat.numel() if weights is None else weights.numel()]
    if len(set(sizes)) > 1:
        raise ValueError(f"logits, labels and weights must have one entry per sample, got {sizes} entries.")
    given = torch.ones_like(flat) if weights is None else weights.detach().reshape(-1)
    return torch.stack([flat.double(), labels.detach().reshape(-1).double(), given.double()])
