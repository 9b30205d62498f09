"""Synthetic interaction logs with a known best hit rate."""

from typing import NamedTuple

import numpy as np

from meshrec.data.arrow import pa
from meshrec.data.order import check_seed

# U users, I items, G groups


class SyntheticLog(NamedTuple):
    """Synthetic interaction log, and the hit rate that the best possible model has."""

    table: "pa.Table"
    """Columns user, item and time, in time order."""
    best_hit_rate: float
    """Expected hit rate of the optimal ranking when a user's last item is predicted. Only items that are new
    to the user are ranked."""


def synthetic_log(
    *,
    num_users: int = 2000,
    num_items: int = 300,
    num_groups: int = 10,
    length: int = 15,
    k: int = 10,
    seed: int = 0,
) -> SyntheticLog:
    """Draw an interaction log in which the group of an item predicts the group of the next item.

    Items are divided into groups. A user's next item is drawn from the items the user has not had yet: the
    group by a Markov chain, and the item by Zipf's law within the group. So the probability of every next
    item is known.

    Args:
        num_users: user count.
        num_items: item count.
        num_groups: number of item groups.
        length: items per user, at most a third of all items.
        k: number of ranked items in which the next item counts as a hit.
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
    # Groups have equal sizes, up to one item, and items of a group are spread over the IDs.
    group_I = rng.permutation(num_items) % num_groups
    share_I = 1.0 / (1 + rng.permutation(num_items) // num_groups)
    # Shares add up to 1 within a group.
    for group in range(num_groups):
        share_I[group_I == group] /= share_I[group_I == group].sum()
    transitions_GG = rng.dirichlet(np.full(num_groups, 0.3), num_groups)
    chances_GI = transitions_GG[:, group_I] * share_I
    left_UI = np.ones((num_users, num_items))
    users = np.arange(num_users)
    items = [rng.integers(0, num_items, num_users)]
    for _ in range(length - 1):
        # The previous item is not drawn again.
        left_UI[users, items[-1]] = 0.0
        chances_UI = chances_GI[group_I[items[-1]]] * left_UI
        chances_UI /= chances_UI.sum(1, keepdims=True)
        below = chances_UI.cumsum(1) < rng.random((num_users, 1))
        items.append(np.minimum(below.sum(1), num_items - 1))
    # ``chances_UI`` is for the last item: the best ranking has the k most likely items first.
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
