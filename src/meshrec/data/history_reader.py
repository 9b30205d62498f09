"""Reader for histories and targets, as positions in a log."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from meshrec.data.batch import Batch
from meshrec.data.dataset import Reader, RowsOfFile
from meshrec.data.in_memory import IndexedSamples
from meshrec.data.interactions import HISTORY, SEEN, TIMES, Interactions
from meshrec.data.samples import Ints, Ragged, Samples, Shape, gather_ranges, to_batch

# n samples of a batch


class Targets(NamedTuple):
    """Target interactions."""

    users: Ints
    """User numbers [n]."""
    indices: Ints
    """Positions in the log [n]."""


class HistoryReader(IndexedSamples, Reader):
    """Reader for users' items before a target interaction, and the target.

    Everything but the target's position is computed per batch, so that a log may exceed memory.

    Args:
        log: interactions.
        targets: returns the targets for the samples with the given numbers.
        num_samples: sample count.
        history: maximum history length.
        has_window_targets: whether a sample's targets are the next items after every item of its history;
            otherwise only the target.
        has_seen: whether all earlier items of the user are read, too; None: samples have no such feature.
        has_side_features: whether samples have user and item features.
        seed: shuffle seed.
        shuffle: whether to shuffle.
    """

    def __init__(
        self,
        log: Interactions,
        targets: Callable[[Ints], Targets],
        num_samples: int,
        *,
        history: int,
        has_window_targets: bool,
        has_seen: bool | None,
        has_side_features: bool,
        seed: int,
        shuffle: bool,
    ) -> None:
        super().__init__(seed=seed, shuffle=shuffle)
        self._log, self._targets, self._num_samples, self._history = log, targets, num_samples, history
        self._has_window_targets, self._has_seen = has_window_targets, has_seen
        self._has_side_features = has_side_features

    @property
    @override
    def num_samples(self) -> int:
        return self._num_samples

    @property
    @override
    def files(self) -> Sequence[RowsOfFile]:
        return (RowsOfFile(self._log.name, 0, self._log.num_rows),)

    @override
    def lengths(self, key: str, samples: Ints) -> Ints:
        assert key in (HISTORY, TIMES), key
        users, indices = self._targets(samples)
        lengths: Ints = np.minimum(indices - self._log.firsts[users], self._history)
        return lengths

    @override
    def batch(self, samples: Ints) -> Batch:
        log = self._log
        users, indices = self._targets(samples)
        firsts = log.firsts[users]
        lengths = np.minimum(indices - firsts, self._history)
        starts = indices - lengths
        num_targets = lengths if self._has_window_targets else np.ones_like(lengths)
        target_starts = indices + 1 - num_targets
        ids = {
            HISTORY: gather_ranges(log.items, starts, lengths),
            log.item.name: gather_ranges(log.items, target_starts, num_targets),
            TIMES: gather_ranges(log.times, starts, lengths),
        }
        if self._has_seen is not None:
            ids[SEEN] = gather_ranges(log.items, firsts, (indices - firsts) * self._has_seen)
        if self._has_side_features:
            ids |= _side_features(log, users, indices)
        no_dense, labels = np.zeros((len(samples), 0), np.float32), np.ones(len(samples), np.float32)
        rows = log.rows[target_starts].astype(np.int64, copy=False)
        return to_batch(
            tuple(ids), Shape(0, len(ids)), [Samples(no_dense, labels, tuple(ids.values()), rows=rows)]
        )


def _side_features(log: Interactions, users: Ints, indices: Ints) -> dict[str, Ragged]:
    """Return user and item features for interactions at ``indices``."""
    ids = {}
    if log.user is not None and log.user_ids is not None:
        ids[log.user.name] = gather_ranges(log.user_ids, users, (log.user_ids[users] >= 0).astype(np.int64))
    positions = log.positions(log.items[indices])
    return ids | {name: gather_ranges(*ranges.take(positions)) for name, (_, ranges) in log.described.items()}
