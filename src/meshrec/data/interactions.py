"""A log of interactions as sequences: which item comes next?

[Note: who is tested on what]

Each user has at most one item in the validation data and one in the test data. ``leave_last_out``: they are
the last two items of a user with three or more, as in Kang, McAuley: "Self-attentive sequential
recommendation" (2018). ``time``: two moments divide the log, and a user's first item after each is held out;
what comes later is used nowhere. Everything before an item may be in its history, validation items included.
Training data has no held-out item.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.dataset import Dataset, Feature, RowsOfFile
from meshrec.data.faults import DataError
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.order import check_seed
from meshrec.data.samples import Bools, Ints, gather_ranges
from meshrec.sparse import KeyedJaggedTensor

# N interactions, I items

HISTORY, SEEN, TIMES = "history", "seen", "times"
"""Names of the features of a sample beside those of its user and its item."""
HeldOut = Literal["leave_last_out", "time"]


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Interactions sorted by user and time.

    Args:
        name: name for reports.
        users: numbers [N] of the users, from 0.
        items: IDs [N] of the items in their table.
        times: times [N] in seconds, int64.
        rows: row numbers [N] in the data.
        num_rows: number of rows of the data.
        item: describes the table of the items; its name is that of the feature.
        catalogue: the IDs of all items, ascending.
        user: describes the users as a feature; None: they are none.
        user_ids: the ID of each user in the table of ``user``.
        described: further features of items, with their values for each item of the catalogue.
    """

    name: str
    users: Ints
    items: Ints
    times: Ints
    rows: Ints
    num_rows: int
    item: Feature
    catalogue: Ints
    user: Feature | None = None
    user_ids: Ints | None = None
    described: Mapping[str, tuple[Feature, Ranges]] = field(default_factory=dict)

    @property
    def firsts(self) -> Ints:
        """The first interaction of each user."""
        return np.searchsorted(self.users, np.arange(self.num_users))

    @property
    def stops(self) -> Ints:
        """The end of the interactions of each user."""
        return np.searchsorted(self.users, np.arange(self.num_users), side="right")

    @property
    def num_users(self) -> int:
        """The number of users."""
        return int(self.users[-1]) + 1 if len(self.users) else 0

    def places(self, items: Ints) -> Ints:
        """Return the places of items in the catalogue."""
        return np.searchsorted(self.catalogue, items)


class _Pairs(NamedTuple):
    """The histories and targets of samples, as positions among the interactions. A history is ``[starts,
    starts + lengths)``; its targets are the ``num_targets`` interactions from ``targets`` on.
    """

    starts: Ints
    lengths: Ints
    targets: Ints
    num_targets: Ints


class _Split(NamedTuple):
    """The end of each user's training data, and the interactions that are held out."""

    train_stops: Ints
    validation: Ints
    test: Ints


