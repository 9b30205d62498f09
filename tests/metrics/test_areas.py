import math

import pytest
import torch

from meshrec.metrics import area_under_curve
from meshrec.metrics.areas import auc_by_group, auc_from_ties, sort_into_ties


def test_auc_keeps_the_order_of_large_logits_and_takes_soft_labels():
    logits, labels = torch.tensor([17.0, 20.0, 30.0, -1.0]), torch.tensor([0.0, 1.0, 1.0, 0.0])
    assert area_under_curve(logits, labels) == 1.0
    assert area_under_curve(logits, 0.25 + labels / 2) == pytest.approx(0.75)


def test_ties_count_half():
    assert auc_from_ties(*torch.tensor([[0.0, 2.0], [1.0, 1.0]]).double().numpy()).tolist() == [0.75]
    assert area_under_curve(torch.tensor([0.0, -0.0]), torch.tensor([0, 1])) == 0.5
    assert area_under_curve(torch.full((2,), torch.inf), torch.tensor([False, True])) == 0.5


def test_auc_of_one_class_or_nan_scores_is_undefined():
    labels = torch.tensor([0.0, 1.0, 1.0])
    assert area_under_curve(labels, torch.ones(3)) is None
    assert area_under_curve(labels[:0], labels[:0]) is None
    assert area_under_curve(labels, labels, torch.tensor([0.0, 1.0, 1.0])) is None
    for scores in (labels + math.nan, torch.tensor([0.0, math.nan, 1.0])):
        assert math.isnan(area_under_curve(scores, labels))


def test_small_groups_beside_large_ones_keep_their_precision():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(2000, generator=generator), torch.rand(2000, generator=generator) < 0.5
    weights, group = 1e9 * torch.rand(2000, generator=generator), torch.zeros(2000, dtype=torch.int64)
    weights[-3:], group[-3:] = 1 / 3, 1
    scores[-3:], labels[-3:] = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([True, False, True])
    columns = [column.double().numpy() for column in (scores, labels, weights)]
    assert auc_by_group(*columns, group.numpy())[1] == pytest.approx(0.5, abs=1e-15)


def test_samples_are_sorted_by_group_and_score():
    order, tie, firsts = sort_into_ties(
        torch.tensor([2.0, 1.0, 2.0, 1.0]).numpy(), torch.tensor([0, 1, 0, 0]).numpy()
    )
    assert (order.tolist(), tie.tolist(), firsts.tolist()) == ([3, 0, 2, 1], [0, 1, 1, 2], [0, 1, 3])
