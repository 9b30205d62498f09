import numpy as np
import pytest

from meshrec.data import Feature, Interactions
from meshrec.data.new_users import new_user_scores
from meshrec.data.popularity import popularity_counts


def log_of(baskets, num_items, arrivals=None):
    """Return a log of users who take the items of their baskets, one per second from their arrival on."""
    arrivals = arrivals or [0] * len(baskets)
    offsets = np.cumsum([0, *(len(basket) for basket in baskets)])
    return Interactions(
        name="baskets",
        offsets=offsets,
        items=np.concatenate(baskets),
        times=np.concatenate([at + np.arange(len(b)) for at, b in zip(arrivals, baskets, strict=True)]),
        rows=np.arange(offsets[-1]),
        num_rows=int(offsets[-1]),
        item=Feature(name="item", num_embeddings=num_items),
        catalogue=np.arange(num_items),
    )


def scores_of(baskets, num_items, arrivals=None):
    log = log_of(baskets, num_items, arrivals)
    return new_user_scores(popularity_counts(log, log.stops))


def test_first_items_come_before_items_that_users_take_later_and_often():
    baskets = [[0, 1, 2, *range(3, 10), *[20, 21, 22] * 10] for _ in range(20)]
    scores = scores_of(baskets, 25)
    assert set(np.argsort(-scores)[:10]) == set(range(10))


def test_recent_items_come_first_if_late_users_take_them():
    early, late = [[item % 5 for item in range(10)]] * 40, [[10 + item % 5 for item in range(10)]] * 40
    arrivals = [user * 10 for user in range(80)]
    scores = scores_of(early + late, 20, arrivals)
    assert set(np.argsort(-scores)[:5]) == set(range(10, 15))


def test_scores_are_logs_of_shares_with_a_small_one_for_items_never_taken():
    scores = scores_of([[0, 1, 1]] * 4, 3)
    assert np.exp(scores).tolist() == pytest.approx([4 / 12, 8 / 12, 1e-3 / 12], rel=1e-3)


@pytest.mark.parametrize("baskets", [[[0]], [[0, 0]], [[1], [0]]])
def test_the_smallest_logs_have_finite_scores(baskets):
    assert np.isfinite(scores_of(baskets, 2)).all()
