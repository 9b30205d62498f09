"""Interaction logs as sequences for next-item prediction.

[Note: who is tested on what]

Every user has at most one validation item and one test item. ``leave_last_out``: the last two items of users
with three or more, as in Kang, McAuley: "Self-attentive sequential recommendation" (2018). ``time``: two
moments divide the log, and a user's first item after each is held out; later items are unused. Everything
before an item may be in the item's history, including validation items. Training data has no held-out items.
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
from meshrec.data.new_users import new_user_scores
from meshrec.data.samples import Bools, Ints, gather_ranges
from meshrec.sparse import KeyedJaggedTensor

# N interactions, I items

HISTORY, SEEN, TIMES = "history", "seen", "times"
"""Names of sample features besides user and item."""
HeldOut = Literal["leave_last_out", "time", "nothing"]


@dataclass(frozen=True, kw_only=True)
class Interactions:
    """Interactions sorted by user and time.

    ``items``, ``times`` and ``rows`` are int32 or int64, and may be memory-mapped files.

    Args:
        name: display name.
        offsets: int64 [num_users + 1]. User u has the interactions ``offsets[u]`` to ``offsets[u + 1]``,
            exclusive, possibly none.
        items: item IDs [N] in their table.
        times: timestamps [N] in seconds.
        rows: row numbers [N] in the data.
        num_rows: rows in the data.
        item: item feature and table.
        catalogue: all item IDs, ascending.
        user: user feature; None: users are not a feature.
        user_ids: ID per user in the table of ``user``; -1 for a user without an ID.
        described: additional item features, with values per catalog item.
    """

    name: str
    offsets: Ints
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
    def num_users(self) -> int:
        """Number of users, including users without interactions."""
        return len(self.offsets) - 1

    @property
    def firsts(self) -> Ints:
        """First interaction per user."""
        return self.offsets[:-1]

    @property
    def stops(self) -> Ints:
        """End of interactions per user."""
        return self.offsets[1:]

    def users_of(self, interactions: Ints) -> Ints:
        """Return the user number of each interaction."""
        # Users without interactions share their offset with the next user, who is the last of equal offsets.
        return np.searchsorted(self.offsets, interactions, side="right") - 1

    def positions(self, items: Ints) -> Ints:
        """Return the catalog positions of items."""
        return np.searchsorted(self.catalogue, items)


class _Pairs(NamedTuple):
    """Histories and targets per sample, as interaction positions.

    A history is ``[starts, starts + lengths)``; its targets are ``num_targets`` interactions from
    ``targets``.
    """

    starts: Ints
    lengths: Ints
    targets: Ints
    num_targets: Ints


class _Split(NamedTuple):
    """End of training data per user, and held-out interactions."""

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
    """Create a next-item dataset from a log; see [Note: who is tested on what]. All labels are 1.

    A sample has ``history``, earlier items, oldest first; ``times``, their timestamps in seconds; and the
    target. In validation and test data the target is a single item, and ``seen``, with ``exclude_seen``,
    holds all earlier items of the user. There are two kinds of training samples, with empty ``seen``:

    - windows of a user's items: the target holds the next item after every item in ``history``;
    - otherwise a sample per item with a predecessor, with user and item features.

    Args:
        log: interactions.
        history: maximum history length.
        windows: whether training samples are windows.
        held_out: which items are held out.
        validation: with ``time``, interaction share for validation.
        test: with ``time``, interaction share for testing.
        exclude_seen: whether a user's earlier items are excluded from ranking.
        seed: shuffle seed.

    Raises:
        DataError: a part would be empty.
    """
    check_history(history)
    if held_out == "nothing":
        split = _Split(log.stops, np.zeros(0, np.int64), np.zeros(0, np.int64))
    else:
        split = _left_out(log) if held_out == "leave_last_out" else _by_time(log, validation, test)
    pairs = (_windows if windows else _single)(log.firsts, split.train_stops, history)
    if not len(pairs.targets):
        raise DataError(f"{log.name}: no user has two items to train on. Take data with more.")

    def reader(pairs: _Pairs, *, is_evaluation: bool) -> InMemoryReader:
        targets, starts = pairs.targets, log.firsts[log.users_of(pairs.targets)]
        ids = {
            HISTORY: Ranges(log.items, pairs.starts, pairs.lengths),
            log.item.name: Ranges(log.items, targets, pairs.num_targets),
            TIMES: Ranges(log.times, pairs.starts, pairs.lengths),
        }
        if exclude_seen:
            ids[SEEN] = Ranges(log.items, starts, (targets - starts) * is_evaluation)
        if not windows:
            ids |= _side_features(log, targets)
        return InMemoryReader(
            np.zeros((len(targets), 0), np.float32),
            np.ones(len(targets), np.float32),
            ids,
            rows=log.rows[targets].astype(np.int64, copy=False),
            files=[RowsOfFile(log.name, 0, log.num_rows)],
            seed=0 if is_evaluation else seed,
            shuffle=not is_evaluation,
        )

    def evaluation_reader(targets: Ints) -> InMemoryReader | None:
        starts = np.maximum(log.firsts[log.users_of(targets)], targets - history)
        pairs = _Pairs(starts, targets - starts, targets, np.ones(len(targets), np.int64))
        return reader(pairs, is_evaluation=True) if len(targets) else None

    described = [feature for feature, _ in log.described.values()]
    extra_features = [] if windows else [*filter(None, [log.user]), *described]
    return Dataset(
        name=log.name,
        features=(*_features(log, pairs, history, exclude_seen=exclude_seen), *extra_features),
        num_dense=0,
        train=reader(pairs, is_evaluation=False),
        validation=evaluation_reader(split.validation),
        test=evaluation_reader(split.test),
        item=log.item.name,
        seen=SEEN if exclude_seen else None,
        times=TIMES,
        catalogue=_catalogue(log),
        item_counts=_counts(log, pairs),
        new_user_scores=_new_user_scores(log, split.train_stops) if windows else None,
    )


def latest(
    log: Interactions, users: Ints, *, history: int, windows: bool = True, user_ids: Ints | None = None
) -> InMemoryReader:
    """Return a reader of users' last items, without targets.

    Args:
        log: interactions.
        users: user numbers in the log; -1: a user without history.
        history: maximum history length.
        windows: whether user features are omitted, see `next_items`.
        user_ids: ID per user in the user table; -1: none.
    """
    has_history = users >= 0
    firsts = np.where(has_history, log.firsts[users], 0)
    stops = np.where(has_history, log.stops[users], 0)
    starts = np.maximum(firsts, stops - history)
    zero = np.zeros(len(users), np.int64)
    ids = {
        HISTORY: Ranges(log.items, starts, stops - starts),
        log.item.name: Ranges(log.items, zero, zero),
        TIMES: Ranges(log.times, starts, stops - starts),
        SEEN: Ranges(log.items, firsts, stops - firsts),
    }
    if not windows:
        if log.user is not None and user_ids is not None:
            ids[log.user.name] = Ranges(user_ids, np.arange(len(users)), (user_ids >= 0).astype(np.int64))
        ids |= {name: Ranges(ranges.values, zero, zero) for name, (_, ranges) in log.described.items()}
    no_dense = np.zeros((len(users), 0), np.float32)
    return InMemoryReader(no_dense, np.ones(len(users), np.float32), ids, seed=0, shuffle=False)


def check_history(history: int) -> None:
    """Raise ValueError for an empty maximum history."""
    if history < 1:
        raise ValueError(f"history must be >= 1, got {history}.")


def _left_out(log: Interactions) -> _Split:
    firsts, stops = log.firsts, log.stops
    # Two held-out items must leave at least one for training.
    has_held_out = stops - firsts >= 3
    if not has_held_out.any():
        raise DataError(
            f"{log.name}: no user has three items, so that none can be left out. Take data with more."
        )
    last = stops[has_held_out] - 1
    return _Split(stops - 2 * has_held_out, last - 1, last)


def _by_time(log: Interactions, validation: float, test: float) -> _Split:
    """Hold out every user's first item after two moments."""
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ValueError(
            f"the shares of validation {validation} and test {test} must lie above 0, together below 1."
        )
    ordered = np.sort(log.times)
    starts, ends = (ordered[int(len(ordered) * share)] for share in (1 - validation - test, 1 - test))

    def first_items_from(moment: Ints, until: Bools) -> Ints:
        at = np.flatnonzero((log.times >= moment) & until)
        return at[np.unique(log.users_of(at), return_index=True)[1]]

    always = np.ones(len(log.times), np.bool_)
    held_out = first_items_from(starts, log.times < ends), first_items_from(ends, always)
    for name, part in zip(("validation", "test"), held_out, strict=True):
        if not len(part):
            raise DataError(f"{log.name}: the split by time leaves no {name} item. Take a larger share.")
    train = np.bincount(log.users_of(np.flatnonzero(log.times < starts)), minlength=log.num_users)
    return _Split(log.firsts + train, *held_out)


