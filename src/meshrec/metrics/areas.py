"""Area under the ROC curve (AUC), over all samples or per group, and under the precision-recall curve.

Variable suffixes name dimensions, as in the shape legend below: ``group_n`` has shape [n].
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from meshrec.metrics.gathering import normalize_samples, stack_columns

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
# n samples, T ties (a tie holds all samples with the same score in the same group), G groups


def auc_from_ties(positive_T: Floats, negative_T: Floats, group_T: Ints | None = None) -> Floats:
    """Return the AUC per group: P(positive score > negative score), with ties counting half.

    The Mann-Whitney statistic: Hanley and McNeil, "The meaning and use of the area under a receiver operating
    characteristic (ROC) curve" (1982).

    Args:
        positive_T: total weight of positive samples in every tie. Ties are sorted by group, then by
            ascending score.
        negative_T: total weight of negative samples in every tie.
        group_T: group of every tie, int64 in [0, G); every group has a tie. None: a single group.

    Returns:
        AUC [G]; NaN for a group without positive or negative samples.
    """
    if group_T is None:
        group_T = np.zeros(len(positive_T), np.int64)
    positive_G, negative_G = sum_by_index(group_T, positive_T), sum_by_index(group_T, negative_T)
    lower_T = _sums_within_groups(negative_T, group_T, negative_G) - negative_T / 2
    with np.errstate(invalid="ignore"):  # 0 / 0 in groups with one class
        # Multiply shares, because a product of small weights would underflow.
        shares_T = positive_T / positive_G[group_T] * (lower_T / negative_G[group_T])
    areas: Floats = np.clip(sum_by_index(group_T, shares_T), 0.0, 1.0)
    areas[(positive_G == 0) | (negative_G == 0)] = np.nan
    return areas


def average_precision(positive_T: Floats, negative_T: Floats) -> float:
    """Return the area under the precision-recall curve: the mean precision at the scores of positive samples.

    The curve is not interpolated, as in scikit-learn's ``average_precision_score`` and TorchRec's AUPRC.

    Args:
        positive_T: total weight of positive samples in every tie, by ascending score.
        negative_T: total weight of negative samples in every tie.

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


def sum_by_index(index_n: Ints, values_n: Floats) -> Floats:
    """Return the sum of the values at each index: [1, 0, 1] and [2.0, 3.0, 4.0] give [3.0, 6.0]."""
    return np.bincount(index_n, values_n).astype(np.float64, copy=False)


def _sums_within_groups(values_T: Floats, group_T: Ints, totals_G: Floats) -> Floats:
    """Return inclusive cumulative sums that restart in every group, [T].

    Args:
        values_T: values, sorted by group.
        group_T: group per value, ascending.
        totals_G: sum of values per group.
    """
    # A global cumulative sum minus the value at the group's start would leave a rounding error. `bincount`
    # and `cumsum` add in the same order, so inserting minus a group's total after the group gives exactly 0
    # there.
    starts = np.flatnonzero(np.diff(group_T)) + 1
    sums = np.cumsum(np.insert(values_T, starts, -totals_G[:-1]))
    return np.delete(sums, starts + np.arange(len(starts)))


def sort_into_ties(scores_n: Floats, group_n: Ints | None = None) -> tuple[Ints, Ints, Ints]:
    """Sort samples by group, then by ascending score, and number the ties.

    Args:
        scores_n: scores without NaN.
        group_n: group per sample; None: a single group.

    Returns:
        Indices that sort the samples, [n]; the tie of every sorted sample, ascending from 0, [n]; and the
        position of every tie's first sample among the sorted samples, [T].

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
    """Stack columns and weights, drop zero-weight samples, and check that labels are in [0, 1].

    Args:
        columns: tensors with n values each; labels are last.
        weights: sample weights [n]; None: 1.

    Returns:
        float64 [k + 1, m]: the k columns, then weights divided by their maximum.
    """
    return weighted_clicks(stack_columns(*columns, weights=weights))


def weighted_clicks(columns: Tensor) -> Tensor:
    """Apply `normalize_samples` to stacked columns [k, n] whose labels must be in [0, 1]."""
    return normalize_samples(columns, *valid_click_labels(columns))


def valid_click_labels(columns: Tensor) -> tuple[Tensor, str]:
    """Return the mask [n] of labels in [0, 1], and this rule as text for error messages.

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
    """Return the AUC; NaN if a score is NaN, None without positive or negative samples.

    Args:
        columns: scores, labels and weights, [3, n], from `normalize_samples`.
    """
    scores, labels, weights = columns.cpu().numpy()
    if not len(scores):
        return None
    if np.isnan(scores).any():
        return float("nan")
    return none_if_nan(auc_by_group(scores, labels, weights, None)[0])


def none_if_nan(value: Any) -> float | None:
    """Convert to float, and NaN to None."""
    return None if np.isnan(value) else float(value)
