"""Area under the ROC curve, over all samples or per group, and under the precision-recall curve."""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from meshrec.metrics.gathering import counted, stacked

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# n samples, T ties (samples with equal score and group), G groups


def areas_of_ties(positive_T: Floats, negative_T: Floats, group_T: Ints | None = None) -> Floats:
    """Return the AUC per group: P(positive score > negative score), with ties counting half.

    The Mann-Whitney statistic: Hanley and McNeil, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve" (1982).

    Args:
        positive_T: total weight of positive samples per tie, by group and rising score.
        negative_T: total weight of negative samples per tie.
        group_T: group per tie, in [0, G) without gaps; None: a single group.

    Returns:
        AUC [G]; NaN for a group without positive or negative samples.
    """
    if group_T is None:
        group_T = np.zeros(len(positive_T), np.int64)
    positive_G, negative_G = totals(group_T, positive_T), totals(group_T, negative_T)
    lower_T = _running_sums(negative_T, group_T, negative_G) - negative_T / 2
    with np.errstate(invalid="ignore"):  # 0 / 0 in groups of one class
        # Multiply shares, because a product of small weights would underflow.
        shares_T = positive_T / positive_G[group_T] * (lower_T / negative_G[group_T])
    areas: Floats = np.clip(totals(group_T, shares_T), 0.0, 1.0)
    areas[(positive_G == 0) | (negative_G == 0)] = np.nan
    return areas


def average_precision(positive_T: Floats, negative_T: Floats) -> float:
    """Return the area under the precision-recall curve: the mean of the precision at each positive's score.

    Without interpolation, as in scikit-learn's ``average_precision_score`` and TorchRec's AUPRC.

    Args:
        positive_T: total weight of positive samples per tie, by rising score.
        negative_T: total weight of negative samples per tie.

    Returns:
        Area; NaN without positive or negative samples.
    """
    positive, negative = positive_T[::-1], negative_T[::-1]
    true_positives, false_positives = np.cumsum(positive), np.cumsum(negative)
    if not len(positive) or not true_positives[-1] or not false_positives[-1]:
        return float("nan")
    counts = positive > 0
    precision = true_positives[counts] / (true_positives + false_positives)[counts]
    return float(positive[counts] @ precision / true_positives[-1])


def totals(index_n: Ints, values_n: Floats) -> Floats:
    """Sum values per index."""
    return np.bincount(index_n, values_n).astype(np.float64, copy=False)


def _running_sums(values_T: Floats, group_T: Ints, totals_G: Floats) -> Floats:
    """Return cumulative sums within every group.

    Subtracting a global cumulative sum would leave a rounding error. `bincount` and `cumsum` add in the
    same order, so subtracting a group's total at the start of the next group gives exactly 0 there.
    """
    starts = np.flatnonzero(np.diff(group_T)) + 1
    sums = np.cumsum(np.insert(values_T, starts, -totals_G[:-1]))
    return np.delete(sums, starts + np.arange(len(starts)))


def ties_of(scores_n: Floats, group_n: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Sort samples by group and rising score, and number the ties.

    Args:
        scores_n: scores without NaN.
        group_n: group per sample; None: a single group.

    Returns:
        Sort order [n], tie per sorted sample [n], and first sorted sample per tie [T].
    """
    order = np.argsort(scores_n, kind="stable") if group_n is None else np.lexsort((scores_n, group_n))
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = scores_n[order[1:]] != scores_n[order[:-1]]
    if group_n is not None:
        is_first[1:] |= group_n[order[1:]] != group_n[order[:-1]]
    return order, np.cumsum(is_first) - 1, np.flatnonzero(is_first)


def areas_within(scores_n: Floats, labels_n: Floats, weights_n: Floats, group_n: Ints | None) -> Floats:
    """Return the AUC per group, [G]; NaN where undefined.

    Args:
        scores_n: scores, from `counted`.
        labels_n: labels in [0, 1].
        weights_n: weights above 0.
        group_n: group per sample; None: a single group.
    """
    order, tie, firsts = ties_of(scores_n, group_n)
    labels, weights = labels_n[order], weights_n[order]
    return areas_of_ties(
        totals(tie, weights * labels),
        totals(tie, weights * (1 - labels)),
        None if group_n is None else group_n[order][firsts],
    )


def clicks(*columns: Tensor, weights: Tensor | None) -> Tensor:
    """Stack columns and drop samples without weight. Labels, the last column, must be in [0, 1]."""
    return counted_clicks(stacked(*columns, weights=weights))


def counted_clicks(columns: Tensor) -> Tensor:
    """Drop samples without weight, see `counted`. Labels must be in [0, 1]."""
    return counted(columns, *click_labels(columns))


def click_labels(columns: Tensor) -> tuple[Tensor, str]:
    """Return which labels, the second to last column, are in [0, 1], and the rule for messages."""
    return (columns[-2] >= 0) & (columns[-2] <= 1), "in [0, 1]"


def area_under_curve(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Return the exact area under the ROC curve; see `areas_of_ties`.

    Args:
        scores: any monotonic scores [n], such as logits or probabilities; may be infinite.
        labels: [n], in [0, 1]; a label of 0.3 counts as 0.3 positives and 0.7 negatives.
        weights: sample weights [n]; None: 1.

    Returns:
        AUC; NaN if a score is NaN; None without positives or negatives.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.

    Example::

        scores, labels = torch.tensor([0.1, 0.4, 0.35]), torch.tensor([0.0, 1.0, 0.0])
        assert area_under_curve(scores, labels) == 1.0
    """
    return area_of(clicks(scores, labels, weights=weights))


def area_of(columns: Tensor) -> float | None:
    """Return the AUC for scores, labels and weights, [3, n], from `counted`."""
    scores, labels, weights = columns.cpu().numpy()
    if not len(scores):
        return None
    if np.isnan(scores).any():
        return float("nan")
    return defined(areas_within(scores, labels, weights, None)[0])


def defined(value: Any) -> float | None:
    """Convert to float, or None if NaN."""
    return None if np.isnan(value) else float(value)
