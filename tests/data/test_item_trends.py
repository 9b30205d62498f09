import numpy as np
import pytest

from meshrec.data import next_items
from meshrec.data.item_trends import item_trends
from meshrec.data.popularity import PopularityCounts
from tests.data.test_new_users import log_of


def counts_of(every, recent, early=None, early_recent=None):
    """Counts of which only those that trends depend on matter."""
    zeros = np.zeros_like(every)
    early, early_recent = (zeros if part is None else np.array(part) for part in (early, early_recent))
    subsets = [[zeros] * 3, [zeros] * 3, [early, zeros, early_recent], [every, zeros, recent]]
    return PopularityCounts(np.array(subsets), np.zeros((3, len(every)), np.int64))


def test_trend_is_the_log_of_recent_over_expected_interactions():
    every, recent = np.array([100, 30, 10, 0]), np.array([4, 0, 10, 0])
    trends = item_trends(counts_of(every, recent), np.array([0, 0, 5, 0]))
    share = 14 / 140
    expected = [
        np.log(5 / (100 * share + 1)),
        np.log(1 / (30 * share + 1)),
        np.log(11 / (10 * share + 1)),
        0.0,
    ]
    assert trends.trends_I.tolist() == pytest.approx(expected)
    assert trends.trends_I.dtype == np.float32


@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_validation_items_select_the_weight_by_which_they_were_drawn(weight):
    rng = np.random.default_rng(0)
    every = rng.integers(20, 200, 50)
    recent = rng.binomial(every, rng.uniform(0.02, 0.2, 50))
    trends = item_trends(counts_of(every, recent), np.zeros_like(every)).trends_I
    shares = (every + 1) * np.exp(weight * trends)
    targets = rng.multinomial(1_000_000, shares / shares.sum())
    assert item_trends(counts_of(every, recent), targets).weight == weight


def test_without_validation_items_early_interactions_predict_the_late_ones():
    early, early_recent = [50, 50, 50, 50], [5, 5, 0, 10]
    # The late interactions go on as the recent ones among the early interactions.
    follows = counts_of(np.array([100, 100, 52, 148]), np.array([5, 5, 5, 5]), early, early_recent)
    assert item_trends(follows, np.zeros(4, np.int64)).weight == 1
    # Or as all early interactions.
    same = counts_of(np.array([100, 100, 100, 100]), np.array([5, 5, 5, 5]), early, early_recent)
    assert item_trends(same, np.zeros(4, np.int64)).weight == 0


def fashions(num_users):
    """Baskets of users who arrive one after the other, and whose items are in fashion for a while."""
    return [[user // 40 + item for item in (0, 1, 2, 0, 1, 2)] for user in range(num_users)]


def test_fashions_have_a_weight_if_items_are_held_out_by_time_and_none_if_they_are_stationary():
    baskets, arrivals = fashions(400), [10 * user for user in range(400)]
    log = log_of(baskets, 12, arrivals)
    dataset = next_items(log, history=3, held_out="time")
    assert dataset.trend_weight > 0
    trends = dataset.item_trends.numpy()
    assert trends[:5].max() < 0 < trends[9]
    shuffled = np.random.default_rng(0).permutation(arrivals).tolist()
    assert next_items(log_of(baskets, 12, shuffled), history=3, held_out="time").trend_weight == 0


def test_an_item_without_training_data_has_the_trend_zero():
    log = log_of([*fashions(100), [12, 11, 12]], 13, [*range(100), 10**6])
    dataset = next_items(log, history=3, held_out="time")
    assert dataset.item_trends[12] == 0


@pytest.mark.parametrize("windows", [True, False])
def test_equal_times_and_no_held_out_items_give_finite_trends(windows):
    log = log_of([[0, 1], [1, 0]], 2)
    log.times[:] = 7
    dataset = next_items(log, history=2, held_out="nothing", windows=windows)
    assert dataset.trend_weight == 0
    assert np.isfinite(dataset.item_trends.numpy()).all()
