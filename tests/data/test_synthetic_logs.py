import numpy as np
import pytest

from meshrec.data import synthetic_log


def test_no_user_has_an_item_twice_and_the_seed_decides():
    log, same, other = (synthetic_log(num_users=50, num_items=60, seed=seed) for seed in (3, 3, 4))
    assert log.table.equals(same.table)
    assert not log.table.equals(other.table)
    pairs = np.stack([log.table[name].to_numpy() for name in ("user", "item")])
    assert len(np.unique(pairs, axis=1).T) == 50 * 15
    assert (np.diff(log.table["time"].to_numpy()) >= 0).all()


def test_the_best_hit_rate_is_that_of_the_true_chances():
    """With one item per group and a best group, hits come as often as promised."""
    log = synthetic_log(num_users=4000, num_items=30, num_groups=10, length=3, k=1, seed=1)
    users, items = (log.table[name].to_numpy() for name in ("user", "item"))
    order = np.argsort(users, kind="stable")
    sequences = items[order].reshape(4000, 3)
    # The best answer to a history is the most frequent next item of equal histories.
    found: dict = {}
    for *history, target in sequences.tolist():
        found.setdefault(tuple(history), []).append(target)
    large = [each for each in found.values() if len(each) >= 30]
    hits = sum(max(map(each.count, each)) for each in large)
    assert hits / sum(map(len, large)) == pytest.approx(log.best_hit_rate, abs=0.1)


def test_wrong_sizes():
    with pytest.raises(ValueError, match=r"num_items.*20"):
        synthetic_log(num_items=20)
