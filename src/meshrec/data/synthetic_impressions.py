"""Synthetic impressions (items shown to users): clicks depend on the user's taste and recent clicks.

The best possible AUC is known, because all click probabilities are known.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.order import Stream, check_seed, generator
from meshrec.data.samples import Ints
from meshrec.metrics.areas import area_under_curve

# U users, T impressions of a user at most, N impressions, I items, C categories

# Number of values per user feature, and of the item and context features.
_USER_FEATURES = {"age": 8, "country": 50, "device": 5, "language": 20, "tenure": 10}
_CATEGORIES, _AUTHORS, _SURFACES, _ACTIONS = 20, 100, 4, 2
_DECAY = 0.7  # factor of a user's interest in a category, per impression


class _Impressions(NamedTuple):
    """All users' impressions, sorted by user, then by time."""

    user_N: Ints
    item_N: Ints
    surface_N: Ints
    """Surface, such as a page, on which the item was shown."""
    time_N: Ints
    """Time, in seconds."""
    click_N: Ints
    """1 if the user clicked, otherwise 0."""
    chance_N: npt.NDArray[np.float64]
    """Known click probability."""


def synthetic_impressions(
    *, num_users: int = 1500, num_items: int = 1000, longest: int = 80, history: int = 50, seed: int = 0
) -> Dataset:
    """Create a dataset with synthetic impressions and eleven embedding tables, as in MLPerf's DLRM-v4.

    A sample is an impression. Its features are user attributes, the item shown, and a history: the user's
    earlier impressions, and whether they were clicked. The label is 1 for a click. Training, validation and
    test data follow each other in time, and are not shuffled.

    Args:
        num_users: user count.
        num_items: item count.
        longest: maximum impressions per user. Few users have many impressions.
        history: maximum history length, in impressions.
        seed: random seed.

    Raises:
        ValueError: a size is too small, or the seed is negative.
    """
    check_seed(seed)
    if min(num_users, num_items, history) < 1 or longest < 2:
        raise ValueError(
            f"num_users {num_users}, num_items {num_items} and history {history} must be at least 1, and "
            f"longest {longest} at least 2. Raise them."
        )
    random = generator(seed, Stream.TEACHER)
    category_I, author_I = (
        random.integers(_CATEGORIES, size=num_items),
        random.integers(_AUTHORS, size=num_items),
    )
    log = _simulated(random, num_users, longest, category_I, author_I)
    by_user = {name: random.integers(size, size=num_users) for name, size in _USER_FEATURES.items()}
    firsts_N = np.searchsorted(log.user_N, log.user_N)
    index = np.arange(len(log.user_N))
    starts = np.maximum(firsts_N, index - history)
    category_N, author_N = category_I[log.item_N], author_I[log.item_N]
    by_item = {"item": log.item_N, "category": category_N, "author": author_N, "surface": log.surface_N}
    ones = np.ones_like(index)
    ids = {
        "user": Ranges(log.user_N, index, ones),
        **{name: Ranges(values, log.user_N, ones) for name, values in by_user.items()},
        **{f"history_{name}": Ranges(values, starts, index - starts) for name, values in by_item.items()},
        "history_action": Ranges(log.click_N, starts, index - starts),
        **{name: Ranges(values, index, ones) for name, values in by_item.items()},
        # One more time than items: that of the impression itself.
        "times": Ranges(log.time_N, starts, index - starts + 1),
    }
    # Split in time order, so that held-out impressions are later than all training impressions.
    by_time = np.argsort(log.time_N, kind="stable")
    train, validation, test = np.split(by_time, [8 * len(index) // 10, 9 * len(index) // 10])

    def reader(rows: Ints) -> InMemoryReader:
        row_ids = {name: ranges.take(rows) for name, ranges in ids.items()}
        no_dense, labels = np.zeros((len(rows), 0), np.float32), log.click_N[rows].astype(np.float32)
        return InMemoryReader(no_dense, labels, row_ids, rows=rows, seed=seed, shuffle=False)

    validation_scores = (log.chance_N[validation], log.click_N[validation])
    sizes = {"item": num_items, "category": _CATEGORIES, "author": _AUTHORS, "surface": _SURFACES}
    return Dataset(
        name="synthetic-impressions",
        features=(
            *(
                Feature(name=name, num_embeddings=size)
                for name, size in {"user": num_users, **_USER_FEATURES}.items()
            ),
            *(_history(name, size, table=name, max_length=history) for name, size in sizes.items()),
            _history("action", _ACTIONS, table=None, max_length=history),
            *(Feature(name=name, num_embeddings=size) for name, size in sizes.items()),
            Feature(name="times", num_embeddings=0, max_length=history + 1),
        ),
        num_dense=0,
        train=reader(train),
        validation=reader(validation),
        test=reader(test),
        item="item",
        times="times",
        best_auc=area_under_curve(*map(torch.from_numpy, validation_scores)),
    )


def _history(name: str, size: int, *, table: str | None, max_length: int) -> Feature:
    """Describe a history feature."""
    return Feature(
        name=f"history_{name}",
        num_embeddings=size,
        average_length=max_length / 2,
        sequence=True,
        table=table,
        max_length=max_length,
    )


def _simulated(
    random: np.random.Generator, num_users: int, longest: int, category_I: Ints, author_I: Ints
) -> _Impressions:
    """Simulate all users' impressions."""
    users = np.arange(num_users)
    taste_UC, interest_UC = random.normal(size=(num_users, _CATEGORIES)), np.zeros((num_users, _CATEGORIES))
    author_effect, surface_effect = random.normal(size=_AUTHORS), random.normal(size=_SURFACES)
    # Few users have many impressions, and few items are seen often.
    num_U = np.maximum(2, longest * random.random(num_users) ** 2).astype(np.int64)
    popularity_I = 1 / np.arange(1, len(category_I) + 1) ** 0.8
    time_U = random.integers(0, 30 * 86_400, size=num_users)
    steps = []
    # A step simulates the next impression of every user.
    for step in range(longest):
        item_U = random.choice(len(category_I), num_users, p=popularity_I / popularity_I.sum())
        surface_U, category_U = random.integers(_SURFACES, size=num_users), category_I[item_U]
        logit_U = 0.8 * taste_UC[users, category_U] + 1.5 * interest_UC[users, category_U] - 0.5
        logit_U += 0.5 * author_effect[author_I[item_U]] + 0.3 * surface_effect[surface_U]
        chance_U = 1 / (1 + np.exp(-logit_U))
        click_U = (random.random(num_users) < chance_U).astype(np.int64)
        interest_UC *= _DECAY
        interest_UC[users, category_U] += 2 * click_U - 1
        time_U = time_U + 1 + random.exponential(20_000, size=num_users).astype(np.int64)
        steps.append((users, item_U, surface_U, time_U, click_U, chance_U, step < num_U))
    *columns, is_used = (np.stack(column, axis=1) for column in zip(*steps, strict=True))
    return _Impressions(*(column[is_used] for column in columns))
