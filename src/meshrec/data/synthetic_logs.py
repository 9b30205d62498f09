"""Synthetic logs of users, items and times, with a known best hit rate."""

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from meshrec.data.faults import needs
from meshrec.data.order import check_seed

if TYPE_CHECKING:
    import pyarrow as pa

# U users, I items, G groups


class SyntheticLog(NamedTuple):
    """A log, and what is known of it."""

    table: "pa.Table"
    """The columns user, item and time, in the order of time."""
    best_hit_rate: float
    """The expected hit rate of the best ranking of each user's last item, over the items that the user did
    not have before.
    """


def synthetic_log(
    *,
    num_users: int = 2000,
    num_items: int = 300,
    num_groups: int = 10,
    length: int = 15,
    k: int = 10,
    seed: int = 0,
) -> SyntheticLog:
    """Draw a log in which an item's group says which group comes next.

    No user has an item twice: the next item is drawn among those that are left, by a Markov chain over
    groups, and within a group by Zipf's law. So the probability of every next item is known.

    Args:
        num_users, num_items: number of users U and items I.
        num_groups: number of groups G.
        length: number of items of each user, at most a third of all.
        k: cut-off of the hit rate.
        seed: seed of everything.

    Raises:
        ValueError: a size does not fit the others.
    """
    check_seed(seed)
    if min(num_users, num_groups, length - 2, k) < 1 or 3 * max(length, num_groups, k) > num_items:
        raise ValueError(
            f"length {length} must be at least 3, and length, num_groups {num_groups} and k {k} at most a "
            f"third of num_items {num_items}; num_users is {num_users}."
        )
    pa = needs("pyarrow", "data")
    rng = np.random.default_rng(seed)
    group_I = rng.permutation(num_items) % num_groups
    share_I = 1.0 / (1 + rng.permutation(num_items) // num_groups)
    for group in range(num_groups):
        share_I[group_I == group] /= share_I[group_I == group].sum()
    of_groups = rng.dirichlet(np.full(num_groups, 0.3), num_groups)
    chances_GI = of_groups[:, group_I] * share_I
    left_UI = np.ones((num_users, num_items))
    every = np.arange(num_users)
    items = [rng.integers(0, num_items, num_users)]
    for _ in range(length - 1):
        left_UI[every, items[-1]] = 0.0
        chances_UI = chances_GI[group_I[items[-1]]] * left_UI
        chances_UI /= chances_UI.sum(1, keepdims=True)
        below = chances_UI.cumsum(1) < rng.random((num_users, 1))
        items.append(np.minimum(below.sum(1), num_items - 1))
    best = float(np.sort(chances_UI, axis=1)[:, -k:].sum(1).mean())
    steps = 1_600_000_000 + rng.integers(0, 86_400, num_users) + 3_600 * np.arange(length)[:, None]
    order = np.argsort(steps.reshape(-1), kind="stable")
    table = pa.table(
        {
            "user": np.tile(every, length)[order],
            "item": np.concatenate(items)[order],
            "time": steps.reshape(-1)[order],
        }
    )
    return SyntheticLog(table, best)