def _side_features(log: Interactions, interactions: Ints) -> dict[str, Ranges]:
    """Return user and item features of interactions."""
    ids = {}
    if log.user is not None and log.user_ids is not None:
        users = log.users_of(interactions)
        ids[log.user.name] = Ranges(log.user_ids, users, (log.user_ids[users] >= 0).astype(np.int64))
    positions = log.positions(log.items[interactions])
    return ids | {name: ranges.take(positions) for name, (_, ranges) in log.described.items()}


def _features(log: Interactions, pairs: _Pairs, history: int, *, exclude_seen: bool) -> list[Feature]:
    average = float(pairs.lengths.mean())

    def item_feature(name: str, length: float, *, sequence: bool = False) -> Feature:
        """Describe a feature that reads the item table.

        Args:
            name: feature name.
            length: mean IDs per sample.
            sequence: whether the IDs are ordered; then a sample has at most ``history`` IDs.
        """
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
        # All item features share one table.
        item_feature(HISTORY, average, sequence=True),
        item_feature(log.item.name, float(pairs.num_targets.mean())),
        Feature(name=TIMES, num_embeddings=0, average_length=average, sequence=True, max_length=history),
        *([item_feature(SEEN, 0.0)] if exclude_seen else []),
    ]


def _windows(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Split every user's items into windows, from the last item back. The first window may be shorter."""
    num_pairs = np.maximum(stops - firsts - 1, 0)
    num_windows = -(-num_pairs // history)
    user = np.repeat(np.arange(len(firsts)), num_windows)
    number = np.arange(len(user)) - np.repeat(np.cumsum(num_windows) - num_windows, num_windows)
    ends = stops[user] - 1 - number * history
    starts = np.maximum(firsts[user], ends - history)
    return _Pairs(starts, ends - starts, starts + 1, ends - starts)


def _single(firsts: Ints, stops: Ints, history: int) -> _Pairs:
    """Return a pair per item with a predecessor."""
    num = np.maximum(stops - firsts - 1, 0)
    first = np.repeat(firsts, num)
    targets = first + 1 + np.arange(len(first)) - np.repeat(np.cumsum(num) - num, num)
    starts = np.maximum(first, targets - history)
    return _Pairs(starts, targets - starts, targets, np.ones(len(targets), np.int64))


def _catalogue(log: Interactions) -> KeyedJaggedTensor:
    """Return a sample per item, with features."""
    num = len(log.catalogue)
    ranges = {log.item.name: Ranges(log.catalogue, np.arange(num), np.ones(num, np.int64))}
    ranges |= {name: values for name, (_, values) in log.described.items()}
    gathered = [gather_ranges(*item_ranges) for item_ranges in ranges.values()]
    return KeyedJaggedTensor(
        list(ranges),
        torch.from_numpy(np.concatenate([ragged.values for ragged in gathered])),
        lengths=torch.from_numpy(np.concatenate([item_ranges.lengths for item_ranges in ranges.values()])),
        stride=num,
    )


def _new_user_scores(log: Interactions, train_stops: Ints) -> Tensor:
    """Return the score of each item of the catalogue for a user without a history."""
    at = np.arange(len(log.items))
    users = log.users_of(at)
    is_train = at < train_stops[users]
    at, users = at[is_train], users[is_train]
    positions = log.positions(log.items[at])
    return torch.from_numpy(new_user_scores(users, positions, log.times[at], len(log.catalogue)))


def _counts(log: Interactions, pairs: _Pairs) -> Tensor:
    """Return training target counts per catalog item."""
    targets = gather_ranges(log.items, pairs.targets, pairs.num_targets).values
    return torch.from_numpy(np.bincount(log.positions(targets), minlength=len(log.catalogue)))
