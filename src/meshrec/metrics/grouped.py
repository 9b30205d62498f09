"""Metrics of parts of the samples, and how far chance could have moved them."""

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
    """Where a metric lies with so much confidence."""

    low: float
    high: float


def grouped_auc(logits: Tensor, labels: Tensor, groups: Tensor) -> float | None:
    """GAUC: the AUC inside each group, such as a user's samples, averaged with the groups' sizes as weights.

    Groups whose labels are of one kind have no AUC and do not count. Zhou et al.: "Deep interest network for
    click-through rate prediction" (2018).

    Args:
        logits, labels: [n], labels 0 or 1.
        groups: [n] integers.

    Returns:
        None where no group has labels of both kinds.
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
    """`binary_metrics` of each slice, with the number of its samples under ``samples``.

    Args:
        logits, labels: [n].
        slices: [n], which slice a sample is in.
        num_slices: how many there are.
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
    """Percentile intervals of `binary_metrics`: what samples drawn anew from these samples would say.

    Each sample counts a Poisson number of times, which is the bootstrap for many samples. Efron: "Bootstrap
    methods: another look at the jackknife" (1979).

    Args:
        logits, labels: [n].
        num: how often samples are drawn.
        confidence: the share of draws inside the interval.
        seed: of the draws.

    Raises:
        ValueError: numbers out of range.
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
