import math

import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from meshrec.train import Trainer, join
from meshrec.train.evaluation import Window, area_under_curve, evaluate, quality
from meshrec.train.step import Outputs


def test_quality_is_that_of_scikit_learn():
    generator = torch.Generator().manual_seed(0)
    labels = (torch.rand(500, generator=generator) < 0.3).float()
    logits = (torch.randn(500, generator=generator) + labels).mul(4).round().div(4)  # with ties
    found = quality(logits, labels)
    assert found["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
    assert found["loss"] == pytest.approx(log_loss(labels, torch.sigmoid(logits.double())))
    rate = labels.double().mean().item()
    entropy = -rate * math.log(rate) - (1 - rate) * math.log(1 - rate)
    assert found["normalized_entropy"] == pytest.approx(found["loss"] / entropy)
    assert found["calibration"] == pytest.approx(torch.sigmoid(logits.double()).mean().item() / rate)


def test_one_class_has_no_auc():
    assert "auc" not in quality(torch.tensor([1.0, 2.0]), torch.ones(2))
    assert area_under_curve(torch.zeros(4), torch.tensor([0.0, 1, 0, 1])) == 0.5


def test_the_window_is_emptied():
    window = Window()
    window.add([Outputs(torch.tensor(1.0), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))])
    assert window.take(join("cpu"))["auc"] == 1.0
    assert window.is_empty


def test_evaluation_sees_every_sample_and_leaves_training_mode_on(small):
    recipe = small()
    dataset = recipe.data.load()
    trainer = Trainer(recipe, dataset, join("cpu"))
    found = evaluate(trainer.built.model, dataset.validation, join("cpu"))
    assert trainer.built.model.training
    (batch,) = dataset.validation.batches(dataset.validation.num_samples)
    with torch.no_grad():
        expected = quality(trainer.built.model(batch.dense, batch.sparse).squeeze(1), batch.labels)
    assert found == pytest.approx(expected)
