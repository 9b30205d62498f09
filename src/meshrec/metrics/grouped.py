"""AUC within groups, metrics of slices, and bootstrap confidence intervals."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from meshrec.metrics.binary import (
    BinarySums,
    area_under_histograms,
    binary_metrics,
    binary_sums,
    checked,
    metrics_of,
)

# n samples, G groups


class Interval(NamedTuple):
    """Confidence interval of a metric."""

    low: float
    high: float


def grouped_auc(logits: Tensor, labels: Tensor, groups: Tensor) -> float | None:
    """Compute GAUC: the mean AUC within each group, such as the samples of one user, weighted by group size.

    Groups whose labels are all equal have no AUC and are left out. Zhou et al.: "Deep interest network for
    click-through rate prediction" (2018).

    Args:
        logits, labels: tensors [n]; labels 0 or 1.
        groups: integer group of each sample, [n].

    Returns:
        GAUC, or None if no group has labels of both classes.
    """
    scores, truth, group = logits.double().numpy(), labels.numpy() > 0.5, groups.numpy()
    order = np.lexsort((scores, group))
    scores, truth, group = scores[order], truth[order], group[order]
    starts_tie = np.ones(len(scores), np.bool_)
    starts_tie[1:] = (group[1:] != group[:-1]) | (scores[1:] != scores[:-1])
    starts_group = np.ones(len(scores), np.bool_)
    starts_group[1:] = group[1:] != group[:-1]
    ties = np.flatnonzero(starts_tie)
    sizes = np.diff(np.append(ties, len(scores)))
    firsts = np.flatnonzero(starts_group)
    number = np.cumsum(starts_group) - 1
    # Ranks from 1 inside the group; ties share their mean.
    rank = np.repeat(ties + (sizes + 1) / 2, sizes) - firsts[number]
    num = np.bincount(number)
    positive = np.bincount(number, truth)
    sums = np.bincount(number, rank * truth)
    pairs = positive * (num - positive)
    counts = pairs > 0
    if not counts.any():
        return None
    areas = (sums - positive * (positive + 1) / 2)[counts] / pairs[counts]
    return float(np.average(areas, weights=num[counts]))


def sliced_metrics(
    logits: Tensor, labels: Tensor, slices: "npt.NDArray[np.int64]", num_slices: int
) -> list[dict[str, float]]:
    """Compute `binary_metrics` of each slice, and its number of samples under ``samples``.

    Args:
        logits, labels: tensors [n].
        slices: the slice of each sample, [n], in [0, num_slices).
        num_slices: number of slices.
    """
    found = []
    for number in range(num_slices):
        at = torch.from_numpy(np.flatnonzero(slices == number))
        metrics = binary_metrics(logits[at], labels[at], gather=False) if len(at) else {}
        found.append({"samples": float(len(at)), **metrics})
    return found


def bootstrap_intervals(
    logits: Tensor, labels: Tensor, *, num: int = 200, confidence: float = 0.95, seed: int = 0
) -> dict[str, Interval]:
    """Compute bootstrap percentile intervals of `binary_metrics`.

    Each sample is weighted by a Poisson(1) count, which approximates resampling for large n. Efron:
    "Bootstrap methods: another look at the jackknife" (1979).

    Args:
        logits, labels: tensors [n].
        num: number of resamplings.
        confidence: share of the resamplings inside the interval.
        seed: seed of the resampling.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range.
    """
    if num < 2 or not 0 < confidence < 1:
        raise ValueError(f"num must be at least 2 and confidence in (0, 1), got {num} and {confidence}.")
    columns = checked(logits, labels, None)
    flat, truth = columns[0], columns[1]
    _, place = torch.unique(flat, return_inverse=True)
    rng = np.random.default_rng(seed)
    draws: dict[str, list[float]] = {}
    for _ in range(num):
        weights = torch.from_numpy(rng.poisson(1.0, len(flat)).astype(np.float64))
        found = metrics_of(BinarySums(*binary_sums(flat, truth, weights).tolist()))
        positive = torch.bincount(place, weights * truth)
        negative = torch.bincount(place, weights * (1 - truth))
        area = area_under_histograms(positive, negative)
        for name, value in {**found, **({} if area is None else {"auc": area})}.items():
            draws.setdefault(name, []).append(value)
    edges = (0.5 - confidence / 2, 0.5 + confidence / 2)
    return {
        name: Interval(*(float(each) for each in np.quantile(values, edges)))
        for name, values in draws.items()
    }
