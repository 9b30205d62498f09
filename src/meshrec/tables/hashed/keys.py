"""Hashed-table keys: limits, admission and eviction policies, and the key intervals that plans cut.

[Note: when IDs are admitted and evicted]

Admission and eviction happen once per table update, at a moment independent of the plan: the whole batch's
IDs, from all ranks and replicas, are counted, then IDs are admitted and rows evicted. So the live IDs are a
function of the batches alone. Until the update, a new ID reads its initial row at a slot pinned to its batch;
a batch without an update leaves nothing behind.

Scores and counts are integers, or floating-point values that a single rank computes for a row, so the
ranks in any plan compare the same values.

[Note: the keys of hashed tables]

An ID's key is its seeded mix (``ops.index.mix``), a permutation of all 2^64 values, in signed order: the
router compares int64. To a plan, a table with at most ``max_rows`` rows looks like a fixed table with that
many: "row" r in a plan is the key bucket from ``key_at(r)`` on, and ``max_rows`` nearly equal buckets cover
the key space. So builders, planner, checks and plan files are the same for both, and a shard's expected
memory is as the plan states. Rectangles at run time are key intervals. The last interval's end, 2^63, does
not fit int64: in the router's tensors, an end of 2^63 - 1 stands for no end.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from meshrec.ops.index import Fills, mix
from meshrec.tables.table import RowPart, Span

# N: rows

_WORD = (1 << 63) - 1
_USE = 1 << 16
INDEX_BYTES = 16
"""Maximum bytes per row in the index."""


class Clock(NamedTuple):
    """Update time for eviction policies."""

    step: int
    """The table's update number."""
    seconds: int
    """Latest event time set on any rank."""


class RowsToJudge(NamedTuple):
    """A table's rows on a rank, for a score. A policy that needs no rows gets only its own parts."""

    ids: Tensor
    """int64 [N]."""
    parts: Mapping[str, Tensor]
    """``weight`` [N, D], optimizer state and the policy's own parts, by name."""


class Eviction(ABC):
    """Policy to select rows to evict when a table is full.

    The row with the lowest score is evicted first; among equal scores, the row with the smallest key.
    """

    parts: tuple[RowPart, ...] = ()
    """Per-row values stored by the policy."""
    needs_rows = False
    """Whether the score reads rows."""
    needs_whole_rows = False
    """Whether the score reads whole rows on a single rank, so plans cannot cut their columns."""

    @abstractmethod
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record that the rows at ``slots`` (possibly repeated) were used.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64.
            clock: the time.
            fills: collects values that are equal for all rows: they are written with other tables' values,
                once all policies have been called.
        """

    @abstractmethod
    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return row scores, int32 or int64 [N]."""

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the score for rows used now, or None.

        Return a score only if scores change by use alone, and never to less than this score later. See [Note:
        the order of eviction] in eviction.py.
        """
        return None

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows to evict even if the table is not full, bool by slot; None: no row."""
        return None


@dataclass(frozen=True)
class LRU(Eviction):
    """Evict the least recently updated rows."""

    parts = (RowPart("last", torch.int32, True),)

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the update number.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64.
            clock: the time.
            fills: collects the writes.
        """
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the last updates' numbers."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the update number."""
        return clock.step


