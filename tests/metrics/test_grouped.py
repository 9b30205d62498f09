import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from meshrec.metrics import binary_metrics, bootstrap_intervals, grouped_auc, sliced_metrics


def samples(num=800, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 8, (num,), generator=generator) / 4  # with ties
    labels = (torch.rand(num, generator=generator) < torch.sigmoid(logits)).float()
    return logits, labels, torch.randint(0, 30, (num,), generator=generator)


def test_gauc_is_the_mean_of_sklearns():
    logits, labels, groups = samples()
    labels[groups == 3] = 1.0  # of one kind: does not count
    areas, sizes = [], []
    for group in range(30):
        at = groups == group
        if 0 < labels[at].mean() < 1:
            areas.append(roc_auc_score(labels[at], logits[at]))
            sizes.append(int(at.sum()))
    assert len(areas) == 29
    assert grouped_auc(logits, labels, groups) == pytest.approx(np.average(areas, weights=sizes), rel=1e-12)
    assert grouped_auc(logits, torch.ones_like(logits), groups) is None


def test_slices_are_those_of_their_samples():
    logits, labels, groups = samples()
    found = sliced_metrics(logits, labels, groups.numpy(), 31)
    assert found[4] == {"samples": float((groups == 4).sum())} | binary_metrics(
        logits[groups == 4], labels[groups == 4]
    )
    assert found[30] == {"samples": 0.0}


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    inside, widths = 0, []
    for seed in range(40):
        logits, labels, _ = samples(400, seed)
        low, high = bootstrap_intervals(logits, labels, num=60, confidence=0.9, seed=seed)["auc"]
        inside += low <= 0.7804 <= high
        widths.append(high - low)
    assert 30 <= inside <= 40
    deviation = np.mean(widths) / 2 / 1.645
    assert deviation == pytest.approx(0.025, abs=0.01)  # Hanley and McNeil: 0.023


def test_numbers_that_cannot_be():
    logits, labels, _ = samples(10)
    with pytest.raises(ValueError, match="num must be at least 2"):
        bootstrap_intervals(logits, labels, num=1)