def next_items(
    log: Interactions,
    *,
    history: int,
    windows: bool = True,
    held_out: HeldOut = "leave_last_out",
    validation: float = 0.1,
    test: float = 0.1,
    exclude_seen: bool = True,
    seed: int = 0,
) -> Dataset:
    """Make the dataset of next items from a log; see [Note: who is tested on what]. All labels are 1.

    Every sample has ``history``, the earlier items, oldest first, ``times``, their times in seconds, and the
    target. In validation and test data the target is one item, and ``seen``, with ``exclude_seen``, holds all
    items that the user had before it. There are two kinds of training samples, in which ``seen`` is empty:

    - windows of a user's items: the target holds the item that follows each item of ``history``;
    - otherwise one sample for each item with a predecessor, with the features of its user and its item.

    Args:
        log: the interactions.
        history: maximum number of items in a history.
        windows: whether training samples are windows.
        held_out: which items are held out.
        validation, test: with ``time``, their shares of the interactions.
        exclude_seen: whether items that the user had before are left out when items are ranked.
        seed: seed of the shuffle.

    Raises:
        DataError: nothing is left for one of the parts.
    """
    check_seed(seed)
    check_history(history)
    split = _left_out(log) if held_out == "leave_last_out" else _by_time(log, validation, test)
    pairs = (_windows if windows else _single)(log.firsts, split.train_stops, history)
    if not len(pairs.targets):
        raise DataError(f"{log.name}: no user has two items to train on. Take data with more.")

    def reader(pairs: _Pairs, *, judged: bool) -> InMemoryReader:
        at = pairs.targets
        starts = log.firsts[log.users[at]]
        ids = {
            HISTORY: Ranges(log.items, pairs.starts, pairs.lengths),
            log.item.name: Ranges(log.items, at, pairs.num_targets),
            TIMES: Ranges(log.times, pairs.starts, pairs.lengths),
        }
        if exclude_seen:
            ids[SEEN] = Ranges(log.items, starts, (at - starts) * judged)
        if not windows:
            ids |= _more(log, at)
        return InMemoryReader(
            np.zeros((len(at), 0), np.float32),
            np.ones(len(at), np.float32),
            ids,
            rows=log.rows[at],
            files=[RowsOfFile(log.name, 0, log.num_rows)],
            seed=0 if judged else seed,
            shuffle=not judged,
        )

    def judged(at: Ints) -> InMemoryReader | None:
        starts = np.maximum(log.firsts[log.users[at]], at - history)
        pairs = _Pairs(starts, at - starts, at, np.ones(len(at), np.int64))
        return reader(pairs, judged=True) if len(at) else None

    of_items = [feature for feature, _ in log.described.values()]
    more = [] if windows else [*([] if log.user is None else [log.user]), *of_items]
    return Dataset(
        name=log.name,
        features=(*_features(log, pairs, history, exclude_seen=exclude_seen), *more),
        num_dense=0,
        train=reader(pairs, judged=False),
        validation=judged(split.validation),
        test=judged(split.test),
        item=log.item.name,
        seen=SEEN if exclude_seen else None,
        times=TIMES,
        catalogue=_catalogue(log),
        item_counts=_counts(log, pairs),
    )


def latest(log: Interactions, users: Ints, *, history: int, windows: bool = True) -> InMemoryReader:
    """Return a reader of the last items of users, without a target: what comes next is not known.

    Args:
        log: the interactions.
        users: the users, as the log numbers them; -1: a user without a history.
        history: maximum number of items in a history.
        windows: whether the features of the user are left out, see `next_items`.
    """
    known = users >= 0
    firsts = np.where(known, log.firsts[users], 0)
    stops = np.where(known, log.stops[users], 0)
    starts = np.maximum(firsts, stops - history)
    zero, one = np.zeros(len(users), np.int64), np.ones(len(users), np.int64)
    ids = {
        HISTORY: Ranges(log.items, starts, stops - starts),
        log.item.name: Ranges(log.items, zero, zero),
        TIMES: Ranges(log.times, starts, stops - starts),
        SEEN: Ranges(log.items, firsts, stops - firsts),
    }
    if not windows:
        if log.user is not None and log.user_ids is not None:
            ids[log.user.name] = Ranges(log.user_ids, np.where(known, users, 0), one * known)
        ids |= {name: Ranges(each.values, zero, zero) for name, (_, each) in log.described.items()}
    nothing = np.zeros((len(users), 0), np.float32)
    return InMemoryReader(nothing, np.ones(len(users), np.float32), ids, seed=0, shuffle=False)


def check_history(history: int) -> None:
    """Raise ValueError where histories would hold nothing."""
    if history < 1:
        raise ValueError(f"history must be >= 1, got {history}.")


def _left_out(log: Interactions) -> _Split:
    firsts, stops = log.firsts, log.stops
    has_held_out = stops - firsts >= 3
    if not has_held_out.any():
        raise DataError(
            f"{log.name}: no user has three items, so that none can be left out. Take data with more."
        )
    last = stops[has_held_out] - 1
    return _Split(stops - 2 * has_held_out, last - 1, last)


