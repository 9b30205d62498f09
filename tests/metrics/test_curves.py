import numpy as np
import pytest
import torch

from meshrec.metrics import auc_interval, bootstrap_intervals, curves_of, score_histograms


def scores(num, seed=0):
    torch.manual_seed(seed)
    labels = (torch.rand(num) < 0.3).float()
    return torch.randn(num) + labels - 1.2, labels


def test_the_area_under_the_points_is_the_auc_and_groups_add_up():
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = scores(5000)
    curves = curves_of(score_histograms(logits, labels))
    assert (curves["positive"], curves["negative"]) == (labels.sum(), (1 - labels).sum())
    x, y = np.array(curves["roc"]).T
    assert (x[0], y[0], x[-1], y[-1]) == (0, 0, 1, 1)
    area = ((y[1:] + y[:-1]) / 2 * np.diff(x)).sum()
    assert area == pytest.approx(sklearn.roc_auc_score(labels, logits), abs=2e-3)
    predicted, share, count = np.array(curves["calibration"]).T
    assert count.sum() == 5000
    assert (predicted * count).sum() == pytest.approx(float(torch.sigmoid(logits).sum()))
    assert (share * count).sum() == pytest.approx(float(labels.sum()))
    assert (np.diff(predicted) > 0).all()


def test_histograms_of_parts_add_up():
    logits, labels = scores(400)
    parts = score_histograms(logits[:150], labels[:150]) + score_histograms(logits[150:], labels[150:])
    torch.testing.assert_close(parts, score_histograms(logits, labels))


def test_without_one_of_the_classes_there_are_no_curves():
    curves = curves_of(score_histograms(torch.tensor([-50.0, 50.0]), torch.zeros(2)))
    assert curves == {"positive": 0.0, "negative": 2.0, "roc": [], "calibration": []}


def test_the_interval_is_that_of_the_bootstrap():
    logits, labels = scores(3000)
    drawn = bootstrap_intervals(logits, labels, num=200)["auc"]
    middle = (drawn.low + drawn.high) / 2
    low, high = auc_interval(middle, float(labels.sum()), float((1 - labels).sum()))
    assert high - low == pytest.approx(drawn.high - drawn.low, rel=0.25)
    assert auc_interval(1.0, 3, 4) == (1.0, 1.0)
