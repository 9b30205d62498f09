"""Datasets for next-item prediction from interaction logs.

[Note: who is tested on what]

A split holds out at most two interactions per user: one to validate on, and one to test on. The model gets
the user's earlier items as the history, and is evaluated by the rank of the held-out item.

- ``leave_last_out``: for users with three or more interactions, the last one is for testing, and the one
  before it for validation. Other users are only trained on. This is the split in Kang, McAuley:
  "Self-attentive sequential recommendation" (2018).
- ``time``: two timestamps divide the whole log into training, validation and test periods. A user's first
  interaction in the validation period and the first one in the test period are held out. The user's other
  interactions in these periods are never targets.

The model trains on interactions before the held-out ones. A history may have all earlier items: the history
of a test item includes the validation item.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch

from meshrec.data.dataset import Dataset, Feature
from meshrec.data.faults import DataError
from meshrec.data.history_reader import HistoryReader, Targets
from meshrec.data.in_memory import InMemoryReader, Ranges
from meshrec.data.interactions import BLOCK, HISTORY, SEEN, TIMES, Arrays, Interactions
from meshrec.data.item_trends import item_trends
from meshrec.data.new_users import new_user_scores
from meshrec.data.order_statistics import order_statistics
from meshrec.data.popularity import popularity_counts
from meshrec.data.samples import Ints, gather_ranges
from meshrec.sparse import KeyedJaggedTensor

HeldOut = Literal["leave_last_out", "time", "nothing"]
# Raised with every change of the arrays of `_passes`, which may be stored on disk.
_PASSES_VERSION = 2


class _Split(NamedTuple):
    """Split of a log into training, validation and test data.

    Values are indices into the arrays of `Interactions`, which are sorted by user.
    """

    train_stops: Ints
    """Training data end per user, exclusive, int64 [num_users]; starts are ``Interactions.firsts``."""
    validation: Ints
    """Held-out interactions for validation, at most one per user."""
    test: Ints
    """Held-out interactions for testing, at most one per user."""


def next_items(
    log: Interactions,
    *,
    history: int,
    windows: bool = True,
    held_out: HeldOut = "leave_last_out",
    validation: float = 0.1,
    test: float = 0.1,
    exclude_seen: bool = True,
    evaluated_users: int | None = None,
    seed: int = 0,
) -> Dataset:
    """Create a dataset for next-item prediction from a log; see [Note: who is tested on what].

    A sample has these features:

    - ``history``: the user's items before the target, oldest first, at most ``history`` of them;
    - ``times``: history timestamps, in seconds;
    - the item feature of the log: the target, which the model learns to predict;
    - ``seen``, with ``exclude_seen``: all earlier items, which must not be recommended again. It is empty in
      training.

    A validation or test sample has one target item. Training samples have one of two forms:

    - ``windows=True``: a sample is a window of a user's consecutive items. It has a target for every item in
      ``history``: the item after it. Models that predict at all positions train on windows.
    - ``windows=False``: a sample has one target item, and all items of a user but the first are targets. All
      samples, also for validation and test, then have the user feature and the additional target item
      features, too.

    All labels are 1.

    Args:
        log: interactions.
        history: maximum history length, in items.
        windows: form of the training samples, see above.
        held_out: how validation and test items are selected; "nothing": all data is for training.
        validation: for ``held_out="time"``: share of all interactions in the validation period.
        test: for ``held_out="time"``: share of all interactions in the test period.
        exclude_seen: whether a user's earlier items are excluded when items are ranked.
        evaluated_users: maximum number of held-out users in validation, and in test data. Of more users, a
            random sample is evaluated. None: all.
        seed: seed for shuffling training samples, and for the sample of users.

    Returns:
        The dataset. Its catalog has all items in the log, with their features.

    Raises:
        DataError: training, validation or test data would be empty.
        ValueError: ``history`` or ``evaluated_users`` is below 1, or the shares are out of range.
    """
    check_history(history)
    if evaluated_users is not None and evaluated_users < 1:
        raise ValueError(f"evaluated_users must be >= 1, or None for all users, got {evaluated_users}.")
    arrays = _stored_passes(log, held_out, validation, test, windows=windows)
    split = _Split(*(arrays[name] for name in _Split._fields))
    held_out_parts = {"validation": split.validation, "test": split.test}
    evaluated = {
        name: _draw(part, evaluated_users or len(part), seed) for name, part in held_out_parts.items()
    }
    samples = _TrainingSamples.of(log, split.train_stops, history, windows=windows)

    def evaluation_reader(indices: Ints) -> HistoryReader | None:
        """Return a reader for held-out interactions with these indices in the log; None if there are none."""
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
        validation=evaluation_reader(evaluated["validation"]),
        test=evaluation_reader(evaluated["test"]),
        num_held_out={
            name: len(indices)
            for name, indices in held_out_parts.items()
            if len(indices) > len(evaluated[name])
        },
        item=log.item.name,
        seen=SEEN if exclude_seen else None,
        times=TIMES,
        catalogue=_catalogue(log),
        # Copied, because stored arrays are read-only.
        item_counts=torch.tensor(arrays["item_counts"]),
        new_user_scores=torch.tensor(arrays["new_user_scores"]) if windows else None,
        item_trends=torch.tensor(arrays["item_trends"]),
        trend_weight=float(arrays["trend_weight"][0]),
    )


def _stored_passes(
    log: Interactions, held_out: HeldOut, validation: float, test: float, *, windows: bool
) -> Arrays:
    """Return the arrays of `_passes`, which a log on disk computes once; see `next_items`."""
    return log.derived(
        {
            "version": _PASSES_VERSION,
            "held_out": held_out,
            "validation": validation,
            "test": test,
            "windows": windows,
        },
        lambda: _passes(log, held_out, validation, test, windows=windows),
    )


def _passes(log: Interactions, held_out: HeldOut, validation: float, test: float, *, windows: bool) -> Arrays:
    """Return the arrays of a dataset that need passes over the whole log; see `next_items` for the arguments.

    Returns:
        The arrays of `_Split`; with one value per catalog item, ``item_counts``, ``new_user_scores`` and
        ``item_trends``; and ``trend_weight`` with a single value.
    """
    if held_out == "nothing":
        split = _Split(log.stops, np.zeros(0, np.int64), np.zeros(0, np.int64))
    else:
        split = _hold_out_last(log) if held_out == "leave_last_out" else _split_by_time(log, validation, test)
    if not _num_pairs(log, split.train_stops).any():
        raise DataError(f"{log.name}: no user has two items to train on. Take data with more.")
    arrays = {**split._asdict(), "item_counts": _item_counts(log, split.train_stops)}
    popularity = popularity_counts(log, split.train_stops)
    validation_I = np.bincount(log.positions(log.items[split.validation]), minlength=len(log.catalogue))
    arrays["item_trends"], weight = item_trends(popularity, validation_I)
    arrays["trend_weight"] = np.array([weight])
    if windows:
        arrays["new_user_scores"] = new_user_scores(popularity)
    return arrays


def latest(
    log: Interactions, users: Ints, *, history: int, windows: bool = True, user_ids: Ints | None = None
) -> InMemoryReader:
    """Return a reader with a sample per user, to recommend the items after the user's last interaction.

    Samples have the features of `next_items`, but the target and the target item features are empty. The
    history has the user's last items.

    Args:
        log: interactions.
        users: user numbers in the log, [n]; -1 for a user without history.
        history: maximum history length, in items.
        windows: whether the model was trained with ``windows=True``, which omits user and item features.
        user_ids: ID per sample in the user table, [n]; -1 for a user without an ID.

    Returns:
        A reader with n samples, in the order of ``users``.
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


