import pytest
import torch

from meshrec.metrics import binary_metrics
from meshrec.train import Trainer, join
from meshrec.train.evaluation import Window, evaluate
from meshrec.train.step import Outputs


def test_the_window_is_emptied():
    window = Window()
    window.add([Outputs(torch.tensor(1.0), torch.tensor([1.0, -1.0]), torch.tensor([1.0, 0.0]))])
    assert window.take(join("cpu"))["auc"] == 1.0
    assert window.is_empty


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_dense_values_that_training_refuses_are_not_scored(small, value):
    recipe = small()
    dataset = recipe.data.load()
    (batch,) = dataset.validation.batches(dataset.validation.num_samples)
    batch.dense[3, 1] = value

    class One:
        def batches(self, *_, **__):
            yield batch

    trainer = Trainer(recipe, dataset, join("cpu"))
    with pytest.raises(ValueError, match="a batch to score has dense values that are NaN or infinite"):
        next(trainer.predict(One()))


def test_evaluation_sees_every_sample_and_leaves_training_mode_on(small):
    recipe = small()
    dataset = recipe.data.load()
    trainer = Trainer(recipe, dataset, join("cpu"))
    found = evaluate(trainer.built.model, dataset.validation, join("cpu"))
    assert trainer.built.model.training
    (batch,) = dataset.validation.batches(dataset.validation.num_samples)
    with torch.no_grad():
        expected = binary_metrics(trainer.built.model(batch.dense, batch.sparse).squeeze(1), batch.labels)
    assert found == pytest.approx(expected)
