"""Options for hashed tables: row limit, admission and eviction policies; and the key intervals used in plans.

An *admission* policy decides which new IDs get a row. An *eviction* policy decides which rows a full table
removes. The policies are small dataclasses that users pass to ``meshrec.Hashed``.

[Note: when IDs are admitted and evicted]

Admission and eviction happen once per table update, at the same moment under any sharding plan. The IDs in
the whole batch, from all ranks and replicas, are counted; then IDs are admitted and rows evicted. So the live
IDs depend only on the batches, not on the plan. Until the update, a new ID reads its initial row at a slot
that is pinned to the batch. A batch without an update leaves nothing behind.

Scores and counts are integers, or floating-point values that a single rank computes per row. So the ranks
compare the same values under any plan.

[Note: the keys of hashed tables]

The *key* of an ID is a seeded hash (``ops.index.mix``). It is a permutation of all 2^64 values, so keys are
distinct and can be turned back into IDs. Keys are ordered as signed int64, because the router compares int64.

To a sharding plan, a table with at most ``max_rows`` rows looks like a fixed table with ``max_rows`` rows.
"Row" r in the plan is a *key bucket*: the keys from ``key_at(r)`` up to ``key_at(r + 1)``. The ``max_rows``
buckets are nearly equal and cover all keys. So builders, planner, checks and plan files are the same for
fixed and hashed tables, and the expected memory of a shard is as the plan states.

At run time a shard is a key interval. The end of the last interval, 2^63, does not fit int64; in the router's
tensors, the end 2^63 - 1 stands for no end.
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

# Sign mask: xor with it flips all bits of an int64 except the sign. Also the greatest int64.
_WORD = (1 << 63) - 1
# Amount by which a read increments an LFU count, so halved counts keep 16 fractional bits.
_USE = 1 << 16
INDEX_BYTES = 16
"""Greatest number of bytes that the hash index takes per row."""


class Clock(NamedTuple):
    """Time of a table update, as an eviction policy sees it."""

    step: int
    """Number of the update, counted per table."""
    seconds: int
    """Latest event time that any rank has set, in seconds; 0 if no policy needs it."""


class RowsToJudge(NamedTuple):
    """Table rows on a rank for which an eviction policy computes scores. N rows.

    A policy with ``needs_rows`` False gets only policy parts, for all slots, and no IDs.
    """

    ids: Tensor
    """ID per row, int64 [N]."""
    parts: Mapping[str, Tensor]
    """Values by name, one row per ID: ``weight`` [N, D], optimizer state, and policy parts."""


class Eviction(ABC):
    """Policy that selects the rows to evict when a table is full.

    A policy gives every row a score. The row with the lowest score is evicted first; among equal scores, the
    row with the smallest key.
    """

    parts: tuple[RowPart, ...] = ()
    """Values that the policy stores per row (policy parts), such as the time of the last use."""
    needs_rows = False
    """Whether the scores depend on weights or optimizer state."""
    needs_whole_rows = False
    """Whether a rank needs whole rows to compute the score. Plans then cannot split columns."""

    @abstractmethod
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record in the policy parts that an update used some rows.

        Args:
            parts: policy parts by name, indexed by slot, to be changed.
            slots: slots of the rows, int64. A row that the update used several times is repeated.
            clock: update time.
            fills: queue for writes of a single value to many rows. It runs after all tables' policies have
                been called.
        """

    @abstractmethod
    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the score per row, int32 or int64 [N]. The row with the lowest score is evicted first.

        Args:
            rows: rows for which to compute scores.
            clock: time when room is needed.
        """

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the score for a row used at this time. None if scores cannot be cached.

        A policy may return a score only if a row's score changes by use alone, and a later use gives at least
        the returned score. Evictions then reuse the scores from an earlier search; see
        [Note: the order of eviction] in eviction.py.

        Args:
            clock: time of the use.
        """
        return None

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return whether each row must be evicted even if the table is not full. None: no row.

        Args:
            parts: policy parts by name, indexed by slot.
            clock: update time.

        Returns:
            bool, indexed by slot. Values at slots without a live row do not matter.
        """
        return None


@dataclass(frozen=True)
class LRU(Eviction):
    """Evict the rows whose last update is the longest ago (least recently used)."""

    # Number of the last update. A new row has 0 until its first use.
    parts = (RowPart("last", torch.int32, True),)

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the number of the last update per row, int32 [N]."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the update number, which is the score for a row used at this time."""
        return clock.step


