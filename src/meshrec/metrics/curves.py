"""ROC, precision-recall and calibration curves for binary classification, from histograms of the logits.

Ranks add up their histograms, instead of exchanging samples.
"""

import math
from typing import Any

import torch
from torch import Tensor

from meshrec.metrics.grouped import Interval

# Logits outside [-12, 12] share the outermost bins: probabilities below 6e-6, or above 1 - 6e-6.
_LIMIT = 12.0
# Bins of width 0.01 in the logit.
_BINS = 2400
# Points per curve, and calibration groups, in a report.
_POINTS = 100
_GROUPS = 12
# 97.5 % standard normal quantile, for two-sided 95 % intervals.
_NORMAL_95 = 1.96

# n samples, H bins


def score_histograms(logits_n: Tensor, labels_n: Tensor, weights_n: Tensor | None = None) -> Tensor:
    """Return weighted sums over the samples in every logit bin. Ranks can add up their results.

    There are H equal bins for logits from -12 to 12. Smaller logits are in the first bin, and larger ones in
    the last bin.

    Args:
        logits_n: logits, [n].
        labels_n: labels, [n], in [0, 1].
        weights_n: sample weights [n]; None: 1. Samples without a positive weight are ignored.

    Returns:
        Sums per bin, float64 [5, H]. For a sample with label y and weight w, the rows add up w * y,
        w * (1 - y), w * probability, w ** 2 * y and w ** 2 * (1 - y).
    """
    logits, labels = logits_n.double(), labels_n.double()
    weights = torch.ones_like(logits) if weights_n is None else weights_n.double()
    counts = weights > 0
    logits, labels, weights = logits[counts], labels[counts], weights[counts]
    bins = ((logits + _LIMIT) * (_BINS / (2 * _LIMIT))).clamp(0, _BINS - 1).long()
    # Every row is multiplied by the weight below, so the last two rows get squared weights.
    sums = (labels, 1 - labels, torch.sigmoid(logits), labels * weights, (1 - labels) * weights)
    return torch.stack([torch.bincount(bins, weights * values, _BINS) for values in sums])


def effective_sizes(histograms_5H: Tensor) -> tuple[float, float]:
    """Return the effective numbers of positive and negative samples, for confidence intervals.

    The effective number is the squared sum of the weights, divided by the sum of the squared weights. It is
    the sample count if all weights are equal, and smaller otherwise. See Kish, "Survey sampling" (1965).

    Args:
        histograms_5H: sums from `score_histograms`, over all ranks.
    """
    sums = histograms_5H.sum(1)
    # Without samples in a class, this gives 0 and not 0 / 0.
    positive, negative = (sums[:2].square() / sums[3:].clamp(min=1e-300)).tolist()
    return positive, negative


def auc_interval(auc: float, positive: float, negative: float) -> Interval:
    """Return the 95 % confidence interval for an AUC, within [0, 1].

    See Hanley and McNeil, "The meaning and use of the area under a receiver operating characteristic (ROC)
    curve" (1982).

    Args:
        auc: the AUC.
        positive: positive samples, above 0; from `effective_sizes` if samples have weights.
        negative: negative samples, above 0; from `effective_sizes` if samples have weights.
    """
    squared = auc * auc
    variance = auc * (1 - auc)
    variance += (positive - 1) * (auc / (2 - auc) - squared) + (negative - 1) * (
        2 * squared / (1 + auc) - squared
    )
    margin = _NORMAL_95 * math.sqrt(max(0.0, variance) / (positive * negative))
    return Interval(max(0.0, auc - margin), min(1.0, auc + margin))


def binary_curves(histograms_5H: Tensor) -> dict[str, Any]:
    """Return the ROC, precision-recall, gains and calibration curves for a report page, as JSON types.

    Args:
        histograms_5H: sums from `score_histograms`, over all ranks.

    Returns:
        A dict with

        - ``positive`` and ``negative``: the effective sample numbers from `effective_sizes`;
        - ``roc``: a point [false positive rate, true positive rate] per threshold;
        - ``precision_recall``: a point [recall, precision] per threshold;
        - ``gains``: a point [share of all samples, share of positive samples] per threshold, for the samples
          above it;
        - ``calibration``: a point [mean prediction, positive rate, weight] per group of samples. Groups have
          ascending scores, and about equal weights.

        All lists are empty if a class has no sample.
    """
    positive, negative, predicted = histograms_5H[:3]
    sizes: dict[str, Any] = dict(zip(("positive", "negative"), effective_sizes(histograms_5H), strict=True))
    if not sizes["positive"] or not sizes["negative"]:
        return {**sizes, "roc": [], "precision_recall": [], "gains": [], "calibration": []}
    rates = [counts.flip(0).cumsum(0) / counts.sum() for counts in (negative, positive)]
    # Keep about 100 points, evenly spaced along the curve.
    progress = (rates[0] + rates[1]) * _POINTS / 2
    corners = torch.nonzero(torch.diff(progress.floor(), prepend=progress.new_zeros(1)) > 0).flatten()
    corner_rates = torch.stack(rates, 1)[corners]
    count = positive + negative
    # Negative and positive sample weight at or above each threshold, from the highest.
    above = corner_rates * torch.stack([negative.sum(), positive.sum()])
    points = {
        "roc": torch.cat([corner_rates.new_zeros(1, 2), corner_rates]),
        "precision_recall": torch.stack([corner_rates[:, 1], above[:, 1] / above.sum(1)], 1),
        "gains": torch.cat(
            [corner_rates.new_zeros(1, 2), torch.stack([above.sum(1) / count.sum(), corner_rates[:, 1]], 1)]
        ),
    }
    # By the cumulative weight, so groups have about equal weights.
    group = (count.cumsum(0) * _GROUPS / count.sum()).ceil().long().clamp(1, _GROUPS) - 1
    sums = [torch.bincount(group, values, _GROUPS).tolist() for values in (predicted, positive, count)]
    calibration = [[p / n, y / n, n] for p, y, n in zip(*sums, strict=True) if n]
    rounded = {
        name: [[round(rate, 5) for rate in point] for point in curve.tolist()]
        for name, curve in points.items()
    }
    return {**sizes, **rounded, "calibration": calibration}
