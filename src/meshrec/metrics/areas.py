"""Area under the ROC curve (AUC), over all samples or per group, and area under the precision-recall curve.

Functions work on ties: a tie stands for all samples with the same score in the same group. Variable suffixes
name dimensions, as in the shape legend below: ``group_n`` has shape [n].
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from meshrec.metrics.gathering import normalize_samples, stack_columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# n samples, T ties, G groups


def auc_from_ties(positive_T: Floats, negative_T: Floats, group_T: Ints | None = None) -> Floats:
    """Return the AUC per group, from sample weights per tie (all samples with equal score in a group).

    The AUC is the probability that a positive sample scores higher than a negative one, where equal scores
    count half (the Mann-Whitney statistic). See Hanley and McNeil, "The meaning and use of the area under a
    receiver operating characteristic (ROC) curve" (1982).

    Args:
        positive_T: total weight of the positive samples per tie. Ties are sorted by group, then by ascending
            score.
        negative_T: total weight of the negative samples per tie.
        group_T: group per tie, int64 in [0, G). Every group must have a tie. None: a single group.

    Returns:
        AUC [G]; NaN for a group without positive or negative samples.
    """
    if group_T is None:
        group_T = np.zeros(len(positive_T), np.int64)
    positive_G, negative_G = sum_by_index(group_T, positive_T), sum_by_index(group_T, negative_T)
    # Negative weight below every tie, and half the negative weight in it.
    lower_T = _sums_within_groups(negative_T, group_T, negative_G) - negative_T / 2
    with np.errstate(invalid="ignore"):  # 0 / 0 in groups with one class
        # Multiply shares, because a product of small weights would underflow.
        shares_T = positive_T / positive_G[group_T] * (lower_T / negative_G[group_T])
    areas: Floats = np.clip(sum_by_index(group_T, shares_T), 0.0, 1.0)
    areas[(positive_G == 0) | (negative_G == 0)] = np.nan
    return areas


def average_precision(positive_T: Floats, negative_T: Floats) -> float:
    """Return the area under the precision-recall curve, from sample weights per tie (equal scores).

    For every positive sample, the precision is computed with the sample's score as threshold. The area is the
    mean of these precisions. As in scikit-learn's ``average_precision_score`` and TorchRec's AUPRC, the curve
    is not interpolated.

    Args:
        positive_T: total weight of the positive samples per tie. Ties are sorted by ascending score.
        negative_T: total weight of the negative samples per tie.

    Returns:
        Area; NaN without positive or negative samples.
    """
    # From the highest score down: the threshold moves along the curve.
    positive, negative = positive_T[::-1], negative_T[::-1]
    true_positives, false_positives = np.cumsum(positive), np.cumsum(negative)
    if not len(positive) or not true_positives[-1] or not false_positives[-1]:
        return float("nan")
    counts = positive > 0
    precision = true_positives[counts] / (true_positives + false_positives)[counts]
    return float(positive[counts] @ precision / true_positives[-1])


def sum_by_index(index_n: Ints, values_n: Floats) -> Floats:
    """Return the sum of all values with the same index, float64 [largest index + 1].

    Example: the indices [1, 0, 1] and the values [2.0, 3.0, 4.0] give [3.0, 6.0].
    """
    return np.bincount(index_n, values_n).astype(np.float64, copy=False)


def _sums_within_groups(values_T: Floats, group_T: Ints, totals_G: Floats) -> Floats:
    """Return cumulative sums that start again in every group, [T]. A sum includes the value at its position.

    Args:
        group_T: group per value, ascending from 0 without gaps.
    """
    # A global cumulative sum minus the value at the group's start would leave a rounding error. `bincount`
    # and `cumsum` add in the same order, so inserting minus a group's total after the group gives exactly 0
    # there.
    starts = np.flatnonzero(np.diff(group_T)) + 1
    sums = np.cumsum(np.insert(values_T, starts, -totals_G[:-1]))
    return np.delete(sums, starts + np.arange(len(starts)))


def sort_into_ties(scores_n: Floats, group_n: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Sort samples by group, then by ascending score, and number the ties in this order.

    A tie is a run of sorted samples with equal group and equal score, possibly a single sample.

    Args:
        scores_n: scores without NaN.
        group_n: group per sample; None: a single group.

    Returns:
        - The indices that sort the samples, [n].
        - The tie number per sorted sample, from 0, ascending, [n].
        - The position of the first sorted sample per tie, [T].

    Example::

        order, tie, firsts = sort_into_ties(np.array([0.5, 0.1, 0.5]))
        # order [1, 0, 2], tie [0, 1, 1], firsts [0, 1]
    """
    order = np.argsort(scores_n, kind="stable") if group_n is None else np.lexsort((scores_n, group_n))
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = scores_n[order[1:]] != scores_n[order[:-1]]
    if group_n is not None:
        is_first[1:] |= group_n[order[1:]] != group_n[order[:-1]]
    return order, np.cumsum(is_first) - 1, np.flatnonzero(is_first)


def auc_by_group(scores_n: Floats, labels_n: Floats, weights_n: Floats, group_n: Ints | None) -> Floats:
    """Return the AUC per group, [G]; NaN for a group without positive or negative samples.

    Args:
        scores_n: scores without NaN.
        labels_n: labels in [0, 1].
        weights_n: weights above 0, such as from `normalize_samples`.
        group_n: group per sample, int64 in [0, G); None: a single group.
    """
    order, tie, firsts = sort_into_ties(scores_n, group_n)
    labels, weights = labels_n[order], weights_n[order]
    return auc_from_ties(
        sum_by_index(tie, weights * labels),
        sum_by_index(tie, weights * (1 - labels)),
        None if group_n is None else group_n[order][firsts],
    )


def click_columns(*columns: Tensor, weights: Tensor | None) -> Tensor:
    """Stack scores, labels and weights for samples with click labels, and validate them.

    Samples with weight 0 are dropped.

    Args:
        columns: k tensors with n values each. The last has the labels, in [0, 1].
        weights: sample weights [n]; None: 1.

    Returns:
        The k columns for the m remaining samples, and the weights divided by the largest weight, as a float64
        tensor [k + 1, m].

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.
    """
    return weighted_clicks(stack_columns(*columns, weights=weights))


def weighted_clicks(columns: Tensor) -> Tensor:
    """Drop samples with weight 0, and validate click labels and weights; see `normalize_samples`.

    Args:
        columns: columns [k, n], with labels second to last, and weights last.
    """
    return normalize_samples(columns, *valid_click_labels(columns))


def valid_click_labels(columns: Tensor) -> tuple[Tensor, str]:
    """Return the mask [n] for labels in [0, 1], and a description of this rule for error messages.

    Args:
        columns: columns [k, n], with labels second to last, and weights last.
    """
    return (columns[-2] >= 0) & (columns[-2] <= 1), "in [0, 1]"


def area_under_curve(scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> float | None:
    """Return the exact area under the ROC curve; see `auc_from_ties`.

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
    return auc_of_columns(click_columns(scores, labels, weights=weights))


def auc_of_columns(columns: Tensor) -> float | None:
    """Return the AUC over all samples; NaN if a score is NaN, None without positive or negative samples."""
    scores, labels, weights = columns.cpu().numpy()
    if not len(scores):
        return None
    if np.isnan(scores).any():
        return float("nan")
    return none_if_nan(auc_by_group(scores, labels, weights, None)[0])


def none_if_nan(value: Any) -> float | None:
    """Return the value as a float, or None if it is NaN."""
    return None if np.isnan(value) else float(value)