def _draw(indices: Ints, num: int, seed: int) -> Ints:
    """Draw ``num`` indices without replacement, and keep their order. Return all if there are fewer."""
    if len(indices) <= num:
        return indices
    return indices[np.sort(np.random.default_rng(seed).choice(len(indices), num, replace=False))]


def check_history(history: int) -> None:
    """Raise ValueError if the maximum history length is below 1."""
    if history < 1:
        raise ValueError(f"history must be >= 1, got {history}.")


def _hold_out_last(log: Interactions) -> _Split:
    """Hold out the last two interactions of every user with three or more."""
    firsts, stops = log.firsts, log.stops
    # Two held-out items must leave at least one for training.
    has_held_out = stops - firsts >= 3
    if not has_held_out.any():
        raise DataError(
            f"{log.name}: no user has three items, so that none can be left out. Take data with more."
        )
    last = stops[has_held_out] - 1
    return _Split(stops - 2 * has_held_out, last - 1, last)


def _split_by_time(log: Interactions, validation: float, test: float) -> _Split:
    """Hold out a user's first interaction in the validation period, and the first one in the test period.

    Args:
        validation: share of all interactions in the validation period.
        test: share of all interactions in the test period, at the log's end.
    """
    if min(validation, test) <= 0 or validation + test >= 1:
        raise ValueError(
            f"the shares of validation {validation} and test {test} must lie above 0, together below 1."
        )

    def times() -> Iterator[list[Ints]]:
        """Iterate over the log's timestamps in blocks, for `order_statistics`, which gets a single series."""
        return ([log.times[first : first + BLOCK]] for first in range(0, len(log.times), BLOCK))

    ranks = [int(len(log.times) * share) for share in (1 - validation - test, 1 - test)]
    # The validation period is [start, end), and the test period starts at ``end``.
    ((start, end),) = order_statistics(times, [ranks])
    # A user's interactions are sorted by time, so the count before a moment gives the first index from it on.
    first_validation, first_test = (log.firsts + _num_before(log, moment) for moment in (start, end))

    def drop_missing(indices: Ints) -> Ints:
        """Return only the indices of users with an interaction at or after a period's start.

        Args:
            indices: index per user of the first such interaction, int64 [num_users]. For users without one,
                the index is the user's end in the log (``log.stops``).
        """
        return indices[indices < log.stops]

    held_out = drop_missing(first_validation), drop_missing(first_test)
    # If the first interaction after ``start`` is after ``end`` too, it is a test item only.
    held_out = held_out[0][log.times[held_out[0]] < end], held_out[1]
    for name, part in zip(("validation", "test"), held_out, strict=True):
        if not len(part):
            raise DataError(f"{log.name}: the split by time leaves no {name} item. Take a larger share.")
    return _Split(first_validation, *held_out)