@dataclass(frozen=True)
class LFU(Eviction):
    """Evict the least frequently read rows.

    Args:
        half_life: number of updates after which a read counts half. All counts are halved at multiples of
            ``half_life``. None: no decay.
    """

    half_life: int | None = None
    parts = (RowPart("uses", torch.int64, True), RowPart("last", torch.int32, True))

    def __post_init__(self) -> None:
        if self.half_life is not None and (not isinstance(self.half_life, int) or self.half_life < 1):
            raise ValueError(f"LFU: half_life must be an integer >= 1 or None, got {self.half_life!r}.")

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Apply the halvings since each row's last read, and add these reads.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64.
            clock: the time.
            fills: collects the writes.
        """
        uses, last = parts["uses"], parts["last"]
        # Halve before adding: repeated slots write the same halved value.
        uses[slots] = uses[slots] >> self._halvings(last[slots], clock)
        uses.index_add_(0, slots, torch.full_like(slots, _USE))
        fills.add(last, slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the decayed counts, in units of 2^-16 reads."""
        return rows.parts["uses"] >> self._halvings(rows.parts["last"], clock)

    def _halvings(self, last: Tensor, clock: Clock) -> Tensor:
        if self.half_life is None:
            return torch.zeros_like(last, dtype=torch.int64)
        return (clock.step // self.half_life - last.long() // self.half_life).clamp_(max=62)


@dataclass(frozen=True, kw_only=True)
class TTL(Eviction):
    """Evict rows that were not updated for a given time.

    A table checks for such rows sixteen times within that time. If it is full before, the least recently
    updated rows are evicted.

    Args:
        steps: the time as a number of table updates.
        seconds: the time in seconds of event time, see ``meshrec.tables.set_event_time``.
    """

    steps: int | None = None
    seconds: int | None = None
    parts = (RowPart("last", torch.int64, True),)

    def __post_init__(self) -> None:
        given = [limit for limit in (self.steps, self.seconds) if limit is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
            raise ValueError(
                f"TTL takes either steps or seconds, an integer >= 1; got steps={self.steps!r}, "
                f"seconds={self.seconds!r}."
            )

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the update number, or the event time.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64.
            clock: the time.
            fills: collects the writes.
        """
        fills.add(parts["last"], slots, self._now(clock))

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the last updates' times."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the update number, or the event time."""
        return self._now(clock)

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows were not updated within the time."""
        if self.steps is not None and clock.step % max(1, self.steps // 16):
            return None
        return parts["last"] <= self._now(clock) - (self.steps or self.seconds or 0)

    def _now(self, clock: Clock) -> int:
        return clock.step if self.steps is not None else clock.seconds


@dataclass(frozen=True)
class LowestNorm(Eviction):
    """Evict the rows with the smallest Euclidean norm."""

    needs_rows = True

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        pass

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return squared norms in units of 2^-40, as integers, whose sum does not depend on the order."""
        squares = rows.parts["weight"].double().square_().mul_(2.0**40)
        # Integers also make column shards' partial sums exact.
        return squares.clamp_(max=2.0**52).round_().long().sum(1)


@dataclass(frozen=True)
class Score(Eviction):
    """Evict the rows with the lowest score under a user function.

    Args:
        score: maps ``RowsToJudge`` to row values, floating-point or integer [N]. It must treat all rows
            alike, and must not depend on which other rows it sees: every rank calls it with its own rows.
    """

    score: Callable[[RowsToJudge], Tensor]
    parts = (RowPart("last", torch.int32, True),)
    needs_rows = True
    needs_whole_rows = True

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the update number, which the score reads as ``rows.parts["last"]``.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64.
            clock: the time.
            fills: collects the writes.
        """
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the scores as integers in the same order.

        Raises:
            ValueError: the function returns anything but a number per row.
        """
        scores = self.score(rows)
        if not isinstance(scores, Tensor) or scores.shape != rows.ids.shape or bool(scores.isnan().any()):
            got = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(
                f"the score of an eviction policy must be a tensor of {len(rows.ids)} numbers, none of them "
                f"NaN; got {got}."
            )
        if not scores.is_floating_point():
            return scores.long()
        bits = (scores.double() + 0.0).view(torch.int64)  # no -0.0
        # IEEE bits of negative values descend, so flip them to keep the order.
        return torch.where(bits < 0, bits ^ _WORD, bits)


class Admission(ABC):
    """Policy to select which new IDs get a row."""

    @abstractmethod
    def check(self, max_rows: int) -> None:
        """Raise ValueError if a table with this many rows cannot have this policy."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Admit an ID after ``k`` reads in training.

    Counts are exact: the table stores a count for every waiting ID, about 24 bytes each, without a bound.
    ``MinCountSketch`` has a bound.
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise ValueError(f"MinCount: k must be an integer >= 1, got {self.k!r}.")

    @override
    def check(self, max_rows: int) -> None:
        pass


@dataclass(frozen=True)
class MinCountSketch(Admission):
    """Admit an ID after about ``k`` reads, counted in a count-min sketch with ``bytes`` bytes.

    An ID is never admitted late. It may be admitted early if other IDs fell on all of its cells;
    ``TableCounts.early`` estimates how often. A cell is a byte, and a table row has ``bytes // max_rows``
    cells, which count the IDs in that key interval, so counts do not depend on the plan.
    """

    k: int
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= 255:
            raise ValueError(f"MinCountSketch: k must be an integer in [1, 255], got {self.k!r}.")

    def check(self, max_rows: int) -> None:
        """Raise ValueError if there is less than a word of cells per row."""
        if not isinstance(self.bytes, int) or self.bytes < 8 * max_rows:
            raise ValueError(
                f"MinCountSketch: bytes must be an integer of at least 8 for each of {max_rows:,} rows, "
                f"{8 * max_rows:,}; got {self.bytes!r}."
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Admit an ID with probability ``p`` at every read in training.

    The decision is a hash over seed, ID, the table's update number, and the read's number in that update.
    """

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or not 0 < self.p <= 1:
            raise ValueError(f"Probability: p must lie in (0, 1], got {self.p!r}.")

    @override
    def check(self, max_rows: int) -> None:
        pass

    def admits(self, keys: Tensor, counts: Tensor, step: int, seed: int) -> Tensor:
        """Return which IDs are admitted, bool [N].

        Args:
            keys: ID keys, int64 [N].
            counts: reads in this update, int64 [N].
            step: update number.
            seed: the table's seed.
        """
        admitted = torch.zeros_like(keys, dtype=torch.bool)
        below = math.ceil(self.p * 2.0**53)
        for read in range(int(counts.max()) if len(counts) else 0):
            waiting = (~admitted & (counts > read)).nonzero()[:, 0]
            drawn = mix(mix(keys[waiting], seed) ^ ((step << 20) + read), seed + 1)
            admitted[waiting] = ((drawn >> 11) & ((1 << 53) - 1)) < below
        return admitted


@dataclass(frozen=True, kw_only=True)
class HashedKeys:
    """Table keys for IDs without a known range: any int64 is an ID, and none is reserved.

    Args:
        max_rows: maximum number of rows, over all ranks.
        max_bytes: the same limit as bytes for rows and index (16 per row), without optimizer state.
        admit: ``MinCount``, ``MinCountSketch`` or ``Probability``; None: every ID is admitted when it is
            first trained. A rejected ID reads its initial row and is not trained.
        evict: ``LRU``, ``LFU``, ``TTL``, ``LowestNorm`` or ``Score``; None: a full table is an error.
        seed: seed for the ID mix, initial rows, and admission.

    Raises:
        ValueError: a value is not allowed, or policies contradict.
    """

    max_rows: int | None = None
    max_bytes: int | None = None
    admit: Admission | None = None
    evict: Eviction | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if (self.max_rows is None) == (self.max_bytes is None):
            raise ValueError(
                f"Hashed takes either max_rows or max_bytes, got max_rows={self.max_rows!r} and "
                f"max_bytes={self.max_bytes!r}. Give one of them."
            )
        for name in ("max_rows", "max_bytes"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or not 1 <= value < 1 << 48):
                raise ValueError(f"Hashed: {name} must be an integer in [1, 2^48), got {value!r}.")
        if not isinstance(self.seed, int) or not 0 <= self.seed < 1 << 62:
            raise ValueError(f"Hashed: seed must be an integer in [0, 2^62), got {self.seed!r}.")
        for name, kind in (("admit", Admission), ("evict", Eviction)):
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                policies = ", ".join(sorted(policy.__name__ for policy in kind.__subclasses__()))
                raise ValueError(f"Hashed: {name} must be None or one of {policies}; got {value!r}.")
        if self.admit is not None and self.max_rows is not None:
            self.admit.check(self.max_rows)

    @property
    def counts(self) -> bool:
        """Whether IDs waiting for admission are counted."""
        return isinstance(self.admit, (MinCount, MinCountSketch))

    def rows(self, row_bytes: int) -> int:
        """Return the maximum number of rows, given bytes per row.

        Raises:
            ValueError: ``max_bytes`` has no room for a row.
        """
        if self.max_rows is not None:
            return self.max_rows
        assert self.max_bytes is not None
        num_rows = self.max_bytes // (row_bytes + INDEX_BYTES)
        if num_rows < 1:
            raise ValueError(
                f"Hashed: max_bytes={self.max_bytes:,} has no room for a row of {row_bytes} bytes and its "
                f"{INDEX_BYTES} bytes in the index. Raise max_bytes."
            )
        if self.admit is not None:
            self.admit.check(num_rows)
        return num_rows


Hashed = HashedKeys
"""``meshrec.Hashed``. (A feature class in ``meshrec.data`` has the same name.)"""


FIRST_KEY = -(1 << 63)
ALL_KEYS: Span = (FIRST_KEY, -FIRST_KEY)
"""Interval with all keys."""


def key_at(row: int, max_rows: int) -> int:
    """Return the first key in a plan row: the smallest u with ``u * max_rows >= row * 2^64``, minus 2^63."""
    return -(-(row << 64) // max_rows) + FIRST_KEY


def bucket_of(keys: Tensor, max_rows: int) -> Tensor:
    """Return plan rows by key, int64 [N]; ``max_rows`` must be below 2^31."""
    # A 96-bit product in two halves, because int64 would overflow.
    upper, lower = (keys >> 32) + (1 << 31), keys & ((1 << 32) - 1)
    return (upper * max_rows + ((lower * max_rows) >> 32)) >> 32


def first_keys(rows: Tensor, max_rows: int) -> Tensor:
    """Return ``key_at`` by row, int64 [N]; ``max_rows`` must be below 2^31."""
    whole, remainder = divmod(1 << 64, max_rows)
    whole = (whole - FIRST_KEY) % (1 << 64) + FIRST_KEY  # as int64, whose product wraps
    return rows * whole - (-(rows * remainder) // max_rows) + FIRST_KEY
