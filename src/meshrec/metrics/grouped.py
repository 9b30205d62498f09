"""AUC within groups, metrics for slices of the data, and bootstrap confidence intervals."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.metrics.areas import auc_by_group, click_columns
from meshrec.metrics.binary import binary_metrics
from meshrec.metrics.gathering import encode_ids, id_column

# n samples, G groups


class Interval(NamedTuple):
    """Confidence interval for a metric, from ``low`` to ``high``."""

    low: float
    high: float


def grouped_auc(
    logits: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> float | None:
    """Compute the grouped AUC (GAUC): the mean of the AUCs within groups, such as users.

    Groups are weighted by the total weight of their samples. Groups whose labels are all equal are omitted.
    See Zhou et al., "Deep interest network for click-through rate prediction" (2018).

    Args:
        logits: logits, [n].
        labels: labels, [n], in [0, 1].
        groups: group ID per sample, any integers or floating-point numbers [n].
        weights: sample weights [n]; None: 1.

    Returns:
        GAUC; NaN if a logit is NaN; None if no group has both classes.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.

    Example::

        logits, labels = torch.tensor([0.0, 1.0, 5.0, 4.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
        assert grouped_auc(logits, labels, torch.tensor([7, 7, 8, 8])) == 0.5
    """
    # On the host, where groups are sorted with NumPy.
    columns = click_columns(id_column(groups), logits, labels, weights=weights).cpu()
    group = encode_ids(columns[0], "groups", is_floating=groups.is_floating_point())
    logits, labels, weights = columns[1:]
    if not len(group):
        return None
    if bool(logits.isnan().any()):
        return float("nan")
    areas = auc_by_group(logits.numpy(), labels.numpy(), weights.numpy(), group)
    # A group with only one class has no AUC.
    has_both = ~np.isnan(areas)
    if not has_both.any():
        return None
    return float(np.average(areas[has_both], weights=np.bincount(group, weights.numpy())[has_both]))


def sliced_metrics(
    logits: Tensor,
    labels: Tensor,
    slices: "npt.NDArray[np.int64]",
    num_slices: int,
    weights: Tensor | None = None,
) -> list[dict[str, float]]:
    """Compute `binary_metrics` for every slice of this rank's samples, such as the samples from one country.

    Args:
        logits: logits, [n].
        labels: labels, [n], in [0, 1].
        slices: slice number per sample, [n], in [0, num_slices).
        num_slices: number of slices.
        weights: sample weights [n]; None: 1.

    Returns:
        Metrics by name, for every slice. They include ``samples``, the number of samples in the slice, which
        counts samples with weight 0, too.
    """
    results = []
    for number in range(num_slices):
        positions = torch.from_numpy(np.flatnonzero(slices == number))
        slice_weights = None if weights is None else weights[positions]
        metrics = binary_metrics(logits[positions], labels[positions], slice_weights, gather=False)
        results.append({"samples": float(len(positions)), **metrics})
    return results


def bootstrap_intervals(
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None = None,
    *,
    num: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Compute bootstrap confidence intervals for `binary_metrics` over this rank's samples; see `bootstrap`.

    Args:
        logits: logits, [n].
        labels: labels, [n], in [0, 1].
        weights: sample weights [n]; None: 1.
        num: number of resamples.
        confidence: share of resamples inside the interval, such as 0.95.
        seed: random seed.

    Returns:
        Intervals by metric name; see `bootstrap`.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range, or as for `binary_metrics`.
    """
    columns = click_columns(logits, labels, weights=weights).cpu()
    # Every resample sorts the scores again, and sorting sorted scores is fast.
    logits, labels, weights = columns[:, torch.argsort(columns[0])]

    def metrics(counts: Tensor) -> dict[str, float]:
        """Return the metrics for a resample, given the number of repetitions per sample."""
        return binary_metrics(logits, labels, weights * counts, gather=False)

    return bootstrap(metrics, len(logits), num=num, confidence=confidence, seed=seed)


def bootstrap(
    metrics: Callable[[Tensor], dict[str, float]], num_samples: int, *, num: int, confidence: float, seed: int
) -> dict[str, Interval]:
    """Compute confidence intervals for any metrics by the bootstrap: from their quantiles over resamples.

    In a resample, a sample is repeated k times, where k is drawn from Poisson(1). This approximates drawing
    samples with replacement, as in Efron, "Bootstrap methods: another look at the jackknife" (1979). A
    resample without samples is drawn again. If a metric is undefined in some resamples, such as AUC without
    negatives, the interval is computed from the other resamples.

    Args:
        metrics: function that maps the repetitions per sample, float64 [num_samples], to metrics by name.
        num_samples: number of samples. Leave out samples with weight 0: a resample with only such samples has
            no metrics.
        num: number of resamples, at least 2.
        confidence: share of resamples inside the interval, in (0, 1).
        seed: random seed.

    Returns:
        Intervals by metric name. Metrics that are NaN or infinite in any resample are omitted.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range.
    """
    if num < 2 or not 0 < confidence < 1:
        raise ValueError(f"num must be at least 2 and confidence in (0, 1), got {num} and {confidence}.")
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {}
    for _ in range(num if num_samples else 0):
        while not (counts := rng.poisson(1.0, num_samples)).any():
            pass
        # A metric may be missing from some resamples.
        for name, value in metrics(torch.from_numpy(counts).double()).items():
            draws.setdefault(name, []).append(value)
    # Equal shares are cut off below and above.
    edges = (0.5 - confidence / 2, 0.5 + confidence / 2)
    return {
        name: Interval(*(float(edge) for edge in np.quantile(values, edges)))
        for name, values in draws.items()
        if np.isfinite(values).all()
    }
