"""Synthetic impressions in order of time: users click by their tastes and by what they clicked lately.

The best possible AUC is known, because the probability of every click is.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.order import Stream, check_seed, generator
from meshrec.data.samples import Ints

# U users, T impressions of a user at most, N impressions, I items, C categories

_OF_USERS = {"age": 8, "country": 50, "device": 5, "language": 20, "tenure": 10}
_CATEGORIES, _AUTHORS, _SURFACES, _ACTIONS = 20, 100, 4, 2
_DECAY = 0.7  # of the interest in a category, from one impression to the next


class _Impressions(NamedTuple):
    """The impressions of all users, sorted by user and time."""

    user_N: Ints
    item_N: Ints
    surface_N: Ints
    time_N: Ints
    click_N: Ints
    chance_N: npt.NDArray[np.float64]


def synthetic_impressions(
    *, num_users: int = 1500, num_items: int = 1000, longest: int = 80, history: int = 50, seed: int = 0
) -> Dataset:
    """Make impressions that have eleven tables, as those of MLPerf's DLRM-v4.

    A sample is one impression: the user's earlier impressions with what came of them, the user's attributes,
    and an item that may be clicked. Training data comes before validation data, and that before test data;
    none is shuffled.

    Args:
        num_users: number of users.
        num_items: number of items.
        longest: largest number of impressions of a user. Fewer users have more impressions.
        history: largest number of impressions in a history.
        seed: seed of everything.

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
    found = _simulated(random, num_users, longest, category_I, author_I)
    of_users = {name: random.integers(size, size=num_users) for name, size in _OF_USERS.items()}
    firsts_N = np.searchsorted(found.user_N, found.user_N)
    at = np.arange(len(found.user_N))
    starts = np.maximum(firsts_N, at - history)
    of_items = {"item": found.item_N, "category": category_I[found.item_N], "author": author_I[found.item_N]}
    of_items["surface"] = found.surface_N
    one = np.ones_like(at)
    ids = {
        "user": Ranges(found.user_N, at, one),
        **{name: Ranges(values, found.user_N, one) for name, values in of_users.items()},
        **{f"history_{name}": Ranges(values, starts, at - starts) for name, values in of_items.items()},
        "history_action": Ranges(found.click_N, starts, at - starts),
        **{name: Ranges(values, at, one) for name, values in of_items.items()},
        "times": Ranges(found.time_N, starts, at - starts + 1),
    }
    by_time = np.argsort(found.time_N, kind="stable")
    train, validation, test = np.split(by_time, [8 * len(at) // 10, 9 * len(at) // 10])

    def reader(rows: Ints) -> InMemoryReader:
        taken = {name: each.take(rows) for name, each in ids.items()}
        nothing, labels = np.zeros((len(rows), 0), np.float32), found.click_N[rows].astype(np.float32)
        return InMemoryReader(nothing, labels, taken, rows=rows, seed=seed, shuffle=False)

    sizes = {"item": num_items, "category": _CATEGORIES, "author": _AUTHORS, "surface": _SURFACES}
    return Dataset(
        name="synthetic-impressions",
        features=(
            *(
                Feature(name=name, num_embeddings=size)
                for name, size in {"user": num_users, **_OF_USERS}.items()
            ),
            *(_history(name, size, table=name, most=history) for name, size in sizes.items()),
            _history("action", _ACTIONS, table=None, most=history),
            *(Feature(name=name, num_embeddings=size) for name, size in sizes.items()),
            Feature(name="times", num_embeddings=0, max_length=history + 1),
        ),
        num_dense=0,
        train=reader(train),
        validation=reader(validation),
        test=reader(test),
        item="item",
        times="times",
        best_auc=_auc(found.chance_N[validation], found.click_N[validation]),
    )


def _history(name: str, size: int, *, table: str | None, most: int) -> Feature:
    return Feature(
        name=f"history_{name}",
        num_embeddings=size,
        average_length=most / 2,
        sequence=True,
        table=table,
        max_length=most,
    )


def _simulated(
    random: np.random.Generator, num_users: int, longest: int, category_I: Ints, author_I: Ints
) -> _Impressions:
    """Draw impression after impression, of all users at a time."""
    users = np.arange(num_users)
    taste_UC, interest_UC = random.normal(size=(num_users, _CATEGORIES)), np.zeros((num_users, _CATEGORIES))
    author_effect, surface_effect = random.normal(size=_AUTHORS), random.normal(size=_SURFACES)
    # Few users have many impressions, and few items are seen often.
    num_U = np.maximum(2, longest * random.random(num_users) ** 2).astype(np.int64)
    popularity_I = 1 / np.arange(1, len(category_I) + 1) ** 0.8
    time_U = random.integers(0, 30 * 86_400, size=num_users)
    steps = []
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
    *columns, kept = (np.stack(each, axis=1) for each in zip(*steps, strict=True))
    return _Impressions(*(each[kept] for each in columns))


def _auc(scores: npt.NDArray[np.float64], labels: Ints) -> float:
    """Return the area under the ROC curve; scores have no ties."""
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positives = int(labels.sum())
    pairs = max(1, positives * (len(labels) - positives))
    return float((ranks[labels == 1].sum() - positives * (positives + 1) / 2) / pairs)
