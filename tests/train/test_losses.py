import pytest
import torch
from torch import nn

from meshrec.metrics import binary_metrics, number_metrics
from meshrec.metrics.named import quality
from meshrec.train import BinaryCrossEntropy, Huber, SquaredError, Task, Tasks


def samples():
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(50, generator=generator)
    labels = (torch.rand(50, generator=generator) < 0.3).float()
    return outputs, labels, torch.rand(50, generator=generator)


def test_losses_are_those_of_torch_weighted():
    outputs, labels, weights = samples()
    logs = nn.functional.logsigmoid(outputs), nn.functional.logsigmoid(-outputs)
    expected = -(weights * (3 * labels * logs[0] + (1 - labels) * logs[1])).sum()
    torch.testing.assert_close(BinaryCrossEntropy(positive_weight=3).sum(outputs, labels, weights), expected)
    torch.testing.assert_close(
        SquaredError().sum(outputs, labels, weights), (weights * (outputs - labels) ** 2).sum()
    )
    near = (outputs - labels).abs() < 0.5
    pieces = torch.where(near, 0.5 * (outputs - labels) ** 2, 0.5 * ((outputs - labels).abs() - 0.25))
    torch.testing.assert_close(Huber(delta=0.5).sum(outputs, labels, None), pieces.sum())


def test_tasks_add_up_and_the_first_one_chooses():
    outputs, labels, weights = samples()
    both, truth = torch.stack([outputs, 2 * outputs], 1), torch.stack([labels, labels + 1], 1)
    loss = Tasks(tasks=(Task("click", BinaryCrossEntropy()), Task("price", SquaredError(), 0.5)))
    expected = BinaryCrossEntropy().sum(outputs, labels, weights)
    expected += 0.5 * SquaredError().sum(2 * outputs, labels + 1, weights)
    torch.testing.assert_close(loss.sum(both, truth, weights), expected)
    found = loss.metrics(both, truth)
    assert found["auc"] == found["click/auc"] == binary_metrics(outputs, labels)["auc"]
    assert found["price/rmse"] == number_metrics(2 * outputs, labels + 1)["rmse"]
    torch.testing.assert_close(loss.scores(both), torch.stack([torch.sigmoid(outputs), 2 * outputs], 1))
    with pytest.raises(ValueError, match="the loss has 2 tasks"):
        loss.sum(both[:, :1], truth[:, :1], None)


def test_quality_is_large_where_the_model_is_good():
    assert quality({"auc": 0.7, "loss": 0.5}) == 0.7
    assert quality({"loss": 4.0, "rmse": 2.0}) == -4
    assert quality({"loss": 0.5}) is None  # clicks of one kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BinaryCrossEntropy(positive_weight=0.0), "loss.positive_weight is 0.0"),
        (lambda: Huber(delta=-1.0), "loss.delta is -1.0"),
        (lambda: Tasks(tasks=(Task("a", Huber()),)), "two or more of different names"),
    ],
)
def test_losses_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("loss", [SquaredError(), Huber()])
def test_outputs_and_labels_are_not_spread_over_each_other(loss):
    with pytest.raises(
        ValueError, match=r"the model returned \[2\], and labels are \[2, 2\]. Return one output"
    ):
        loss.sum(torch.zeros(2), torch.zeros(2, 2), None)
