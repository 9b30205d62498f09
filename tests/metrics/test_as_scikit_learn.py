"""Every metric on random inputs against scikit-learn, or against its definition where scikit-learn has none.

``MESHREC_METRIC_DRAWS=10000 pytest tests/metrics/test_as_scikit_learn.py`` draws more.
"""

import math
import os
from collections import defaultdict
from fractions import Fraction
from itertools import accumulate

import numpy as np
import pytest
import sklearn
import torch
from sklearn import metrics as sk

from meshrec.metrics import (
    area_under_curve,
    binary_metrics,
    class_metrics,
    grouped_auc,
    query_metrics,
    rank_metrics,
    regression_metrics,
)

DRAWS = int(os.environ.get("MESHREC_METRIC_DRAWS", "300"))
KINDS = 8


class Drawn:
    """Random samples with ties, weights of many sizes, samples of weight 0, and small or empty groups."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.num = num = int(rng.choice([0, 1, 2, 5, 20, 100]))
        self.scores = rng.integers(-6, 7, num) / rng.choice([1.0, 3.0])
        if rng.random() < 0.3:
            self.scores = rng.normal(size=num) * 3
        self.clicks = (rng.random(num) < rng.choice([0.0, 0.1, 0.5, 1.0])).astype(float)
        self.groups = rng.integers(0, max(1, num // int(rng.integers(1, 8))), num)
        self.weights = None
        if rng.random() < 0.7:
            self.weights = rng.random(num) * 10.0 ** rng.integers(-6, 7)
            self.weights[rng.random(num) < rng.choice([0.0, 0.3, 1.0], p=[0.4, 0.5, 0.1])] = 0.0
        # What counts: scikit-learn knows neither empty inputs nor inputs whose weights are all 0.
        self.w = np.ones(num) if self.weights is None else self.weights
        self.at = self.w > 0

    def tensors(self, *columns):
        return *(torch.tensor(column) for column in columns), self.optional

    @property
    def optional(self):
        return None if self.weights is None else torch.tensor(self.weights)


def auc(labels, scores, weights):
    return sk.roc_auc_score(labels, scores, sample_weight=weights) if len(set(labels)) == 2 else None


def clicks(drawn):
    y, s, w = drawn.clicks[drawn.at], drawn.scores[drawn.at], drawn.w[drawn.at]
    found = binary_metrics(*drawn.tensors(drawn.scores, drawn.clicks))
    assert found.get("auc") == area_under_curve(*drawn.tensors(drawn.scores, drawn.clicks))
    if not len(y):
        return found, {}
    chance = 1 / (1 + np.exp(-s))
    expected = {
        "loss": sk.log_loss(y, chance, sample_weight=w, labels=[0, 1]),
        "accuracy": sk.accuracy_score(y, s > 0, sample_weight=w),
    }
    if y.any():
        expected["calibration"] = np.average(chance, weights=w) / np.average(y, weights=w)
    if len(set(y)) == 2:
        mean = np.full(len(y), np.average(y, weights=w))
        expected["auc"] = auc(y, s, w)
        expected["normalized_entropy"] = expected["loss"] / sk.log_loss(y, mean, sample_weight=w)
    return found, expected


def groups(drawn):
    areas, sizes = [], []
    for group in set(drawn.groups):
        at = drawn.at & (drawn.groups == group)
        area = auc(drawn.clicks[at], drawn.scores[at], drawn.w[at])
        if area is not None:
            areas.append(area)
            sizes.append(drawn.w[at].sum())
    scores, labels, numbers, weights = drawn.tensors(drawn.scores, drawn.clicks, drawn.groups)
    found = grouped_auc(scores, labels, numbers, weights)
    expected = {"gauc": np.average(areas, weights=sizes)} if areas else {}
    return {} if found is None else {"gauc": found}, expected


def first_relevant(relevant, scores):
    """Return the mean of 1 / position of the first relevant sample over all orders of ties."""
    by_score = defaultdict(list)
    for score, is_relevant in zip(scores, relevant, strict=True):
        by_score[score].append(bool(is_relevant))
    before = 0
    for score in sorted(by_score, reverse=True):
        tie = by_score[score]
        size, num = len(tie), sum(tie)
        if num:
            chances = [
                Fraction(math.comb(size - j, num - 1), math.comb(size, num)) for j in range(1, size + 1)
            ]
            return float(sum(chance / (before + j) for j, chance in enumerate(chances, 1)))
        before += size
    raise AssertionError


def queries(drawn):
    labels = drawn.rng.integers(0, 4, drawn.num) * (drawn.rng.random(drawn.num) < 0.4)
    ks = (1, 3, 10)
    values, sizes = defaultdict(list), []
    for query in set(drawn.groups):
        at = drawn.at & (drawn.groups == query)
        if not labels[at].any():
            continue
        sizes.append(drawn.w[at].mean())
        values["mrr"].append(first_relevant(labels[at] > 0, drawn.scores[at]))
        for k in ks:
            alone = at.sum() == 1  # of a single sample, scikit-learn computes nothing
            gains = [2.0 ** labels[at] - 1]
            values[f"ndcg@{k}"].append(1.0 if alone else sk.ndcg_score(gains, [drawn.scores[at]], k=k))
    found = query_metrics(*drawn.tensors(drawn.scores, 1.0 * labels, drawn.groups), ks=ks)
    return found, {name: np.average(each, weights=sizes) for name, each in values.items()}


def numbers(drawn):
    said = drawn.scores + drawn.rng.normal(size=drawn.num)
    found = regression_metrics(*drawn.tensors(said, drawn.scores))
    y, p, w = drawn.scores[drawn.at], said[drawn.at], drawn.w[drawn.at]
    if not len(y):
        return found, {}
    error = sk.mean_squared_error(y, p, sample_weight=w)
    expected = {"loss": error, "rmse": math.sqrt(error)}
    expected["mae"] = sk.mean_absolute_error(y, p, sample_weight=w)
    if len(set(y)) > 1:
        expected["r2"] = sk.r2_score(y, p, sample_weight=w)
    return found, expected


def rare_class(drawn):
    """Few labels of one class, or of little weight: scikit-learn would round the mean label."""
    labels = (drawn.rng.random(drawn.num) < 0.2) * (1.0 if drawn.rng.random() < 0.5 else 1e-3)
    drawn.w = drawn.w * np.where(labels > 0, 10.0 ** -drawn.rng.integers(0, 9), 1.0)
    is_flipped = drawn.rng.random() < 0.5
    found = binary_metrics(
        *(torch.tensor(each) for each in (drawn.scores, 1 - labels if is_flipped else labels, drawn.w))
    )
    y, w = labels[drawn.at], drawn.w[drawn.at]
    if not y.any() or y.all():
        return {}, {}
    rare, chance = np.average(y, weights=w), 1 / (1 + np.exp(-drawn.scores[drawn.at]))
    chance = 1 - chance if is_flipped else chance
    loss = -np.average(y * np.log(chance) + (1 - y) * np.log1p(-chance), weights=w)
    expected = loss / -(rare * np.log(rare) + (1 - rare) * np.log1p(-rare))
    return {"normalized_entropy": found["normalized_entropy"]}, {"normalized_entropy": expected}


def nearly_constant(drawn):
    """Labels that differ little from a large one. In binary steps, which scikit-learn sees without it."""
    step, labels = 2.0 ** -drawn.rng.integers(0, 26), drawn.rng.integers(-3, 4, drawn.num)
    values = labels + drawn.rng.integers(-2, 3, drawn.num)
    constant = float(drawn.rng.integers(-(2**24), 2**24))
    found = regression_metrics(*drawn.tensors(constant + step * values, constant + step * labels))
    y, p, w = labels[drawn.at], values[drawn.at], drawn.w[drawn.at]
    if len(set(y)) < 2:
        assert "r2" not in found
        return {}, {}
    return {"r2": found["r2"]}, {"r2": sk.r2_score(y, p, sample_weight=w)}


def classes(drawn):
    logits = drawn.rng.integers(-3, 4, (drawn.num, 4)) * 1.0
    labels = drawn.rng.integers(0, int(drawn.rng.integers(1, 5)), drawn.num)
    found = class_metrics(*drawn.tensors(logits, labels))
    y, w = labels[drawn.at], drawn.w[drawn.at]
    if not len(y):
        return found, {}
    logs = torch.log_softmax(torch.tensor(logits[drawn.at]), 1).numpy()
    expected = {
        "loss": sk.log_loss(y, np.exp(logs), sample_weight=w, labels=[0, 1, 2, 3]),
        "accuracy": sk.accuracy_score(y, logs.argmax(1), sample_weight=w),
    }
    areas = [area for c in range(4) if (area := auc(y == c, logs[:, c], w)) is not None]
    return found, expected | ({"auc": np.mean(areas)} if areas else {})


def next_items(drawn):
    num, ks = int(drawn.rng.integers(2, 30)), (1, 5, 40)
    scores = drawn.rng.integers(0, 4, (drawn.num, num))
    target = drawn.rng.integers(0, num, drawn.num)
    own = scores[np.arange(drawn.num), target][:, None]
    above, ties = (scores > own).sum(1), (scores == own).sum(1) - 1
    losses = drawn.rng.normal(size=drawn.num)
    places = drawn.tensors(losses, 1 + above + ties / 2)
    found = rank_metrics(*places, torch.tensor(ties), ks=ks)
    if not drawn.at.any():
        return found, {}
    w, of_rank = drawn.w[drawn.at], 1 / np.arange(1, num + 1)
    reciprocal = [of_rank[a : a + t + 1].mean() for a, t in zip(above, ties, strict=True)]
    expected = {
        "loss": np.average(losses[drawn.at], weights=w),
        "mrr": np.average(np.array(reciprocal)[drawn.at], weights=w),
    }
    is_target = (np.arange(num) == target[:, None])[drawn.at]
    for k in ks:
        expected[f"ndcg@{k}"] = sk.ndcg_score(is_target, scores[drawn.at], k=k, sample_weight=w)
        for name, value in (("recall", np.ones(num)), ("mrr", of_rank)):
            sums = [0.0, *accumulate(value * (np.arange(num) < k))]
            means = [(sums[a + t + 1] - sums[a]) / (t + 1) for a, t in zip(above, ties, strict=True)]
            expected[f"{name}@{k}"] = np.average(np.array(means)[drawn.at], weights=w)
    return found, expected


@pytest.mark.parametrize(
    "kind", [clicks, rare_class, groups, queries, numbers, nearly_constant, classes, next_items]
)
def test_metrics_of_random_inputs(kind):
    with sklearn.config_context(assume_finite=True, skip_parameter_validation=True):
        for seed in range(-(-DRAWS // KINDS)):
            found, expected = kind(Drawn(seed))
            assert found.keys() == expected.keys(), seed
            for name, value in expected.items():
                assert found[name] == pytest.approx(value, abs=1e-12, rel=1e-12), (seed, name)
