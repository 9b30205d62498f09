import pytest
import torch
from sklearn.metrics import mean_absolute_error, mean_squared_error, r2_score

from meshrec.metrics import number_metrics


def test_figures_are_sklearns():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randn(90, generator=generator)
    values = labels + 0.5 * torch.randn(90, generator=generator)
    found = number_metrics(values[:, None], labels)
    assert found["loss"] == pytest.approx(mean_squared_error(labels, values), rel=1e-6)
    assert found["rmse"] == pytest.approx(found["loss"] ** 0.5)
    assert found["mae"] == pytest.approx(mean_absolute_error(labels, values), rel=1e-6)
    assert found["r2"] == pytest.approx(r2_score(labels, values), rel=1e-6)
    assert "r2" not in number_metrics(values[:1], labels[:1])
    assert number_metrics(values[:0], labels[:0]) == {}
