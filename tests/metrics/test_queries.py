import itertools
import math

import numpy as np
import pytest
import torch

from meshrec.metrics import query_metrics


def test_positions_and_mrr():
    queries = torch.tensor([7, 3, 7, 7, 3])
    scores = torch.tensor([0.1, 0.5, 0.9, 0.1, 0.6])
    labels = torch.tensor([1.0, 1.0, 0.0, 0.0, 0.0])
    assert query_metrics(scores, labels, queries)["mrr"] == pytest.approx((5 / 12 + 1 / 2) / 2, abs=1e-15)


def test_ties_count_as_the_mean_of_all_their_orders():
    labels = np.array([2.0, 0.0, 1.0, 0.0, 3.0, 1.0])
    for scores in ([0.0] * 6, [2.0, 1.0, 1.0, 1.0, 0.0, 0.0], [1.0, 2.0, 1.0, 2.0, 0.0, 0.0]):
        ndcg, mrr = [], []
        ideal = ((2 ** np.sort(labels)[::-1] - 1) / np.log2(np.arange(2, 8)))[:3].sum()
        for order in itertools.permutations(range(6)):
            if any(scores[a] < scores[b] for a, b in itertools.pairwise(order)):
                continue
            ranked = labels[list(order)]
            ndcg.append(((2**ranked - 1) / np.log2(np.arange(2, 8)))[:3].sum() / ideal)
            mrr.append(1 / (np.flatnonzero(ranked)[0] + 1))
        metrics = query_metrics(torch.tensor(scores), torch.tensor(labels), torch.zeros(6), ks=(3,))
        assert metrics == pytest.approx({"ndcg@3": np.mean(ndcg), "mrr": np.mean(mrr)}, abs=1e-14)


def test_constant_scores_say_nothing_whatever_the_order_of_the_rows():
    labels, zeros = torch.tensor([3.0, 2.0, 1.0, 0.0, 0.0, 0.0]), torch.zeros(6)
    first = query_metrics(zeros, labels, zeros)
    assert first == query_metrics(zeros, labels.flip(0), zeros)
    assert first["ndcg@10"] == pytest.approx(0.645021912676)


def test_gains_of_large_labels_do_not_overflow():
    labels = torch.tensor([2000.0, 1500.0, 0.0])
    assert query_metrics(labels, labels, torch.zeros(3))["ndcg@10"] == 1.0
    worst = query_metrics(-labels, labels, torch.zeros(3))["ndcg@10"]
    assert worst == pytest.approx(0.5, abs=1e-12)
    assert query_metrics(labels, labels.double() / 1e300, torch.zeros(3))["ndcg@10"] == 1.0


def test_queries_without_a_good_sample_are_left_out():
    zeros = torch.zeros(4)
    assert query_metrics(zeros, zeros, torch.tensor([0, 0, 1, 1])) == {}
    assert query_metrics(zeros[:0], zeros[:0], zeros[:0]) == {}
    assert query_metrics(zeros, zeros + 1, zeros, zeros) == {}


def test_nan_scores_leave_metrics_undefined_and_infinite_ones_do_not():
    labels, queries = torch.tensor([0.0, 1.0, 1.0]), torch.zeros(3)
    assert query_metrics(torch.tensor([1.0, torch.inf, -torch.inf]), labels, queries)["mrr"] == 1.0
    metrics = query_metrics(torch.tensor([1.0, math.nan, 0.0]), labels, queries)
    assert metrics.keys() == {"ndcg@10", "mrr"}
    assert all(math.isnan(value) for value in metrics.values())


def test_the_weight_of_a_query_is_the_mean_weight_of_its_samples():
    labels, scores = torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0]), torch.tensor([2.0, 1.0, 2.0, 1.0, 9.0])
    queries, weights = torch.tensor([0, 0, 1, 1, 1]), torch.tensor([1.0, 5.0, 1.0, 1.0, 0.0])
    assert query_metrics(scores, labels, queries, weights)["mrr"] == pytest.approx((3 * 1 + 1 * 0.5) / 4)


def test_large_query_ids_are_told_apart():
    queries = torch.tensor([2**60, 2**60 + 1])
    labels, scores = torch.tensor([1.0, 1.0]), torch.tensor([0.0, 1.0])
    assert query_metrics(scores, labels, queries)["mrr"] == 1.0


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_labels_below_0_or_not_finite_are_refused(value):
    with pytest.raises(ValueError, match=rf"\[1\].*{value}"):
        query_metrics(torch.zeros(2), torch.tensor([1.0, value]), torch.zeros(2))
    if math.isnan(value):
        with pytest.raises(ValueError, match=r"queries\[1\]"):
            query_metrics(torch.zeros(2), torch.zeros(2), torch.tensor([1.0, value]))


def test_cutoffs_below_1_are_refused():
    with pytest.raises(ValueError, match="got 0"):
        query_metrics(torch.ones(2), torch.ones(2), torch.zeros(2), ks=(1, 0))
