"""Hashed table options: limits, admission and eviction policies; and the key intervals used in plans.

[Note: when IDs are admitted and evicted]

Admission and eviction happen once per table update, at the same moment under any plan: the
IDs of the whole batch, from all ranks and replicas, are counted, then IDs are admitted and rows evicted. So
the live IDs depend on the batches alone. Until the update, a new ID reads its initial row at a slot
pinned to its batch; a batch without an update leaves nothing behind.

Scores and counts are integers, or floating-point values computed on a single rank per row, so the
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

# Shape legend: N rows.

_WORD = (1 << 63) - 1
_USE = 1 << 16  # LFU count increment per read: the unit is 2^-16 reads
INDEX_BYTES = 16
"""Maximum bytes per row in the hash index."""


class Clock(NamedTuple):
    """Update time, for eviction policies."""

    step: int
    """The table's update number."""
    seconds: int
    """Latest event time set on any rank."""


class RowsToJudge(NamedTuple):
    """Some table rows on a rank, as input to a score.

    A policy that reads no rows gets only policy parts.
    """

    ids: Tensor
    """int64 [N]."""
    parts: Mapping[str, Tensor]
    """``weight`` [N, D], optimizer state and policy parts, by name."""


class Eviction(ABC):
    """Policy selecting the rows to evict when a table is full.

    The row with the lowest score is evicted first; among equal scores, the row with the smallest key.
    """

    parts: tuple[RowPart, ...] = ()
    """Values stored by the policy per row."""
    needs_rows = False
    """Whether the score reads weights or optimizer state."""
    needs_whole_rows = False
    """Whether the score needs whole rows on a single rank, so plans cannot split columns."""

    @abstractmethod
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record use of the rows at some slots.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64; may repeat.
            clock: update time.
            fills: queue for writing the same value to many rows. It is run together with writes to
                other tables, after all policies have been called.
        """

    @abstractmethod
    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the score per row, int32 or int64 [N]. The lowest is evicted first."""

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the score for a row used now. None if a search cannot be reused for later evictions.

        Return a score only if a row's score changes by use alone, and is at least this score after a
        later use. See [Note: the order of eviction] in eviction.py.
        """
        return None

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows to evict although the table is not full, bool by slot. None: no row."""
        return None


@dataclass(frozen=True)
class LRU(Eviction):
    """Evict the rows whose last update is the longest ago (least recently used)."""

    parts = (RowPart("last", torch.int32, True),)

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the update number.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64; may repeat.
            clock: update time.
            fills: queue for the write.
        """
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the last update number per row."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the update number."""
        return clock.step


