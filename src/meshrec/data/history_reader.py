"""Reader for next-item samples: a target interaction in a log, and the user's items before it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from meshrec.data.batch import Batch
from meshrec.data.dataset import Reader, RowsOfFile
from meshrec.data.in_memory import IndexedSamples
from meshrec.data.interactions import HISTORY, SEEN, TIMES, Interactions
from meshrec.data.samples import Ints, PermutedSamples, Ragged, Samples, Shape, gather_ranges, to_batch

# n samples of a batch


class Targets(NamedTuple):
    """Target interactions for n samples."""

    users: Ints
    """User number per sample, int64 [n]."""
    indices: Ints
    """Index of the target in the arrays of `Interactions`, int64 [n]."""


class HistoryReader(IndexedSamples, Reader):
    """Reader for samples with a user's history and a target item; `next_items` describes the features.

    A sample is found by its target: the history is the items just before it in the log, which is sorted by
    user and time. Features are read from the log batch by batch, so the log may be larger than memory.

    Args:
        log: interactions.
        targets: function mapping sample numbers [n] to the samples' targets.
        num_samples: sample count.
        history: maximum history length, in items.
        has_window_targets: True: the targets of a sample are the item after every history item. False: the
            only target is the item after the history.
        has_seen: whether ``seen`` has all earlier items (True) or is empty (False). None: samples have no
            such feature.
        has_side_features: whether samples have the user feature, and target item features.
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
        # A history is the range just before its target, because the log is sorted by user and time.
        starts = indices - lengths
        # The targets of a window are the history shifted by one item, ending with the target itself.
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
        # A batch row is that of the sample's first target.
        no_dense, labels = np.zeros((len(samples), 0), np.float32), np.ones(len(samples), np.float32)
        rows = log.rows[target_starts].astype(np.int64, copy=False)
        of_batch = PermutedSamples(Samples(no_dense, labels, tuple(ids.values()), rows=rows))
        return to_batch(tuple(ids), Shape(0, len(ids)), of_batch.ranges(0, len(samples)))


def _side_features(log: Interactions, users: Ints, indices: Ints) -> dict[str, Ragged]:
    """Return the IDs of n interactions for the user feature and the additional item features.

    Returns:
        IDs by feature name. A user without an ID in the user table has none.
    """
    ids = {}
    if log.user is not None and log.user_ids is not None:
        ids[log.user.name] = gather_ranges(log.user_ids, users, (log.user_ids[users] >= 0).astype(np.int64))
    positions = log.positions(log.items[indices])
    return ids | {name: gather_ranges(*ranges.take(positions)) for name, (_, ranges) in log.described.items()}
