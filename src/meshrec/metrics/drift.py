"""Drift of feature values: the last hour of a stream against up to a day before, in event time."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshrec.sparse import KeyedJaggedTensor

_SLOT_SECONDS = 300
# Slots of the last hour, and of the day before it.
_NUM_RECENT, _NUM_REFERENCE = 12, 288
MAX_FROZEN_SECONDS = 7 * 86400
"""Event time after which the user of a frozen reference should let it move."""
_ID_BITS = 4
_NUM_ID_BUCKETS = 1 << _ID_BITS
_MISSING, _UNSEEN = _NUM_ID_BUCKETS, _NUM_ID_BUCKETS + 1
# 2**64 / golden ratio, as an int64: the upper bits of a product are a hash (Knuth, TAOCP 3, section 6.4).
_MULTIPLIER = -7046029254386353131
_MIN_VALUES = 1000
"""Values in either window below which the index is mostly chance: about 17 / 1000 for each window without
any drift (chi-square with one degree of freedom less than the buckets, divided by the number of values).
"""
_MAX_PENDING = 1 << 14
_MAX_SAMPLES = 20_000
"""Samples that a rank counts in 5 minutes: more would cost time, and the shares would hardly differ."""
_Inputs = tuple[KeyedJaggedTensor, Tensor, Tensor]
"""IDs, dense values and event times of a batch; see `FeatureDrift.add`."""
_Slots = dict[int, Tensor]
"""Counts of values by slot number, over the buckets of all features, int64."""


class IdValues(NamedTuple):
    """Values of an ID feature.

    Attributes:
        name: feature name, which is a key of the batch.
        missing: ID of missing values; None: unknown. A sample without an ID is missing, too.
        unseen: IDs below the second number, and at least the first, stand for values outside a vocabulary.
    """

    name: str
    missing: int | None = None
    unseen: tuple[int, int] = (0, 0)


class NumberValues(NamedTuple):
    """Values of a column of the dense values.

    Attributes:
        name: feature name.
        edges: edges of the buckets, ascending; empty: powers of two and their negatives.
        missing: dense value of missing values; None: unknown.
    """

    name: str
    edges: tuple[float, ...] = ()
    missing: float | None = None


class Drift(NamedTuple):
    """Drift of a feature.

    Attributes:
        psi: population stability index.
        missing: share of missing values in the last hour, and before.
        unseen: share of values outside the vocabulary in the last hour, and before.
    """

    psi: float
    missing: tuple[float, float]
    unseen: tuple[float, float]


class FeatureDrift:
    """Windows of feature values on a stream, with bounded memory: 8 bytes per bucket and 5 minutes of a day.

    IDs are counted in 16 buckets by their hash, numbers between fitted edges. Missing values and those
    outside a vocabulary have buckets of their own. The windows end with the newest event on any rank.

    Args:
        ids: ID features.
        numbers: columns of the dense values, in order.

    Example::

        drift = FeatureDrift([], [NumberValues("price")])
        assert drift.compute(lambda value: [value]) == {}  # no values yet
    """

    def __init__(self, ids: Sequence[IdValues], numbers: Sequence[NumberValues]) -> None:
        self._ids, self._numbers = list(ids), list(numbers)
        grid = [2.0**power for power in range(-8, 17)]
        powers = [-edge for edge in reversed(grid)] + grid
        self._edges = [torch.tensor(list(number.edges) or powers) for number in numbers]
        # Number of buckets per feature. The last one of a number has missing values.
        self._sizes = [_NUM_ID_BUCKETS + 2] * len(ids) + [len(edges) + 2 for edges in self._edges]
        # Counts over all ranks until the last `compute`, and this rank's counts since.
        self._slots: _Slots = {}
        self._local: _Slots = {}
        # Counts of the frozen reference over the buckets, int64, and the newest slot when it was frozen.
        self._frozen: tuple[Tensor, int] | None = None
        # Batches of this rank that are in no slot yet, and their number of samples.
        self._pending: list[_Inputs] = []
        self._num_pending = 0
        # Slot of the last batch of this rank, and how many of its samples were counted.
        self._last, self._num_counted = 0, 0

    def add(self, sparse: KeyedJaggedTensor, dense: Tensor, times: Tensor) -> None:
        """Add samples of this rank. Not collective. At most `_MAX_SAMPLES` in 5 minutes are counted.

        Args:
            sparse: IDs of B samples.
            dense: dense values, [B, numbers].
            times: event times in microseconds since 1970, int64 [n], n <= B; samples after the first n are
                padding, with empty bags.
        """
        if not len(times):
            return
        slot = int(self._slots_of(times[-1]))
        if slot != self._last:
            self._last, self._num_counted = slot, 0
        if self._num_counted >= _MAX_SAMPLES:
            return
        self._num_counted += len(times)
        self._pending.append((sparse, dense, times))
        self._num_pending += len(times)
        if self._num_pending >= _MAX_PENDING:
            self._flush()

    def compute(self, collect: Callable[[Any], list[Any]]) -> dict[str, Drift]:
        """Compute the drift per feature over all ranks, for samples until now. Collective.

        The population stability index is the sum of (p - q) ln(p / q) over buckets, where p and q are the
        shares of values in both windows (Siddiqi, Credit Risk Scorecards, 2006). By the usual rule, the
        drift is small below 0.1, and large above 0.25. Half a value is added to each bucket,
        so that empty ones have a share above 0.

        Args:
            collect: function that returns the values of all ranks, such as ``Ranks.collect``.

        Returns:
            Drift by feature name, equal on all ranks. Features with too few values are missing, and all
            while the reference is shorter than an hour.
        """
        self._flush()
        local, self._local = self._local, {}
        for part in collect(local):
            for slot, counts in part.items():
                self._slots[slot] = self._slots[slot] + counts if slot in self._slots else counts
        _drop_old(self._slots)
        newest = max(self._slots, default=0)
        recent, before = self._windows()
        if self._frozen is not None:
            before = self._frozen[0]
        elif min(self._slots, default=newest) > newest - 2 * _NUM_RECENT + 1:
            return {}
        drifts = {}
        names = [feature.name for feature in self._ids] + [number.name for number in self._numbers]
        windows = zip(names, recent.split(self._sizes), before.split(self._sizes), strict=True)
        for position, (name, now, earlier) in enumerate(windows):
            if min(int(now.sum()), int(earlier.sum())) >= _MIN_VALUES:
                num_special = 2 if position < len(self._ids) else 1
                drifts[name] = _drift(now.double(), earlier.double(), num_special)
        return drifts

    def _windows(self) -> tuple[Tensor, Tensor]:
        """Return the counts of the last hour, and of the day before, over the buckets of all features."""
        newest, zeros = max(self._slots, default=0), torch.zeros(sum(self._sizes), dtype=torch.int64)
        recent, before = zeros.clone(), zeros.clone()
        for slot, counts in self._slots.items():
            window = recent if slot > newest - _NUM_RECENT else before
            window += counts
        return recent, before

    @property
    def frozen_seconds(self) -> float:
        """Event time since `freeze`; 0 if the reference is not frozen."""
        return 0.0 if self._frozen is None else _SLOT_SECONDS * (max(self._slots) - self._frozen[1])

    def freeze(self) -> None:
        """Keep the reference of the last `compute` until `unfreeze`, unless it is frozen. Not collective."""
        if self._frozen is None:
            self._frozen = self._windows()[1], max(self._slots)

    def unfreeze(self, *, accept: bool = False) -> None:
        """Let the reference move again, if it is frozen. Not collective.

        Args:
            accept: whether the values since `freeze` become part of the reference. If not, the frozen one
                stays for a day, and only the values of the last hour are added to it as they get older.
        """
        if self._frozen is not None and not accept:
            newest = max(self._slots)
            recent = {slot: counts for slot, counts in self._slots.items() if slot > newest - _NUM_RECENT}
            # In the newest slot that makes the reference long enough.
            self._slots = {newest - 2 * _NUM_RECENT + 1: self._frozen[0], **recent}
        self._frozen = None

    def state_dict(self) -> dict[str, Any]:
        """Return the counts until the last `compute`, equal on all ranks."""
        slots = sorted(self._slots)
        counts = [self._slots[slot] for slot in slots]
        return {
            "buckets": [[feature.name, size] for feature, size in self._features()],
            "slots": slots,
            "counts": torch.stack(counts).int() if counts else torch.zeros(0, dtype=torch.int32),
            **({} if self._frozen is None else {"frozen": self._frozen[0], "frozen_slot": self._frozen[1]}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counts, on any number of ranks, unless they are of other features or buckets."""
        self._local, self._pending, self._num_pending, self._frozen = {}, [], 0, None
        if state["buckets"] == [[feature.name, size] for feature, size in self._features()]:
            self._slots = dict(zip(state["slots"], state["counts"].long(), strict=True))
            if "frozen" in state:
                self._frozen = state["frozen"], state["frozen_slot"]

    def _features(self) -> list[tuple[IdValues | NumberValues, int]]:
        """Return the features with their number of buckets."""
        return list(zip((*self._ids, *self._numbers), self._sizes, strict=True))

    def _flush(self) -> None:
        """Add the pending samples to this rank's slots."""
        pending, self._pending, self._num_pending = self._pending, [], 0
        if not pending:
            return
        slots, index = self._slots_of(torch.cat([times for *_, times in pending])).unique(return_inverse=True)
        counts = [
            *self._count_ids(pending, index, len(slots)),
            *self._count_numbers(pending, index, len(slots)),
        ]
        newest = max(max(self._slots, default=0), int(slots.max()))
        for slot, row in zip(slots.tolist(), torch.cat(counts, dim=1), strict=True):
            if slot > newest - _NUM_RECENT - _NUM_REFERENCE:
                self._local[slot] = self._local[slot] + row if slot in self._local else row
        _drop_old(self._local)

    def _slots_of(self, times: Tensor) -> Tensor:
        """Return the slot of each event time, int64 [n]."""
        return times // (_SLOT_SECONDS * 1_000_000)

    def _count_ids(self, pending: Sequence[_Inputs], index: Tensor, num_slots: int) -> Iterator[Tensor]:
        """Yield the counts [slots, buckets] for each ID feature.

        Args:
            index: index of each sample's slot, int64 [n].
        """
        keys = pending[0][0].keys()
        # Lengths [keys, n] without padding, whose bags are empty.
        lengths = torch.cat(
            [
                sparse.lengths().view(len(keys), -1)[:, : len(times)].cpu().long()
                for sparse, _, times in pending
            ],
            dim=1,
        )
        # Values and end per key, by batch.
        batches = [(sparse.values().cpu(), sparse.offset_per_key()) for sparse, *_ in pending]
        for feature in self._ids:
            key = keys.index(feature.name)
            values = torch.cat([values[ends[key] : ends[key + 1]] for values, ends in batches]).long()
            buckets = (values * _MULTIPLIER >> (64 - _ID_BITS)).bitwise_and_(_NUM_ID_BUCKETS - 1)
            if feature.unseen[0] < feature.unseen[1]:
                is_unseen = (values >= feature.unseen[0]) & (values < feature.unseen[1])
                buckets.masked_fill_(is_unseen, _UNSEEN)
            if feature.missing is not None:
                buckets.masked_fill_(values == feature.missing, _MISSING)
            if num_slots > 1:
                buckets += (_NUM_ID_BUCKETS + 2) * index.repeat_interleave(lengths[key])
            counts = _count(buckets, num_slots, _NUM_ID_BUCKETS + 2)
            counts[:, _MISSING] += torch.bincount(index[lengths[key] == 0], minlength=num_slots)
            yield counts

    def _count_numbers(self, pending: Sequence[_Inputs], index: Tensor, num_slots: int) -> Iterator[Tensor]:
        """Yield the counts [slots, buckets] for each column of the dense values; see `_count_ids`."""
        if not self._numbers:
            return
        columns = torch.cat([dense[: len(times)].cpu() for _, dense, times in pending]).T.contiguous()
        for number, edges, values in zip(self._numbers, self._edges, columns, strict=True):
            buckets = torch.bucketize(values, edges, right=True)
            if number.missing is not None:
                # In the precision of the values.
                is_missing = values == torch.tensor(number.missing, dtype=values.dtype)
                buckets.masked_fill_(is_missing, len(edges) + 1)
            yield _count(buckets + index * (len(edges) + 2), num_slots, len(edges) + 2)


def _count(cells: Tensor, num_slots: int, num_buckets: int) -> Tensor:
    """Return how often each bucket occurs per slot, int64 [slots, buckets]; a cell has both numbers."""
    return torch.bincount(cells, minlength=num_slots * num_buckets).view(num_slots, num_buckets)


def population_stability(now: Tensor, before: Tensor) -> float:
    """Return the population stability index from the counts per bucket in two windows, float64 [buckets]."""
    p, q = ((counts + 0.5) / (counts.sum() + 0.5 * len(counts)) for counts in (now, before))
    return float(((p - q) * (p / q).log()).sum())


def _drift(now: Tensor, before: Tensor, num_special: int) -> Drift:
    """Return the drift of a feature."""
    shares = [(now[-number] / now.sum(), before[-number] / before.sum()) for number in (num_special, 1)]
    missing, unseen = ((float(last), float(earlier)) for last, earlier in shares)
    return Drift(population_stability(now, before), missing, unseen if num_special == 2 else (0.0, 0.0))


def _drop_old(slots: _Slots) -> None:
    """Drop the slots before the reference."""
    first = max(slots, default=0) - _NUM_RECENT - _NUM_REFERENCE + 1
    for slot in [slot for slot in slots if slot < first]:
        del slots[slot]
