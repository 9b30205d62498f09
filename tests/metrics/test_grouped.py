import math

import numpy as np
import pytest
import torch

from meshrec.metrics import binary_metrics, bootstrap_intervals, grouped_auc, sliced_metrics


def samples(num=800, seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-8, 8, (num,), generator=generator) / 4  # with ties
    labels = (torch.rand(num, generator=generator) < torch.sigmoid(logits)).float()
    return logits, labels, torch.randint(0, 30, (num,), generator=generator)


def test_gauc_is_undefined_without_both_classes_or_with_nan():
    logits, labels, groups = samples()
    assert grouped_auc(logits, torch.ones_like(logits), groups) is None
    assert grouped_auc(logits, labels, groups, torch.zeros(800)) is None
    logits[5] = math.nan
    assert math.isnan(grouped_auc(logits, labels, groups))


def test_slices_are_those_of_their_samples():
    logits, labels, groups = samples()
    found = sliced_metrics(logits, labels, groups.numpy(), 31)
    assert found[4] == {"samples": float((groups == 4).sum())} | binary_metrics(
        logits[groups == 4], labels[groups == 4]
    )
    assert found[30] == {"samples": 0.0}
    weights = torch.rand(800)
    of_slice = binary_metrics(*(column[groups == 4] for column in (logits, labels, weights)))
    assert sliced_metrics(logits, labels, groups.numpy(), 31, weights)[4].items() >= of_slice.items()


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    inside, widths = 0, []
    for seed in range(20):
        logits, labels, _ = samples(400, seed)
        low, high = bootstrap_intervals(logits, labels, num=40, confidence=0.9, seed=seed)["auc"]
        inside += low <= 0.7804 <= high
        widths.append(high - low)
    assert 15 <= inside <= 20
    deviation = np.mean(widths) / 2 / 1.645
    assert deviation == pytest.approx(0.025, abs=0.01)  # Hanley and McNeil: 0.023


def test_numbers_that_cannot_be():
    logits, labels, _ = samples(10)
    with pytest.raises(ValueError, match=r"num.*2"):
        bootstrap_intervals(logits, labels, num=1)


def test_intervals_of_few_or_masked_samples_are_finite():
    logits, labels, _ = samples(40)
    weights = (torch.arange(40) < 3).double()
    masked, few = bootstrap_intervals(logits, labels, weights), bootstrap_intervals(logits[:3], labels[:3])
    assert masked == few
    assert all(math.isfinite(value) for interval in few.values() for value in interval)
    assert bootstrap_intervals(logits, labels, 0 * weights) == {}


def test_infinite_or_nan_metrics_have_no_interval():
    logits, labels = torch.tensor([torch.inf, 0.0, 1.0]), torch.tensor([0.0, 1.0, 0.0])
    assert bootstrap_intervals(logits, labels).keys() == {"auc", "accuracy", "calibration"}
    assert bootstrap_intervals(logits * math.nan, labels) == {}
