import pytest
import torch
from torch import nn

from meshrec.metrics import binary_metrics, regression_metrics
from meshrec.metrics.named import quality
from meshrec.train import (
    BinaryCrossEntropy,
    Huber,
    NextItem,
    Ranking,
    Softmax,
    SquaredError,
    Task,
    Tasks,
)
from meshrec.train.losses import ensemble_loss


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


def test_fake_negative_weights_have_no_gradient():
    outputs, labels, weights = samples()
    outputs.requires_grad_(True)
    loss = BinaryCrossEntropy(fake_negative_weighting=True)
    p = torch.sigmoid(outputs.detach())
    plain = weights * torch.where(
        labels == 1,
        -(1 + p) * nn.functional.logsigmoid(outputs),
        -(1 - p) * (1 + p) * nn.functional.logsigmoid(-outputs),
    )
    torch.testing.assert_close(loss.sum(outputs, labels, weights), plain.sum())
    (found,) = torch.autograd.grad(loss.sum(outputs, labels, weights), outputs)
    (expected,) = torch.autograd.grad(plain.sum(), outputs)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(found, weights * (1 - p) * (1 + p) * (p * (1 - labels) - labels))
    # If a share q of the impressions is positive, there are q positive samples per negative one.
    q = torch.full_like(p, 0.3)
    balanced = torch.logit(q).requires_grad_(True)
    both = loss.sum(balanced, torch.zeros_like(q), None) + loss.sum(balanced, torch.ones_like(q), q)
    torch.testing.assert_close(torch.autograd.grad(both, balanced)[0], torch.zeros_like(q))
    # Evaluation has final labels.
    assert loss.metrics(outputs.detach(), labels) == BinaryCrossEntropy().metrics(outputs.detach(), labels)
    assert torch.equal(loss.per_sample(outputs, labels), BinaryCrossEntropy().per_sample(outputs, labels))


def test_tasks_add_up_and_the_first_one_chooses():
    outputs, labels, weights = samples()
    both, truth = torch.stack([outputs, 2 * outputs], 1), torch.stack([labels, labels + 1], 1)
    loss = Tasks(tasks=(Task("click", BinaryCrossEntropy()), Task("price", SquaredError(), 0.5)))
    expected = BinaryCrossEntropy().sum(outputs, labels, weights)
    expected += 0.5 * SquaredError().sum(2 * outputs, labels + 1, weights)
    torch.testing.assert_close(loss.sum(both, truth, weights), expected)
    found = loss.metrics(both, truth)
    assert found["auc"] == found["click/auc"] == binary_metrics(outputs, labels)["auc"]
    assert found["price/rmse"] == regression_metrics(2 * outputs, labels + 1)["rmse"]
    torch.testing.assert_close(loss.scores(both), torch.stack([torch.sigmoid(outputs), 2 * outputs], 1))
    with pytest.raises(ValueError, match="2 tasks"):
        loss.sum(both[:, :1], truth[:, :1], None)


def test_quality_is_large_where_the_model_is_good():
    assert quality({"auc": 0.7, "loss": 0.5}) == 0.7
    assert quality({"loss": 4.0, "rmse": 2.0}) == -4
    assert quality({"loss": 0.5}) is None  # clicks of one kind


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BinaryCrossEntropy(positive_weight=0.0), "loss.positive_weight.*0.0"),
        (
            lambda: BinaryCrossEntropy(positive_weight=2.0, fake_negative_weighting=True),
            "loss.positive_weight.*2.0",
        ),
        (lambda: Huber(delta=-1.0), "loss.delta.*-1.0"),
        (lambda: Tasks(tasks=(Task("a", Huber()),)), "different"),
    ],
)
def test_losses_that_cannot_be(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "loss",
    [
        BinaryCrossEntropy(positive_weight=2.0),
        SquaredError(),
        Huber(),
        Tasks(tasks=(Task("a", Huber(), 0.5), Task("b", BinaryCrossEntropy()))),
    ],
)
def test_the_losses_of_samples_add_up(loss):
    generator = torch.Generator().manual_seed(0)
    shape = (7, 2) if isinstance(loss, Tasks) else (7,)
    outputs, labels = (torch.rand(shape, generator=generator) for _ in range(2))
    weights = torch.arange(7.0)
    total = loss.sum(outputs, labels, weights)
    assert loss.per_sample(outputs, labels) @ weights == pytest.approx(float(total), rel=1e-5)


@pytest.mark.parametrize("loss", [SquaredError(), Huber()])
def test_outputs_and_labels_are_not_spread_over_each_other(loss):
    with pytest.raises(ValueError, match=r"model.*\[2\].*\[2, 2\]"):
        loss.sum(torch.zeros(2), torch.zeros(2, 2), None)


@pytest.mark.parametrize(
    ("loss", "outputs", "num_labels"),
    [
        (BinaryCrossEntropy(positive_weight=2.0), (), 0),
        (SquaredError(), (), 0),
        (Huber(), (), 0),
        (NextItem(), (2,), 0),
        (Softmax(classes=(0, 1, 2)), (3,), 0),
        (Tasks(tasks=(Task("a", BinaryCrossEntropy()), Task("b", SquaredError()))), (2,), 2),
        (Tasks(tasks=(Task("a", BinaryCrossEntropy()), Task("b", SquaredError()))), (2, 3), 2),
        (Ranking(kind="pairwise"), (), 2),
        (Ranking(kind="listwise"), (), 2),
    ],
    ids=lambda value: type(value).__name__ if hasattr(value, "sum") else None,
)
def test_sample_of_weight_0_is_as_one_that_is_left_out(loss, outputs, num_labels):
    generator = torch.Generator().manual_seed(3)
    scores = torch.randn(40, *outputs, generator=generator, dtype=torch.float64)
    shape = (40, num_labels) if num_labels else (40,)
    labels = torch.randint(0, 2, shape, generator=generator).double()
    if isinstance(loss, Ranking):
        labels[:, 1] = torch.randint(0, 8, (40,), generator=generator)
    weights = torch.rand(40, generator=generator, dtype=torch.float64)
    left_out = torch.rand(40, generator=generator) < 0.3
    weights[left_out] = 0.0
    scores[left_out.nonzero()[0]] = torch.inf
    labels[left_out.nonzero()[1]] = torch.nan
    scores.requires_grad_()
    total = ensemble_loss(loss, scores, labels, weights)
    expected = ensemble_loss(loss, scores[~left_out], labels[~left_out], weights[~left_out])
    torch.testing.assert_close(total, expected)
    gradients = [torch.autograd.grad(value, scores)[0] for value in (total, expected)]
    torch.testing.assert_close(*gradients)
    assert not gradients[0][left_out].any()
