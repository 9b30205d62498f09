import math

import pytest
import torch

from meshrec.metrics import regression_metrics


def test_r2_needs_labels_that_differ():
    assert regression_metrics(torch.ones(3, 1), torch.full((3,), 0.1)).keys() == {"loss", "rmse", "mae"}
    assert regression_metrics(torch.ones(0), torch.ones(0)) == {}


def test_infinite_values_have_infinite_errors_and_nan_ones_none():
    labels = torch.tensor([1.0, 2.0])
    assert regression_metrics(torch.tensor([1.0, torch.inf]), labels)["mae"] == torch.inf
    undefined = regression_metrics(torch.tensor([1.0, math.nan]), labels)
    assert undefined.keys() == {"loss", "rmse", "mae", "r2"}
    assert all(math.isnan(value) for value in undefined.values())


def test_labels_must_be_finite_where_they_count():
    values, labels = torch.tensor([1.0, 1.0]), torch.tensor([1.0, torch.inf])
    with pytest.raises(ValueError, match=r"labels\[1\]"):
        regression_metrics(values, labels)
    assert regression_metrics(values, labels, torch.tensor([1.0, 0.0]))["loss"] == 0.0


def test_r2_of_labels_of_any_size():
    for size in (1e-200, 1.0, 1e200):
        labels = torch.tensor([0.0, 1.0, 2.0], dtype=torch.float64) * size
        values = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64) * size
        assert regression_metrics(values, labels)["r2"] == pytest.approx(0.5, abs=1e-15)
    weights = torch.tensor([1.0, 1.0, 5e-324], dtype=torch.float64)
    assert "r2" not in regression_metrics(values, torch.tensor([1.0, 1.0, 2.0]), weights)