@dataclass(frozen=True)
class LFU(Eviction):
    """Evict the rows that are read least often (least frequently used).

    Args:
        half_life: updates after which a read counts half. All counts are halved at multiples of
            ``half_life``. None: no decay.
    """

    half_life: int | None = None
    parts = (RowPart("uses", torch.int64, True), RowPart("last", torch.int32, True))

    def __post_init__(self) -> None:
        if self.half_life is not None and (not isinstance(self.half_life, int) or self.half_life < 1):
            raise ValueError(f"LFU: half_life must be an integer >= 1 or None, got {self.half_life!r}.")

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Apply the halvings since the last read per row, and add this update's reads.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64, one per read.
            clock: update time.
            fills: queue for the write.
        """
        uses, last = parts["uses"], parts["last"]
        # Halve before adding: repeated slots write the same halved value.
        uses[slots] = uses[slots] >> self._halvings(last[slots], clock)
        uses.index_add_(0, slots, torch.full_like(slots, _USE))
        fills.add(last, slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the decayed read count per row, in units of 2^-16."""
        return rows.parts["uses"] >> self._halvings(rows.parts["last"], clock)

    def _halvings(self, last: Tensor, clock: Clock) -> Tensor:
        """Return how often a count is halved between the row's last update and now."""
        if self.half_life is None:
            return torch.zeros_like(last, dtype=torch.int64)
        return (clock.step // self.half_life - last.long() // self.half_life).clamp_(max=62)


@dataclass(frozen=True, kw_only=True)
class TTL(Eviction):
    """Evict rows not updated for some time (time to live).

    A table checks for such rows sixteen times within that time. If it is full earlier, the least recently
    updated rows are evicted.

    Args:
        steps: the time in table updates.
        seconds: the event time in seconds, see ``meshrec.tables.set_event_time``.
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
            slots: int64; may repeat.
            clock: update time.
            fills: queue for the write.
        """
        fills.add(parts["last"], slots, self._now(clock))

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the last update time per row."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the update number, or the event time."""
        return self._now(clock)

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows were not updated within the time to live."""
        if self.steps is not None and clock.step % max(1, self.steps // 16):
            return None
        return parts["last"] <= self._now(clock) - (self.steps or self.seconds or 0)

    def _now(self, clock: Clock) -> int:
        """Return the present time in the policy's unit: updates or seconds."""
        return clock.step if self.steps is not None else clock.seconds


@dataclass(frozen=True)
class LowestNorm(Eviction):
    """Evict the rows with the smallest Euclidean norm."""

    needs_rows = True

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        pass

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the squared norm per row in units of 2^-40, as an integer.

        Integer sums do not depend on the order.
        """
        squares = rows.parts["weight"].double().square_().mul_(2.0**40)
        # Integers also make column shards' partial sums exact.
        return squares.clamp_(max=2.0**52).round_().long().sum(1)


@dataclass(frozen=True)
class Score(Eviction):
    """Evict the rows with the lowest values of a user function.

    Args:
        score: maps ``RowsToJudge`` to a value per row, floating-point or integer [N]. It must treat all rows
            alike, and must not depend on the other rows it sees: every rank calls it with local rows.
    """

    score: Callable[[RowsToJudge], Tensor]
    parts = (RowPart("last", torch.int32, True),)
    needs_rows = True
    needs_whole_rows = True

    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the update number, which the function can read as ``rows.parts["last"]``.

        Args:
            parts: the policy's parts by name, indexed by slot.
            slots: int64; may repeat.
            clock: update time.
            fills: queue for the write.
        """
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the function's values as int64 in the same order.

        Raises:
            ValueError: the function does not return one value per row, or returns NaN.
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
    """Policy selecting the new IDs to get a row."""

    @abstractmethod
    def check(self, max_rows: int) -> None:
        """Raise ValueError if the policy does not fit a table with this row limit."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Admit an ID when it has occurred ``k`` times in training.

    Counts are exact: the table has a counter (about 24 bytes) per waiting ID, and the number of counters
    is not limited. ``MinCountSketch`` has a limit.
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
    """Admit an ID after about ``k`` occurrences in training, counted in a fixed-size sketch.

    Args:
        k: occurrences, at most 255.
        bytes: memory for the count-min sketch.

    An ID is never admitted late. It is admitted early if other IDs have filled all the ID's cells;
    ``TableCounts.early`` estimates how often. A cell is a byte. Every plan row has ``bytes // max_rows``
    cells, counting only IDs in the row's key interval, so counts do not depend on the plan.
    """

    k: int
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= 255:
            raise ValueError(f"MinCountSketch: k must be an integer in [1, 255], got {self.k!r}.")

    def check(self, max_rows: int) -> None:
        """Raise ValueError if the sketch has fewer than 8 cells per row."""
        if not isinstance(self.bytes, int) or self.bytes < 8 * max_rows:
            raise ValueError(
                f"MinCountSketch: bytes must be an integer of at least 8 for each of {max_rows:,} rows, "
                f"{8 * max_rows:,}; got {self.bytes!r}."
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Admit an ID with probability ``p`` at every occurrence in training.

    The decision is a hash over seed, ID, update number, and the occurrence number within the update.
    """

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or not 0 < self.p <= 1:
            raise ValueError(f"Probability: p must lie in (0, 1], got {self.p!r}.")

    @override
    def check(self, max_rows: int) -> None:
        pass

    def admits(self, keys: Tensor, counts: Tensor, step: int, seed: int) -> Tensor:
        """Return which IDs to admit, bool [N].

        Args:
            keys: ID keys, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
            seed: table seed.
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
    """Table option for IDs without a known range: all int64 values are valid IDs, and none is reserved.

    Args:
        max_rows: row limit, over all ranks.
        max_bytes: the same limit, in bytes for rows and index (16 per row), without optimizer state.
        admit: ``MinCount``, ``MinCountSketch`` or ``Probability``; None: an ID is admitted when it is first
            trained. An ID without a row reads its initial row and is not trained.
        evict: ``LRU``, ``LFU``, ``TTL``, ``LowestNorm`` or ``Score``; None: a full table is an error.
        seed: seed for the ID mix, initial rows, and admission.

    Raises:
        ValueError: a value is not allowed, or the limits contradict each other.
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
    def counts_waiting_ids(self) -> bool:
        """Whether waiting IDs' occurrences are counted."""
        return isinstance(self.admit, (MinCount, MinCountSketch))

    def rows(self, row_bytes: int) -> int:
        """Return the row limit, given the bytes per row in memory.

        Raises:
            ValueError: ``max_bytes`` is too small for a row.
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
"""Smallest key."""
ALL_KEYS: Span = (FIRST_KEY, -FIRST_KEY)
"""Interval of all keys. The end does not fit int64."""


def key_at(row: int, max_rows: int) -> int:
    """Return a plan row's first key: the smallest u with ``u * max_rows >= row * 2^64``, minus 2^63."""
    return -(-(row << 64) // max_rows) + FIRST_KEY


def bucket_of(keys: Tensor, max_rows: int) -> Tensor:
    """Return the plan row (key bucket) per key, int64 [N]. ``max_rows`` must be below 2^31."""
    # A 96-bit product in two halves, because int64 would overflow.
    upper, lower = (keys >> 32) + (1 << 31), keys & ((1 << 32) - 1)
    return (upper * max_rows + ((lower * max_rows) >> 32)) >> 32


def first_keys(rows: Tensor, max_rows: int) -> Tensor:
    """Return the first key per plan row, int64 [N]; see ``key_at``. ``max_rows`` must be below 2^31."""
    whole, remainder = divmod(1 << 64, max_rows)
    whole = (whole - FIRST_KEY) % (1 << 64) + FIRST_KEY  # as int64, whose product wraps
    return rows * whole - (-(rows * remainder) // max_rows) + FIRST_KEY