def _num_before(log: Interactions, moment: int) -> Ints:
    """Return the number of interactions before a timestamp, in seconds, per user: int64 [num_users]."""
    num_before = np.zeros(log.num_users, np.int64)
    for block in log.blocks(log.stops):
        first, last = block.users[[0, -1]]
        numbers = block.users[block.times < moment] - first
        num_before[first : last + 1] += np.bincount(numbers, minlength=last + 1 - first)
    return num_before


def _features(log: Interactions, samples: "_TrainingSamples", *, exclude_seen: bool) -> list[Feature]:
    """Describe the features that all samples have: history, target item, timestamps and seen items."""
    average, history = samples.average_length, samples.history

    def item_feature(name: str, length: float, *, sequence: bool = False) -> Feature:
        """Describe a feature that has item IDs and reads the item table.

        Args:
            name: feature name.
            length: mean IDs per sample.
            sequence: whether the IDs are in time order; then a sample has at most ``history`` IDs.
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
    """Training samples for all users, numbered user by user; see `next_items` for the two forms.

    No array here has an entry per sample. `targets` converts sample numbers to interactions when a batch is
    read.

    Args:
        windows: whether samples are windows. Windows are cut from the user's last item backward, so a user's
            last sample number has the oldest items, and may be shorter.
        offsets: int32 or int64 [num_users + 1]. User u has the sample numbers ``offsets[u]`` to
            ``offsets[u + 1]``, exclusive.
    """

    log: Interactions
    stops: Ints
    history: int
    windows: bool
    offsets: Ints

    @staticmethod
    def of(log: Interactions, stops: Ints, history: int, *, windows: bool) -> "_TrainingSamples":
        """Count the samples per user.

        Args:
            log: interactions.
            stops: training data end per user, exclusive, [num_users].
            history: maximum history length, in items.
            windows: whether samples are windows.
        """
        num_pairs = _num_pairs(log, stops)
        # Rounded up: a user's last window may be shorter.
        num_samples = -(-num_pairs // history) if windows else num_pairs
        offsets = np.concatenate([[0], np.cumsum(num_samples)])
        # Logs may have many millions of users.
        if offsets[-1] < 1 << 31:
            offsets = offsets.astype(np.int32)
        return _TrainingSamples(log=log, stops=stops, history=history, windows=windows, offsets=offsets)

    @property
    def num_samples(self) -> int:
        """Number of training samples for all users."""
        return int(self.offsets[-1])

    @property
    def average_length(self) -> float:
        """Mean history length over all training samples, in items."""
        num_pairs = _num_pairs(self.log, self.stops)
        if self.windows:
            # A window has as many history items as targets, and a target is in one window.
            return int(num_pairs.sum()) / self.num_samples
        # A user's samples have 1, 2, ... history items, up to the maximum.
        growing = np.minimum(num_pairs, self.history)
        total = growing * (growing + 1) // 2 + (num_pairs - growing) * self.history
        return int(total.sum()) / self.num_samples

    def targets(self, numbers: Ints) -> Targets:
        """Return the user and the target interaction for samples with the given numbers.

        A window has several targets. This is the last one, and `HistoryReader` adds the earlier ones.
        """
        # With another dtype, NumPy would copy all offsets.
        numbers = numbers.astype(self.offsets.dtype, copy=False)
        users = np.searchsorted(self.offsets, numbers, side="right") - 1
        numbers = numbers - self.offsets[users]
        if self.windows:
            return Targets(users, self.stops[users] - 1 - numbers * self.history)
        return Targets(users, self.log.firsts[users] + 1 + numbers)


def _num_pairs(log: Interactions, stops: Ints) -> Ints:
    """Return the number of training items with an earlier item per user, int64 [num_users].

    These items are the possible targets.

    Args:
        stops: training data end per user, exclusive, [num_users].
    """
    num_pairs: Ints = np.maximum(stops - log.firsts - 1, 0)
    return num_pairs


def _catalogue(log: Interactions) -> KeyedJaggedTensor:
    """Return the catalog: a sample per item in the order of ``log.catalogue``, with its item features."""
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


def _item_counts(log: Interactions, train_stops: Ints) -> Ints:
    """Return how often an item is a training target, per catalog item: int64 [items]."""
    counts = np.zeros(len(log.catalogue), np.int64)
    for block in log.blocks(train_stops):
        # A user's first item has no history and is not a target.
        counts += np.bincount(block.catalog_positions[block.num_earlier > 0], minlength=len(counts))
    return counts
