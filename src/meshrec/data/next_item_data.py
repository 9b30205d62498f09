"""Logs as datasets for next-item prediction.

[Note: who is tested on what]

Every user has at most one validation item and one test item. ``leave_last_out``: the last two items for users
with three or more, as in Kang, McAuley: "Self-attentive sequential recommendation" (2018). ``time``: two
moments divide the log, and a user's first item after each is held out; later items are unused. Everything
before an item may be in the item's history, including validation items. Training data has no held-out items.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.faults import DataError
from meshrec.data.history_reader import HistoryReader, Targets
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.interactions import BLOCK, HISTORY, SEEN, TIMES, Interactions
from meshrec.data.new_users import new_user_scores
from meshrec.data.order_statistics import order_statistics
from meshrec.data.samples import Ints, gather_ranges
from meshrec.sparse import KeyedJaggedTensor

HeldOut = Literal["leave_last_out", "time", "nothing"]


class _Split(NamedTuple):
    """Training data end per user, and held-out interactions, as positions in the log."""

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
    holds all the user's earlier items. There are two kinds of training samples, with empty ``seen``:

    - windows over a user's items: the target holds the next item after every item in ``history``;
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
    samples = _TrainingSamples.of(log, split.train_stops, history, windows=windows)
    if not samples.num_samples:
        raise DataError(f"{log.name}: no user has two items to train on. Take data with more.")

    def evaluation_reader(indices: Ints) -> HistoryReader | None:
        if not len(indices):
            return None
        return HistoryReader(
            log,
            lambda numbers: Targets(log.users_of(indices[numbers]), indices[numbers]),
            len(indices),
            history=history,
            has_window_targets=False,
            has_seen=True if exclude_seen else None,
            has_side_features=not windows,
            seed=0,
            shuffle=False,
        )

    described = [feature for feature, _ in log.described.values()]
    extra_features = [] if windows else [*filter(None, [log.user]), *described]
    return Dataset(
        name=log.name,
        features=(*_features(log, samples, exclude_seen=exclude_seen), *extra_features),
        num_dense=0,
        train=HistoryReader(
            log,
            samples.targets,
            samples.num_samples,
            history=history,
            has_window_targets=windows,
            has_seen=False if exclude_seen else None,
            has_side_features=not windows,
            seed=seed,
            shuffle=True,
        ),
        validation=evaluation_reader(split.validation),
        test=evaluation_reader(split.test),
        item=log.item.name,
        seen=SEEN if exclude_seen else None,
        times=TIMES,
        catalogue=_catalogue(log),
        item_counts=_item_counts(log, split.train_stops),
        new_user_scores=torch.from_numpy(new_user_scores(log, split.train_stops)) if windows else None,
    )


def latest(
    log: Interactions, users: Ints, *, history: int, windows: bool = True, user_ids: Ints | None = None
) -> InMemoryReader:
    """Return a reader for users' last items, without targets.

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
    lengths = np.minimum(stops - firsts, history)
    starts = stops - lengths
    zero = np.zeros(len(users), np.int64)
    ids = {
        HISTORY: Ranges(log.items, starts, lengths),
        log.item.name: Ranges(log.items, zero, zero),
        TIMES: Ranges(log.times, starts, lengths),
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

    def times() -> Iterator[list[Ints]]:
        """Return a new iterator over the timestamps in blocks, a single series for `order_statistics`."""
        return ([log.times[first : first + BLOCK]] for first in range(0, len(log.times), BLOCK))

    ranks = [int(len(log.times) * share) for share in (1 - validation - test, 1 - test)]
    ((start, end),) = order_statistics(times, [ranks])
    first_validation, first_test = (log.firsts + _num_before(log, moment) for moment in (start, end))

    def existing(indices: Ints) -> Ints:
        """Return those of the interactions, one per user, that are the user's."""
        return indices[indices < log.stops]

    held_out = existing(first_validation), existing(first_test)
    # An item after both moments is a test item.
    held_out = held_out[0][log.times[held_out[0]] < end], held_out[1]
    for name, part in zip(("validation", "test"), held_out, strict=True):
        if not len(part):
            raise DataError(f"{log.name}: the split by time leaves no {name} item. Take a larger share.")
    return _Split(first_validation, *held_out)


def _num_before(log: Interactions, moment: int) -> Ints:
    """Return the interaction count before a moment per user."""
    num_before = np.zeros(log.num_users, np.int64)
    for block in log.blocks(log.stops):
        first, last = block.users[[0, -1]]
        numbers = block.users[block.times < moment] - first
        num_before[first : last + 1] += np.bincount(numbers, minlength=last + 1 - first)
    return num_before


def _features(log: Interactions, samples: "_TrainingSamples", *, exclude_seen: bool) -> list[Feature]:
    average, history = samples.average_length, samples.history

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
        item_feature(log.item.name, average if samples.windows else 1.0),
        Feature(name=TIMES, num_embeddings=0, average_length=average, sequence=True, max_length=history),
        *([item_feature(SEEN, 0.0)] if exclude_seen else []),
    ]


@dataclass(frozen=True, kw_only=True)
class _TrainingSamples:
    """Training sample numbers; see `next_items`.

    Args:
        log: interactions.
        stops: training data end per user.
        history: maximum history length.
        windows: whether a sample is an item window: users' items are divided from the last item back, and
            the first window may be shorter. Otherwise a sample is an item with a predecessor.
        num_pairs: items with a predecessor, per user.
        offsets: int64 [num_users + 1]. User u has the samples ``offsets[u]`` to ``offsets[u + 1]``,
            exclusive.
    """

    log: Interactions
    stops: Ints
    history: int
    windows: bool
    num_pairs: Ints
    offsets: Ints

    @staticmethod
    def of(log: Interactions, stops: Ints, history: int, *, windows: bool) -> "_TrainingSamples":
        """Count the samples.

        Args:
            log: the interactions.
            stops: training data end per user.
            history: maximum items in a history.
            windows: whether a sample is an item window.
        """
        num_pairs = np.maximum(stops - log.firsts - 1, 0)
        num_samples = -(-num_pairs // history) if windows else num_pairs
        offsets = np.concatenate([[0], np.cumsum(num_samples)])
        return _TrainingSamples(
            log=log, stops=stops, history=history, windows=windows, num_pairs=num_pairs, offsets=offsets
        )

    @property
    def num_samples(self) -> int:
        """Sample count."""
        return int(self.offsets[-1])

    @property
    def average_length(self) -> float:
        """Mean history length."""
        if self.windows:
            return int(self.num_pairs.sum()) / self.num_samples
        # The first histories grow by an item at a time.
        growing = np.minimum(self.num_pairs, self.history)
        total = growing * (growing + 1) // 2 + (self.num_pairs - growing) * self.history
        return int(total.sum()) / self.num_samples

    def targets(self, numbers: Ints) -> Targets:
        """Return the samples' last targets."""
        users = np.searchsorted(self.offsets, numbers, side="right") - 1
        numbers = numbers - self.offsets[users]
        if self.windows:
            return Targets(users, self.stops[users] - 1 - numbers * self.history)
        return Targets(users, self.log.firsts[users] + 1 + numbers)


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


def _item_counts(log: Interactions, train_stops: Ints) -> Tensor:
    """Return training target counts per catalog item."""
    counts = np.zeros(len(log.catalogue), np.int64)
    for block in log.blocks(train_stops):
        # A user's first item has no history and is not a target.
        counts += np.bincount(block.catalog_positions[block.num_earlier > 0], minlength=len(counts))
    return torch.from_numpy(counts)
