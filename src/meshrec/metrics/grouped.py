"""Grouped AUC, slice metrics, and bootstrap confidence intervals."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.metrics.areas import areas_within, clicks
from meshrec.metrics.binary import binary_metrics
from meshrec.metrics.gathering import codes_of, integer_column

# n samples, G groups


class Interval(NamedTuple):
    """Metric confidence interval."""

    low: float
    high: float


def grouped_auc(
    logits: Tensor, labels: Tensor, groups: Tensor, weights: Tensor | None = None
) -> float | None:
    """Compute GAUC: the weighted mean AUC over groups, such as users.

    A group's weight is the sum of its sample weights. Groups with equal labels have no AUC and are omitted.
    Zhou et al., "Deep interest network for click-through rate prediction" (2018).

    Args:
        logits: [n].
        labels: [n], in [0, 1].
        groups: group per sample, [n].
        weights: sample weights [n]; None: 1.

    Returns:
        GAUC; NaN if a logit is NaN; None if no group has both classes.

    Raises:
        ValueError: sizes differ, or a label or weight is not allowed.

    Example::

        logits, labels = torch.tensor([0.0, 1.0, 5.0, 4.0]), torch.tensor([0.0, 1.0, 0.0, 1.0])
        assert grouped_auc(logits, labels, torch.tensor([7, 7, 8, 8])) == 0.5
    """
    columns = clicks(integer_column(groups), logits, labels, weights=weights).cpu()
    group = codes_of(columns[0], "groups", is_floating=groups.is_floating_point())
    logits, labels, weights = columns[1:]
    if not len(group):
        return None
    if bool(logits.isnan().any()):
        return float("nan")
    areas = areas_within(logits.numpy(), labels.numpy(), weights.numpy(), group)
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
    """Compute `binary_metrics` per slice, and sample counts as ``samples``.

    Args:
        logits: [n].
        labels: [n].
        slices: slice per sample, [n], in [0, num_slices).
        num_slices: slice count.
        weights: sample weights [n]; None: 1.
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
    """Compute bootstrap percentile intervals of `binary_metrics`; see `resampled`.

    Args:
        logits: [n].
        labels: [n].
        weights: sample weights [n]; None: 1.
        num: resample count.
        confidence: resample share inside the interval.
        seed: random seed.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range, or as for `binary_metrics`.
    """
    columns = clicks(logits, labels, weights=weights).cpu()
    # Every resample sorts again, and sorting sorted scores is fast.
    logits, labels, weights = columns[:, torch.argsort(columns[0])]

    def metrics(counts: Tensor) -> dict[str, float]:
        return binary_metrics(logits, labels, weights * counts, gather=False)

    return resampled(metrics, len(logits), num=num, confidence=confidence, seed=seed)


def resampled(
    metrics: Callable[[Tensor], dict[str, float]], num_samples: int, *, num: int, confidence: float, seed: int
) -> dict[str, Interval]:
    """Compute bootstrap percentile intervals.

    Sample counts are drawn from Poisson(1), which approximates drawing with replacement: Efron, "Bootstrap
    methods: another look at the jackknife" (1979). Empty resamples are redrawn. A metric undefined in some
    resamples, such as AUC without a class, uses the others; a metric that is NaN or infinite in any resample
    has no interval.

    Args:
        metrics: computes metrics from sample counts, float64 [num_samples].
        num_samples: count, without zero-weight samples.
        num: resample count.
        confidence: resample share inside the interval.
        seed: random seed.

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
        for name, value in metrics(torch.from_numpy(counts).double()).items():
            draws.setdefault(name, []).append(value)
    edges = (0.5 - confidence / 2, 0.5 + confidence / 2)
    return {
        name: Interval(*(float(edge) for edge in np.quantile(values, edges)))
        for name, values in draws.items()
        if np.isfinite(values).all()
    }
