"""The ROC curve and the calibration of binary classification, from histograms that ranks can add up."""

import math
from typing import Any

import torch
from torch import Tensor

from meshrec.metrics.grouped import Interval

_LIMIT = 12.0
_BINS = 2400
_POINTS = 100
_GROUPS = 12
_NORMAL_95 = 1.96

# n samples, H bins


def score_histograms(logits_n: Tensor, labels_n: Tensor) -> Tensor:
    """Return sums per bin of the logit, [3, H] float64: positive labels, negative labels and predictions.

    Logits beyond +-12 are in the first and the last bin: probabilities of less than 1e-5.
    """
    logits, labels = logits_n.double(), labels_n.double()
    bins = ((logits + _LIMIT) * (_BINS / (2 * _LIMIT))).long().clamp(0, _BINS - 1)
    return torch.stack(
        [torch.bincount(bins, each, _BINS) for each in (labels, 1 - labels, torch.sigmoid(logits))]
    )


def auc_interval(auc: float, positive: float, negative: float) -> Interval:
    """Return the 95 % interval of an AUC.

    Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC) curve"
    (1982).

    Args:
        auc: The AUC.
        positive, negative: The number of positive and of negative samples, both above 0.
    """
    squared = auc * auc
    variance = auc * (1 - auc)
    variance += (positive - 1) * (auc / (2 - auc) - squared) + (negative - 1) * (
        2 * squared / (1 + auc) - squared
    )
    margin = _NORMAL_95 * math.sqrt(max(0.0, variance) / (positive * negative))
    return Interval(max(0.0, auc - margin), min(1.0, auc + margin))


def curves_of(histograms_3H: Tensor) -> dict[str, Any]:
    """Return the curves of a report page, as plain numbers.

    Returns:
        ``positive`` and ``negative``: numbers of samples. ``roc``: points (false positive rate, true positive
        rate). ``calibration``: groups of about equally many samples, from low to high scores, each with its
        mean prediction, its share of positive samples and its size. Both lists are empty if one class has
        no sample.
    """
    positive, negative, predicted = histograms_3H
    found: dict[str, Any] = {"positive": float(positive.sum()), "negative": float(negative.sum())}
    if not found["positive"] or not found["negative"]:
        return {**found, "roc": [], "calibration": []}
    rates = [each.flip(0).cumsum(0) / each.sum() for each in (negative, positive)]
    moved = (rates[0] + rates[1]) * _POINTS / 2
    kept = torch.nonzero(torch.diff(moved.floor(), prepend=moved.new_zeros(1)) > 0).flatten()
    roc = [[0.0, 0.0], *torch.stack(rates, 1)[kept].tolist()]
    count = positive + negative
    group = (count.cumsum(0) * _GROUPS / count.sum()).ceil().long().clamp(1, _GROUPS) - 1
    sums = [torch.bincount(group, each, _GROUPS).tolist() for each in (predicted, positive, count)]
    calibration = [[p / n, y / n, n] for p, y, n in zip(*sums, strict=True) if n]
    return {**found, "roc": [[round(each, 5) for each in point] for point in roc], "calibration": calibration}