def _by_time(log: Interactions, validation: float, test: float) -> _Split:
    """Take the first item of each user after two moments out of the training data."""
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ValueError(
            f"the shares of validation {validation} and test {test} must lie above 0, together below 1."
        )
    ordered = np.sort(log.times)
    begins, ends = (ordered[int(len(ordered) * share)] for share in (1 - validation - test, 1 - test))

    def firsts_from(moment: Ints, until: Bools) -> Ints:
        at = np.flatnonzero((log.times >= moment) & until)
        return at[np.unique(log.users[at], return_index=True)[1]]

    every = np.ones(len(log.times), np.bool_)
    found = firsts_from(begins, log.times < ends), firsts_from(ends, every)
    for name, part in zip(("validation", "test"), found, strict=True):
        if not len(part):
            raise DataError(f"{log.name}: the split by time leaves no {name} item. Take a larger share.")
    train = np.bincount(log.users[log.times < begins], minlength=log.num_users)
    return _Split(log.firsts + train, *found)


def _more(log: Interactions, at: Ints) -> dict[str, Ranges]:
    """Return the features of the user and the item of interactions."""
    ids = {}
    if log.user is not None and log.user_ids is not None:
        ids[log.user.name] = Ranges(log.user_ids, log.users[at], np.ones(len(at), np.int64))
    places = log.places(log.items[at])
    return ids | {name: each.take(places) for name, (_, each) in log.described.items()}


def _features(log: Interactions, pairs: _Pairs, history: int, *, exclude_seen: bool) -> list[Feature]:
    average = float(pairs.lengths.mean())

    def of_items(name: str, length: float, *, sequence: bool = False) -> Feature:
        return Feature(
            name=name,
            num_embeddings=log.item.num_embeddings,
            average_length=length,
            sequence=sequence,
            max_length=history if sequence else None,
            table=log.item.name,
            keys=log.item.keys,
        )

    return [
        of_items(HISTORY, average, sequence=True),
        of_items(log.item.name, float(pairs.num_targets.mean())),
        Feature(name=TIMES, num_embeddings=0, average_length=average, sequence=True, max_length=history),
        *([of_items(SEEN, 0.0)] if exclude_seen else []),
    ]


def _windows(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Cut each user's items into windows, from the last one back. The first window may be shorter."""
    num_pairs = np.maximum(stops - firsts - 1, 0)
    num_windows = -(-num_pairs // history)
    user = np.repeat(np.arange(len(firsts)), num_windows)
    number = np.arange(len(user)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    ends = stops[user] - 1 - number * history
    starts = np.maximum(firsts[user], ends - history)
    return _Pairs(starts, ends - starts, starts + 1, ends - starts)


def _single(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Return one pair for each item that has a predecessor."""
    num = np.maximum(stops - firsts - 1, 0)
    first = np.repeat(firsts, num)
    targets = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(num) - num, num)
    starts = np.maximum(first, targets - history)
    return _Pairs(starts, targets - starts, targets, np.ones(len(targets), np.int64))


def _catalogue(log: Interactions) -> KeyedJaggedTensor:
    """Return one sample for each item, with its features."""
    num = len(log.catalogue)
    ranges = {log.item.name: Ranges(log.catalogue, np.arange(num), np.ones(num, np.int64))}
    ranges |= {name: each for name, (_, each) in log.described.items()}
    found = [gather_ranges(each.values, each.starts, each.lengths) for each in ranges.values()]
    return KeyedJaggedTensor(
        list(ranges),
        torch.from_numpy(np.concatenate([each.values for each in found])),
        lengths=torch.from_numpy(np.concatenate([each.lengths for each in ranges.values()])),
        stride=num,
    )


def _counts(log: Interactions, pairs: _Pairs) -> Tensor:
    """Return how often each item of the catalogue is a target in training."""
    targets = gather_ranges(log.items, pairs.targets, pairs.num_targets).values
    return torch.from_numpy(np.bincount(log.places(targets), minlength=len(log.catalogue)))
