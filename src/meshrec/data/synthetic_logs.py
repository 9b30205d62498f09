"""Synthetic interaction logs with a known best hit rate."""

from typing import NamedTuple

import numpy as np

from meshrec.data.arrow import pa
from meshrec.data.order import check_seed

# U users, I items, G groups


class SyntheticLog(NamedTuple):
    """Log table, and the best possible hit rate."""

    table: "pa.Table"
    """Columns user, item and time, in time order."""
    best_hit_rate: float
    """Expected hit rate of the optimal ranking of every user's last item, over items new to the user."""


def synthetic_log(
    *,
    num_users: int = 2000,
    num_items: int = 300,
    num_groups: int = 10,
    length: int = 15,
    k: int = 10,
    seed: int = 0,
) -> SyntheticLog:
    """Draw a log in which an item's group predicts the next group.

    No user has an item twice: the next item is drawn from the remaining ones, by a Markov chain over groups
    and Zipf's law within a group. The probability of every next item is therefore known.

    Args:
        num_users: user count U.
        num_items: item count I.
        num_groups: group count G.
        length: items per user, at most a third of all items.
        k: cutoff of the hit rate.
        seed: random seed.

    Raises:
        ValueError: sizes do not fit together.

    Example::

        log = synthetic_log(num_users=50, num_items=60, num_groups=4)
        assert log.table.num_rows == 50 * 15
        assert 0 < log.best_hit_rate < 1
    """
    check_seed(seed)
    if min(num_users, num_groups, length - 2, k) < 1 or 3 * max(length, num_groups, k) > num_items:
        raise ValueError(
            f"length {length} must be at least 3, and length, num_groups {num_groups} and k {k} at most a "
            f"third of num_items {num_items}; num_users is {num_users}."
        )
    rng = np.random.default_rng(seed)
    group_I = rng.permutation(num_items) % num_groups
    share_I = 1.0 / (1 + rng.permutation(num_items) // num_groups)
    for group in range(num_groups):
        share_I[group_I == group] /= share_I[group_I == group].sum()
    transitions_GG = rng.dirichlet(np.full(num_groups, 0.3), num_groups)
    chances_GI = transitions_GG[:, group_I] * share_I
    left_UI = np.ones((num_users, num_items))
    users = np.arange(num_users)
    items = [rng.integers(0, num_items, num_users)]
    for _ in range(length - 1):
        left_UI[users, items[-1]] = 0.0
        chances_UI = chances_GI[group_I[items[-1]]] * left_UI
        chances_UI /= chances_UI.sum(1, keepdims=True)
        below = chances_UI.cumsum(1) < rng.random((num_users, 1))
        items.append(np.minimum(below.sum(1), num_items - 1))
    best = float(np.sort(chances_UI, axis=1)[:, -k:].sum(1).mean())
    steps = 1_600_000_000 + rng.integers(0, 86_400, num_users) + 3_600 * np.arange(length)[:, None]
    order = np.argsort(steps.reshape(-1), kind="stable")
    table = pa.table(
        {
            "user": np.tile(users, length)[order],
            "item": np.concatenate(items)[order],
            "time": steps.reshape(-1)[order],
        }
    )
    return SyntheticLog(table, best)
