"""A quick test on rows: which crosses of columns, and which ranges of numbers, help to predict a binary
label.

Half of the rows fit smoothed log-odds, the other half judges them. What does not lower the loss of the other
half by clearly more than chance is not proposed.

Shape legend: n rows.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Vector = npt.NDArray[np.float64]

_SMOOTHING = 10.0
_ROUNDS = 6
_LEAST = 0.002
"""The smallest share of the loss that a proposed feature must save."""
_DEVIATIONS = 3.0
_MOST_COLUMNS = 10
_BINS = 16


class Gain(NamedTuple):
    """The share of the log loss that a candidate saves, and whether it is clearly more than chance."""

    share: float
    pays: bool


def best_crosses(codes: dict[str, Codes], labels: Vector, most: int = 3) -> list[tuple[str, str, float]]:
    """Return the pairs of columns whose cross predicts the label best, beyond the two columns alone.

    Each pair comes with its gain, the best one first.

    Args:
        codes: the number of each row's value by column, from 0.
        labels: 0 or 1 for each row, [n].
        most: how many pairs to return at most.
    """
    alone = {name: gain([], each, labels).share for name, each in codes.items()}
    names = sorted(alone, key=lambda name: -alone[name])[:_MOST_COLUMNS]
    found = []
    for first, second in itertools.combinations([name for name in codes if name in names], 2):
        cross = codes[first] * (codes[second].max(initial=0) + 1) + codes[second]
        said = gain([codes[first], codes[second]], np.unique(cross, return_inverse=True)[1], labels)
        if said.pays:
            found.append((first, second, said.share))
    return sorted(found, key=lambda each: -each[2])[:most]


def ranges_pay(values: Vector, labels: Vector) -> Gain:
    """Return the gain of ranges of a number over a linear term. Null and NaN have a range of their own."""
    finite = np.isfinite(values)
    if finite.sum() < 2 * _BINS:
        return Gain(0.0, False)
    edges = np.unique(np.quantile(values[finite], np.linspace(0, 1, _BINS + 1)[1:-1]))
    ranges = np.where(finite, 1 + np.searchsorted(edges, values, side="right"), 0)
    middle, deviation = np.median(values[finite]), values[finite].std() or 1.0
    line = np.clip((np.where(finite, values, middle) - middle) / deviation, -5.0, 5.0)
    return gain([], ranges.astype(np.int64), labels, line=line)


def gain(known: Sequence[Codes], more: Codes, labels: Vector, line: Vector | None = None) -> Gain:
    """Return the gain of the codes ``more`` over the columns ``known`` and a linear term in ``line``."""
    fits = np.arange(len(labels)) % 2 == 0
    logits = np.full(len(labels), _logit(labels[fits].mean()))
    for _ in range(_ROUNDS):
        for codes in known:
            logits += _step(codes, labels, logits, fits)
        if line is not None:
            logits += _line_step(line, labels, logits, fits)
    before = _losses(logits, labels)[~fits]
    for _ in range(3):
        logits += _step(more, labels, logits, fits)
    saved = before - _losses(logits, labels)[~fits]
    if not len(saved) or not before.mean() > 0:
        return Gain(0.0, False)
    share, deviation = saved.mean() / before.mean(), saved.std() / np.sqrt(len(saved))
    return Gain(float(share), bool(share > _LEAST and saved.mean() > _DEVIATIONS * deviation))


def _step(codes: Codes, labels: Vector, logits: Vector, fits: npt.NDArray[np.bool_]) -> Vector:
    """Return a damped Newton step of one weight per value, for all rows."""
    chance = 1 / (1 + np.exp(-logits))
    num = int(codes.max(initial=0)) + 1
    slope = np.bincount(codes[fits], (labels - chance)[fits], minlength=num)
    curvature = np.bincount(codes[fits], (chance * (1 - chance))[fits], minlength=num)
    weights: Vector = slope / (curvature + _SMOOTHING / 4)
    return weights[codes]


def _line_step(line: Vector, labels: Vector, logits: Vector, fits: npt.NDArray[np.bool_]) -> Vector:
    chance = 1 / (1 + np.exp(-logits))
    columns = np.stack([np.ones_like(line), line])
    slope = columns[:, fits] @ (labels - chance)[fits]
    curvature = (columns[:, fits] * (chance * (1 - chance))[fits]) @ columns[:, fits].T
    weights = np.linalg.solve(curvature + 1e-3 * np.eye(2), slope)
    step: Vector = (weights @ columns).astype(np.float64)
    return step


def _losses(logits: Vector, labels: Vector) -> Vector:
    losses: Vector = np.logaddexp(0, logits) - labels * logits
    return losses


def _logit(share: float) -> float:
    share = min(max(float(share), 1e-6), 1 - 1e-6)
    return float(np.log(share / (1 - share)))
