import numpy as np
import pytest
import torch

from meshrec.metrics import (
    auc_interval,
    binary_curves,
    bootstrap_intervals,
    effective_sizes,
    score_histograms,
)


def scores(num, seed=0):
    torch.manual_seed(seed)
    labels = (torch.rand(num) < 0.3).float()
    return torch.randn(num) + labels - 1.2, labels


def test_the_area_under_the_points_is_the_auc_and_groups_add_up():
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = scores(5000)
    curves = binary_curves(score_histograms(logits, labels))
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


def test_precision_recall_and_gains_are_those_of_the_thresholds():
    sklearn = pytest.importorskip("sklearn.metrics")
    logits, labels = scores(5000)
    curves = binary_curves(score_histograms(logits, labels))
    precision, recall, _ = sklearn.precision_recall_curve(labels, logits)
    x, y = np.array(curves["precision_recall"]).T
    assert (x[-1], y[-1]) == (1.0, pytest.approx(float(labels.mean()), abs=1e-5))
    assert y[5:] == pytest.approx(np.interp(x[5:], recall[::-1], precision[::-1]), abs=0.02)
    share, positive = np.array(curves["gains"]).T
    order = torch.argsort(logits, descending=True)
    taken = labels[order].cumsum(0) / labels.sum()
    expected = np.interp(share, np.arange(5001) / 5000, [0, *taken.tolist()])
    assert positive == pytest.approx(expected, abs=2e-3)


def test_histograms_of_parts_add_up():
    logits, labels = scores(400)
    parts = score_histograms(logits[:150], labels[:150]) + score_histograms(logits[150:], labels[150:])
    torch.testing.assert_close(parts, score_histograms(logits, labels))


def test_samples_of_weight_0_are_not_there_and_equal_weights_change_no_size():
    logits, labels = scores(400)
    weights = torch.cat([torch.full((300,), 7.0), torch.zeros(100)])
    curves, expected = (
        binary_curves(score_histograms(*columns))
        for columns in ((logits, labels, weights), (logits[:300], labels[:300]))
    )
    assert [curves[name] for name in ("positive", "negative")] == pytest.approx(
        [expected[name] for name in ("positive", "negative")]
    )
    assert curves["roc"] == expected["roc"]


def test_effective_sizes_are_those_of_kish():
    histograms = score_histograms(
        torch.zeros(3), torch.tensor([1.0, 1.0, 0.0]), torch.tensor([1.0, 3.0, 9.0])
    )
    assert effective_sizes(histograms) == pytest.approx((16 / 10, 1.0))


def test_without_one_of_the_classes_there_are_no_curves():
    curves = binary_curves(score_histograms(torch.tensor([-50.0, 50.0]), torch.zeros(2)))
    assert curves == {
        "positive": 0.0,
        "negative": 2.0,
        "roc": [],
        "precision_recall": [],
        "gains": [],
        "calibration": [],
    }


def test_the_interval_is_that_of_the_bootstrap():
    logits, labels = scores(3000)
    drawn = bootstrap_intervals(logits, labels, num=200)["auc"]
    middle = (drawn.low + drawn.high) / 2
    low, high = auc_interval(middle, float(labels.sum()), float((1 - labels).sum()))
    assert high - low == pytest.approx(drawn.high - drawn.low, rel=0.25)
    assert auc_interval(1.0, 3, 4) == (1.0, 1.0)
