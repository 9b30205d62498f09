import math

import numpy as np
import pytest
import torch

from meshrec.metrics import binary_metrics


def samples(num=500, distinct=40):
    rng = np.random.default_rng(0)
    logits = rng.integers(-distinct, distinct, num) / 10  # with ties
    labels = (rng.random(num) < 1 / (1 + np.exp(-logits / 2))).astype(np.float64)
    return torch.tensor(logits), torch.tensor(labels), torch.tensor(rng.random(num))


def test_infinite_logits_have_a_loss():
    logits, labels = torch.tensor([torch.inf, -torch.inf, 1.0]), torch.tensor([1.0, 0.0, 1.0])
    assert binary_metrics(logits, labels)["loss"] == pytest.approx(math.log1p(math.exp(-1)) / 3)
    assert binary_metrics(logits, 1 - labels)["loss"] == math.inf
    assert binary_metrics(logits, labels)["auc"] == 1.0


def test_nan_logits_leave_everything_undefined():
    logits, labels = torch.tensor([0.0, math.nan, 2.0]), torch.tensor([0.0, 1.0, 1.0])
    metrics = binary_metrics(logits, labels)
    assert metrics.keys() == {"auc", "loss", "accuracy", "calibration", "normalized_entropy"}
    assert all(math.isnan(value) for value in metrics.values())
    assert binary_metrics(logits, labels, torch.tensor([1.0, 0.0, 1.0]))["auc"] == 1.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_bad_weights_and_labels_are_refused_with_their_row(value):
    good, bad = torch.tensor([0.0, 1.0, 1.0]), torch.tensor([0.0, 1.0, value])
    with pytest.raises(ValueError, match=rf"\[2\].*{value}"):
        binary_metrics(good, good, bad)
    with pytest.raises(ValueError, match=rf"\[2\].*{value}"):
        binary_metrics(good, bad)
    assert binary_metrics(good, bad, torch.tensor([1.0, 1.0, 0.0])) == binary_metrics(good[:2], good[:2])


def test_weights_of_any_size_neither_overflow_nor_vanish():
    logits, labels, _ = samples(20)
    expected = binary_metrics(logits, labels)
    for weight in (1e-300, 1e308):
        assert binary_metrics(logits, labels, torch.full_like(labels, weight)) == pytest.approx(expected)
    small = torch.tensor([1e-200, 1e-200, 1.0, 1.0], dtype=torch.float64)
    assert binary_metrics(torch.arange(4.0), torch.tensor([0.0, 1.0, 0.0, 0.0]), small)["auc"] == (
        pytest.approx(0.0, abs=1e-12)
    )


def test_what_is_undefined_is_left_out():
    ones = torch.ones(3)
    assert set(binary_metrics(ones, ones)) == {"loss", "accuracy", "calibration"}
    assert set(binary_metrics(ones, 0 * ones)) == {"loss", "accuracy"}
    assert binary_metrics(ones[:0], ones[:0]) == binary_metrics(ones, ones, 0 * ones) == {}


def test_shapes_must_fit():
    with pytest.raises(ValueError, match=r"entry.*\[3, 2\]"):
        binary_metrics(torch.ones(3, 1), torch.ones(2))
