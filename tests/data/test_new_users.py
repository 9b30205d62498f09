import numpy as np
import pytest

from meshrec.data.new_users import new_user_scores


def log(baskets, arrivals=None):
    """Users who take the items of their baskets, one per second from their arrival on."""
    arrivals = arrivals or [0] * len(baskets)
    users = np.repeat(np.arange(len(baskets)), [len(basket) for basket in baskets])
    times = np.concatenate([at + np.arange(len(b)) for at, b in zip(arrivals, baskets, strict=True)])
    return users, np.concatenate(baskets), times


def test_first_items_come_before_items_that_users_take_later_and_often():
    baskets = [[0, 1, 2, *range(3, 10), *[20, 21, 22] * 10] for _ in range(20)]
    scores = new_user_scores(*log(baskets), 25)
    assert set(np.argsort(-scores)[:10]) == set(range(10))


def test_recent_items_come_first_if_late_users_take_them():
    early, late = [[item % 5 for item in range(10)]] * 40, [[10 + item % 5 for item in range(10)]] * 40
    arrivals = [user * 10 for user in range(80)]
    scores = new_user_scores(*log(early + late, arrivals), 20)
    assert set(np.argsort(-scores)[:5]) == set(range(10, 15))


def test_scores_are_logs_of_shares_with_a_small_one_for_items_never_taken():
    scores = new_user_scores(*log([[0, 1, 1]] * 4), 3)
    assert np.exp(scores).tolist() == pytest.approx([4 / 12, 8 / 12, 1e-3 / 12], rel=1e-3)


@pytest.mark.parametrize("baskets", [[[0]], [[0, 0]], [[1], [0]]])
def test_the_smallest_logs_have_finite_scores(baskets):
    assert np.isfinite(new_user_scores(*log(baskets), 2)).all()
