import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshrec.metrics import area_under_curve, binary_metrics
from meshrec.metrics.binary import area_under_histograms

sk = pytest.importorskip("sklearn.metrics")


def samples(num=500, distinct=40):
    rng = np.random.default_rng(0)
    logits = rng.integers(-distinct, distinct, num) / 10  # with ties
    labels = (rng.random(num) < 1 / (1 + np.exp(-logits / 2))).astype(np.float64)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(rng.random(num))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("distinct", [3, 40])
def test_as_scikit_learn(weighted, distinct):
    logits, labels, weights = samples(distinct=distinct)
    found = binary_metrics(logits, labels, weights if weighted else None)
    chances, y = torch.sigmoid(logits).numpy(), labels.numpy()
    w = weights.numpy() if weighted else None
    mean = np.full(len(y), np.average(y, weights=w))
    expected = {
        "auc": sk.roc_auc_score(y, chances, sample_weight=w),
        "loss": sk.log_loss(y, chances, sample_weight=w),
        "accuracy": sk.accuracy_score(y, chances > 0.5, sample_weight=w),
        "normalized_entropy": sk.log_loss(y, chances, sample_weight=w)
        / sk.log_loss(y, mean, sample_weight=w),
        "calibration": np.average(chances, weights=w) / mean[0],
    }
    assert found.pop("auc") == pytest.approx(expected.pop("auc"), abs=1e-12 if weighted else 1e-6)
    assert found == pytest.approx(expected, rel=1e-12)


def test_auc_keeps_the_order_of_large_logits_and_takes_soft_labels():
    logits, labels = torch.tensor([17.0, 20.0, 30.0, -1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert area_under_curve(logits, labels) == 1.0
    assert area_under_curve(logits, 0.25 + labels / 2) == pytest.approx(0.75)


def test_what_is_undefined_is_left_out():
    ones = torch.ones(3)
    assert area_under_curve(ones, ones) is None
    assert set(binary_metrics(ones, ones)) == {"loss", "accuracy", "calibration"}
    assert set(binary_metrics(ones, 0 * ones)) == {"loss", "accuracy"}
    assert binary_metrics(ones[:0], ones[:0]) == {}


def test_bins_count_half_within():
    assert area_under_histograms(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 1.0])) == 0.75


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"one entry per sample, got \[3, 2, 3\] entries"):
        binary_metrics(torch.ones(3, 1), torch.ones(2))


def of_rank():
    first, last = [(0, 300), (200, 500)][dist.get_rank()]
    return binary_metrics(*(each[first:last] for each in samples()))


def of_rank_alone():
    return binary_metrics(*samples(100 + dist.get_rank())[:2], gather=False) if dist.get_rank() else None


def test_one_rank_alone(ranks):
    assert ranks(2).run(of_rank_alone) == [None, binary_metrics(*samples(101)[:2])]


def test_without_torchmetrics_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchmetrics.functional.classification", None)
    with pytest.raises(ModuleNotFoundError, match=r"needs torchmetrics: pip install \"meshrec\[metrics\]\""):
        area_under_curve(*samples()[:2])


def test_samples_of_all_ranks_count(ranks):
    found = ranks(2).run(of_rank)
    expected = binary_metrics(*(torch.cat([each[:300], each[200:500]]) for each in samples()))
    assert found[0] == found[1] == pytest.approx(expected, rel=1e-12)
