import math

import pytest
import torch

from meshrec.metrics import class_metrics


def test_one_class_has_no_auc():
    found = class_metrics(torch.randn(3, 2), torch.ones(3))
    assert set(found) == {"loss", "accuracy"}
    assert class_metrics(torch.randn(0, 2), torch.ones(0)) == {}
    assert class_metrics(torch.randn(3, 2), torch.ones(3), torch.zeros(3)) == {}


def test_of_equal_logits_the_first_class_is_taken():
    assert class_metrics(torch.zeros(3, 2), torch.tensor([0, 0, 1]))["accuracy"] == pytest.approx(2 / 3)


def test_nan_logits_leave_everything_undefined():
    logits = torch.tensor([[0.0, 1.0], [math.nan, 0.0]])
    metrics = class_metrics(logits, torch.tensor([0, 1]))
    assert metrics.keys() == {"auc", "loss", "accuracy"}
    assert all(math.isnan(value) for value in metrics.values())


@pytest.mark.parametrize("label", [-1.0, 0.5, 2.0, math.nan])
def test_labels_that_are_no_class_are_refused(label):
    with pytest.raises(ValueError, match=rf"\[1\].*{label}"):
        class_metrics(torch.zeros(2, 2), torch.tensor([0.0, label]))
