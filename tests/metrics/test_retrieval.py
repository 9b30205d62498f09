import math

import numpy as np
import pytest
import torch

from meshrec.metrics import rank_intervals, rank_metrics

NUM_QUERIES, NUM_ITEMS, KS = 30, 50, (2, 5, 20)


def queries(seed=0):
    """Return the rank of the relevant item of each query among all items, and losses."""
    rng = np.random.default_rng(seed)
    scores, relevant = rng.random((NUM_QUERIES, NUM_ITEMS)), rng.integers(0, NUM_ITEMS, NUM_QUERIES)
    own = scores[np.arange(NUM_QUERIES), relevant]
    places = torch.from_numpy(1.0 + (scores > own[:, None]).sum(1))
    return places, torch.from_numpy(rng.random(NUM_QUERIES))


def test_queries_without_a_rank_count_for_the_loss_only():
    places, losses = queries()
    some = rank_metrics(losses, torch.where(torch.arange(NUM_QUERIES) < 10, places, 0.0))
    expected = rank_metrics(losses[:10], places[:10])
    assert some == {**expected, "loss": pytest.approx(float(losses.mean()))}
    assert rank_metrics(losses, torch.zeros(NUM_QUERIES)).keys() == {"loss"}
    assert rank_metrics(losses[:0], places[:0]) == {}


def test_intervals_hold_the_metric_and_shrink_with_the_number_of_queries():
    places, losses = queries()
    widths = []
    for copies in (1, 16):
        many = rank_intervals(losses.repeat(copies), places.repeat(copies), ks=KS)
        for name, value in rank_metrics(losses, places, ks=KS).items():
            assert many[name].low <= value <= many[name].high
        widths.append(many["mrr"].high - many["mrr"].low)
    assert widths[1] < widths[0] / 2
    with pytest.raises(ValueError, match=r"num.*2"):
        rank_intervals(losses, places, num=1)
    unranked = rank_intervals(losses, places * (torch.arange(NUM_QUERIES) < 10), ks=KS)
    assert unranked.keys() == many.keys()
    assert rank_intervals(losses, places * 0).keys() == {"loss"}


@pytest.mark.parametrize("num", [1, 2, 3])
def test_few_queries_have_finite_intervals(num):
    places, weights = torch.arange(1.0, 6.0), torch.tensor([1.0] * num + [0.0] * (5 - num))
    low, high = rank_intervals(torch.zeros(5), places, weights)["mrr"]
    assert 1 / num <= low <= high <= 1
    assert rank_intervals(torch.zeros(5), places, torch.zeros(5)) == {}


def test_nan_losses_and_ranks_leave_metrics_undefined():
    for losses, places in (([math.nan, 1.0], [1.0, 2.0]), ([1.0, 1.0], [1.0, math.nan])):
        metrics = rank_metrics(torch.tensor(losses), torch.tensor(places))
        assert metrics.keys() == {"loss", "recall@10", "ndcg@10", "mrr@10", "mrr"}
        assert all(math.isnan(value) for value in metrics.values())
        assert rank_intervals(torch.tensor(losses), torch.tensor(places)) == {}
    with pytest.raises(ValueError, match=r"ranks\[0\].*-1"):
        rank_metrics(torch.ones(1), torch.tensor([-1.0]))
    assert rank_metrics(torch.ones(1), torch.tensor([math.inf]))["recall@10"] == 0.0


@pytest.mark.parametrize(
    ("place", "ties"), [(1.0, 1.0), (2.0, 3.0), (3.0, -1.0), (3.0, math.nan), (math.inf, 2.0)]
)
def test_ties_that_no_ranking_has_are_refused(place, ties):
    losses, places = torch.ones(2), torch.tensor([2.0, place])
    with pytest.raises(ValueError, match=rf"ties\[1\] is {ties}"):
        rank_metrics(losses, places, None, torch.tensor([2.0, ties]))
    weights = torch.tensor([1.0, 0.0])
    mrr = rank_metrics(losses, places, weights, torch.tensor([2.0, ties]))["mrr"]
    assert mrr == pytest.approx((1 + 1 / 2 + 1 / 3) / 3, abs=1e-15)


def test_cutoffs_below_1_are_refused():
    with pytest.raises(ValueError, match="got 0"):
        rank_metrics(torch.ones(1), torch.ones(1), ks=(1, 0))
