import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meshrec.metrics import class_metrics


def test_they_are_scikit_learns():
    rng = np.random.default_rng(0)
    truth, logits = rng.integers(0, 4, 500), rng.normal(size=(500, 4))
    logits[np.arange(500), truth] += 1
    chance = torch.softmax(torch.tensor(logits), 1).numpy()
    found = class_metrics(torch.tensor(logits), torch.tensor(truth))
    assert found["auc"] == pytest.approx(roc_auc_score(truth, chance, multi_class="ovr"))
    assert found["loss"] == pytest.approx(log_loss(truth, chance))
    assert found["accuracy"] == pytest.approx((logits.argmax(1) == truth).mean())


def test_one_class_has_no_auc():
    found = class_metrics(torch.randn(3, 2), torch.ones(3))
    assert set(found) == {"loss", "accuracy"}
    assert class_metrics(torch.randn(0, 2), torch.ones(0)) == {}