@dataclass(frozen=True)
class LFU(Eviction):
    """Evict the rows that are read least often in training (least frequently used).

    Args:
        half_life: number of updates after which a read counts half. All counts are halved at every update
            whose number is a multiple of ``half_life``. None: counts are never halved.
    """

    half_life: int | None = None
    # Reads in units of 2^-16 as of update ``last``, to which later halvings must still be applied.
    parts = (RowPart("uses", torch.int64, True), RowPart("last", torch.int32, True))

    def __post_init__(self) -> None:
        if self.half_life is not None and (not isinstance(self.half_life, int) or self.half_life < 1):
            raise ValueError(f"LFU: half_life must be an integer >= 1 or None, got {self.half_life!r}.")

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        uses, last = parts["uses"], parts["last"]
        # Halve before adding: repeated slots then all write the same halved value.
        uses[slots] = uses[slots] >> self._halvings(last[slots], clock)
        uses.index_add_(0, slots, torch.full_like(slots, _USE))
        fills.add(last, slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the read count per row with all halvings applied, in units of 2^-16 reads, int64 [N]."""
        return rows.parts["uses"] >> self._halvings(rows.parts["last"], clock)

    def _halvings(self, last: Tensor, clock: Clock) -> Tensor:
        """Return how many halvings a row's count has missed since the row's last update, int64 [N]."""
        if self.half_life is None:
            return torch.zeros_like(last, dtype=torch.int64)
        # A shift by 64 bits or more is undefined, and no count reaches 2^62.
        return (clock.step // self.half_life - last.long() // self.half_life).clamp_(max=62)


@dataclass(frozen=True, kw_only=True)
class TTL(Eviction):
    """Evict rows that were not updated for some time (time to live).

    If a table is full before rows expire, the rows whose last update is the longest ago are evicted. Exactly
    one argument must be given.

    Args:
        steps: time to live as a number of table updates. Expired rows are looked for sixteen times within
            this time, not at every update.
        seconds: time to live in seconds of event time; see ``meshrec.tables.set_event_time``.
    """

    steps: int | None = None
    seconds: int | None = None
    # Time of the last update, in updates or seconds. int64, because Unix times exceed int32 in 2038.
    parts = (RowPart("last", torch.int64, True),)

    def __post_init__(self) -> None:
        given = [limit for limit in (self.steps, self.seconds) if limit is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
            raise ValueError(
                f"TTL takes either steps or seconds, an integer >= 1; got steps={self.steps!r}, "
                f"seconds={self.seconds!r}."
            )

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        fills.add(parts["last"], slots, self._now(clock))

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the time of the last update per row, in updates or seconds, int64 [N]."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the present time in updates or seconds, which is the score for a row used at this time."""
        return self._now(clock)

    def expired(self, parts: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return the mask of rows without an update within the time to live, bool by slot.

        A time to live in updates is checked only at some updates. At the other updates, the result is None.
        """
        # The check reads all rows, so it runs only sixteen times per time to live.
        if self.steps is not None and clock.step % max(1, self.steps // 16):
            return None
        return parts["last"] <= self._now(clock) - (self.steps or self.seconds or 0)

    def _now(self, clock: Clock) -> int:
        """Return the present time in the policy's unit: number of updates, or seconds."""
        return clock.step if self.steps is not None else clock.seconds


@dataclass(frozen=True)
class LowestNorm(Eviction):
    """Evict the rows with the smallest Euclidean norm."""

    # The norm changes at every update of the row, so no scores are cached and nothing is stored per row.
    needs_rows = True

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        pass

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the squared Euclidean norm per row in units of 2^-40, rounded to int64 [N].

        If the table is split by columns, this is the sum over the columns on this rank, and the caller adds
        the sums from the other ranks.
        """
        # fp64, because the unit 2^-40 is below fp32's resolution for values near 1.
        squares = rows.parts["weight"].double().square_().mul_(2.0**40)
        # The clamp keeps a sum over 2^10 columns within int64, also for infinite weights.
        # Integer sums do not depend on the order, so every split into columns gives the same score.
        return squares.clamp_(max=2.0**52).round_().long().sum(1)


@dataclass(frozen=True)
class Score(Eviction):
    """Evict the rows to which a user function gives the lowest values.

    Args:
        score: function from ``RowsToJudge`` to a tensor [N] with a floating-point or integer value per row.
            The value of a row must depend on this row alone: every rank calls the function with local rows.
    """

    score: Callable[[RowsToJudge], Tensor]
    # Number of the last update, for functions that combine a value with recency.
    parts = (RowPart("last", torch.int32, True),)
    needs_rows = True
    needs_whole_rows = True

    @override
    def use(self, parts: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        # The function can read the number as ``rows.parts["last"]``.
        fills.add(parts["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Call the function, and map its values to int64 scores [N] with the same order.

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
        # Adding 0.0 turns -0.0 into 0.0, so both get the same score.
        bits = (scores.double() + 0.0).view(torch.int64)
        # Read as integers, the bits of positive floating-point values ascend with the value, and those of
        # negative values descend. Flip the latter.
        return torch.where(bits < 0, bits ^ _WORD, bits)


class Admission(ABC):
    """Policy that selects which new IDs get a row in a hashed table."""

    @abstractmethod
    def check(self, max_rows: int) -> None:
        """Raise ValueError if the policy cannot serve a table with at most ``max_rows`` rows."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Admit an ID when it has occurred ``k`` times in training.

    Counts are exact: the table has a counter (about 24 bytes) per ID waiting for admission, and the number of
    counters is not limited. ``MinCountSketch`` needs only a fixed amount of memory.

    Args:
        k: occurrences at which an ID is admitted, at least 1.
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
    """Admit an ID after about ``k`` occurrences in training, counted in a count-min sketch of a fixed size.

    The sketch counts in one-byte cells, which several IDs share. So an ID is never admitted too late, but may
    be admitted too early, if other IDs have filled all the ID's cells. ``TableCounts.early`` estimates how
    often. Counts do not depend on the sharding plan: every key bucket has separate cells, ``bytes //
    max_rows`` of them rounded down to a multiple of 8. See [Note: the keys of hashed tables].

    Args:
        k: occurrences at which an ID is admitted, from 1 to 255.
        bytes: memory for the sketch of the whole table, at least 8 bytes per row.
    """

    k: int
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= 255:
            raise ValueError(f"MinCountSketch: k must be an integer in [1, 255], got {self.k!r}.")

    def check(self, max_rows: int) -> None:
        """Raise ValueError if the sketch has fewer than 8 bytes per row in a table with ``max_rows`` rows."""
        if not isinstance(self.bytes, int) or self.bytes < 8 * max_rows:
            raise ValueError(
                f"MinCountSketch: bytes must be an integer of at least 8 for each of {max_rows:,} rows, "
                f"{8 * max_rows:,}; got {self.bytes!r}."
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Admit an ID with probability ``p`` at every occurrence in training.

    The decision is pseudo-random: a hash of the seed, the ID, the update number, and the number of the
    occurrence within the update. So it is the same in every run and under every plan.

    Args:
        p: probability, above 0 and at most 1.
    """

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or not 0 < self.p <= 1:
            raise ValueError(f"Probability: p must lie in (0, 1], got {self.p!r}.")

    @override
    def check(self, max_rows: int) -> None:
        pass

    def admits(self, keys: Tensor, counts: Tensor, step: int, seed: int) -> Tensor:
        """Return whether to admit each of an update's new IDs, bool [N].

        Args:
            keys: new IDs' keys, int64 [N].
            counts: occurrences per ID in this update, int64 [N].
            step: update number.
            seed: table seed.
        """
        admitted = torch.zeros_like(keys, dtype=torch.bool)
        # Compare 53 random bits with p * 2^53: as exact as a float64 probability.
        below = math.ceil(self.p * 2.0**53)
        # Draw for the first occurrence of all IDs, then for the second, until all occurrences are used up.
        for read in range(int(counts.max()) if len(counts) else 0):
            waiting = (~admitted & (counts > read)).nonzero()[:, 0]
            # The occurrence takes 20 bits. Later ones of the same ID in an update would reuse draws of the
            # next update.
            drawn = mix(mix(keys[waiting], seed) ^ ((step << 20) + read), seed + 1)
            admitted[waiting] = ((drawn >> 11) & ((1 << 53) - 1)) < below
        return admitted


@dataclass(frozen=True, kw_only=True)
class HashedKeys:
    """Table option for IDs without a known range: every int64 value is a valid ID.

    The table gives rows to IDs while it is trained. An ID without a row reads its initial row, a function of
    the seed and the ID. Exactly one of the two limits must be given.

    Args:
        max_rows: greatest number of rows, over all ranks.
        max_bytes: the same limit as memory in bytes, for rows and index (16 bytes per row), without optimizer
            state.
        admit: policy that decides which new IDs get a row: ``MinCount``, ``MinCountSketch`` or
            ``Probability``. None: every ID gets a row when it is first trained.
        evict: policy that decides which rows a full table removes: ``LRU``, ``LFU``, ``TTL``, ``LowestNorm``
            or ``Score``. None: a full table is an error.
        seed: seed of keys, initial rows, and admission.

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
        # With ``max_bytes``, ``rows`` checks the policy once the bytes per row are known.
        if self.admit is not None and self.max_rows is not None:
            self.admit.check(self.max_rows)

    @property
    def counts_waiting_ids(self) -> bool:
        """Whether the admission policy counts the occurrences of IDs without a row."""
        return isinstance(self.admit, (MinCount, MinCountSketch))

    def rows(self, row_bytes: int) -> int:
        """Return the table's row limit: the greatest number of rows, over all ranks.

        Args:
            row_bytes: bytes per row without the index. Used only if the limit is ``max_bytes``.

        Raises:
            ValueError: ``max_bytes`` is too small for a row, or the admission policy does not fit the limit.
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
"""Interval of all keys, [-2^63, 2^63). The end does not fit int64."""


def key_at(row: int, max_rows: int) -> int:
    """Return the first key in a key bucket (a "row" in a plan); see [Note: the keys of hashed tables].

    Bucket ``row`` starts at ``row * 2^64 / max_rows``, rounded up, minus 2^63.
    """
    return -(-(row << 64) // max_rows) + FIRST_KEY


def bucket_of(keys: Tensor, max_rows: int) -> Tensor:
    """Return the number of the key bucket that contains each key, int64 [N]. Inverts ``first_keys``.

    Args:
        keys: int64 [N].
        max_rows: row limit of the table, which is also its number of key buckets; below 2^48.
    """
    # A 112-bit product, shifted by 64 bits. It is the sum of four products below 2^56, because int64 would
    # overflow.
    upper, lower = (keys >> 32) + (1 << 31), keys & ((1 << 32) - 1)
    high, low = divmod(max_rows, 1 << 24)
    product = (((lower * low) >> 24) + lower * high >> 8) + upper * low
    return ((product >> 24) + upper * high) >> 8


def first_keys(rows: Tensor, max_rows: int) -> Tensor:
    """Return the first key in each key bucket, int64 [N]; see ``key_at``."""
    # row * 2^64 / max_rows as row * whole + row * remainder / max_rows, because 2^64 does not fit int64.
    whole, remainder = divmod(1 << 64, max_rows)
    whole = (whole - FIRST_KEY) % (1 << 64) + FIRST_KEY  # as int64, whose product wraps
    # Long division of row * remainder, which may have 96 bits: the row's digits have so few bits that every
    # term fits int64. Tables with fewer than 2^31 rows have a single digit.
    bits = 62 - max_rows.bit_length()
    quotients, rest = torch.zeros_like(rows), torch.zeros_like(rows)
    for shift in reversed(range(0, max_rows.bit_length(), bits)):
        rest = (rest << bits) + ((rows >> shift) & ((1 << bits) - 1)) * remainder
        quotients = (quotients << bits) + rest // max_rows
        rest = rest % max_rows
    return rows * whole + quotients + (rest > 0) + FIRST_KEY
