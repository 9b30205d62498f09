"""The choice of a table for IDs that nobody can number: which IDs get rows, and which rows are evicted.

[Note: when IDs come and go]

Every update of a table is a turnover, at one moment that does not depend on the plan: the IDs of the whole
batch, from all ranks and replicas, are counted, the due ones are admitted, and rows are evicted. So the IDs
alive are a function of the batches alone. Until its turnover, a new ID reads its first row at a slot that is
pinned to its batch; a batch without an update leaves nothing behind, as if it had not come.

Scores and counts are integers, or floating-point values that a single rank computes for one row: so the ranks
of any plan compare the same values.
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
from meshrec.tables.table import RowPart

# N rows

_WORD = (1 << 63) - 1
_USE = 1 << 16
INDEX_BYTES = 16
"""The bytes of a row in the index, at most."""


class Clock(NamedTuple):
    """The time of a turnover."""

    step: int
    """The number of the table's update."""
    seconds: int
    """The latest event time that was set on any rank."""


class RowsToJudge(NamedTuple):
    """Rows of a table on one rank, for a score. A policy that needs no rows gets its own parts only."""

    ids: Tensor
    """int64 [N]."""
    parts: Mapping[str, Tensor]
    """``weight`` [N, D], the optimizer's state and the policy's own parts, by name."""


class Eviction(ABC):
    """A policy that chooses which rows to evict when a table is full.

    The row with the least score goes first; of equal scores, the one with the least key.
    """

    parts: tuple[RowPart, ...] = ()
    """The values that the policy keeps for every row."""
    needs_rows = False
    """Whether the score reads whole rows."""

    @abstractmethod
    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record that the rows at ``slots`` (which may repeat) were used.

        Args:
            own: the policy's parts by name, by slot.
            slots: int64.
            clock: the time.
            fills: gets the values that are the same for all rows: they are written with those of other
                tables, once all policies have been called.
        """

    @abstractmethod
    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return a score for each row, int32 or int64 [N]."""

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the score of rows that are used now, if scores change by use alone, and never to less than
        this later; otherwise None. See [Note: the order of eviction] in tables/eviction.py.
        """
        return None

    def expired(self, own: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows to evict even if the table is not full, bool by slot; None: no row."""
        return None


@dataclass(frozen=True)
class LRU(Eviction):
    """Evict the rows whose last update is the longest ago."""

    parts = (RowPart("last", torch.int32, True),)

    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the number of the update."""
        fills.add(own["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the steps of the last updates."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the number of the update."""
        return clock.step


@dataclass(frozen=True)
class LFU(Eviction):
    """Evict the rows that were read the least.

    Args:
        half_life: the number of updates after which a read counts half. All counts are halved at every
            multiple of it. None: reads count for ever.
    """

    half_life: int | None = None
    parts = (RowPart("uses", torch.int64, True), RowPart("last", torch.int32, True))

    def __post_init__(self) -> None:
        if self.half_life is not None and (not isinstance(self.half_life, int) or self.half_life < 1):
            raise ValueError(f"LFU: half_life must be an integer >= 1 or None, got {self.half_life!r}.")

    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Apply the halvings since the last read of each row, and add these reads."""
        uses, last = own["uses"], own["last"]
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
    """Evict the rows that were not updated for a time.

    A table looks for such rows sixteen times within the time. If it is full before, those that were not
    updated for the longest go.

    Args:
        steps: the time as a number of updates of the table.
        seconds: the time in seconds of event time, see ``meshrec.tables.set_event_time``.
    """

    steps: int | None = None
    seconds: int | None = None
    parts = (RowPart("last", torch.int64, True),)

    def __post_init__(self) -> None:
        given = [each for each in (self.steps, self.seconds) if each is not None]
        if len(given) != 1 or not isinstance(given[0], int) or given[0] < 1:
            raise ValueError(
                f"TTL takes either steps or seconds, an integer >= 1; got steps={self.steps!r}, "
                f"seconds={self.seconds!r}."
            )

    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the number of the update, or the event time."""
        fills.add(own["last"], slots, self._now(clock))

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the times of the last updates."""
        return rows.parts["last"]

    def score_of_use(self, clock: Clock) -> int | None:
        """Return the number of the update, or the event time."""
        return self._now(clock)

    def expired(self, own: Mapping[str, Tensor], clock: Clock) -> Tensor | None:
        """Return which rows were not updated within the time."""
        if self.steps is not None and clock.step % max(1, self.steps // 16):
            return None
        return own["last"] <= self._now(clock) - (self.steps or self.seconds or 0)

    def _now(self, clock: Clock) -> int:
        return clock.step if self.steps is not None else clock.seconds


@dataclass(frozen=True)
class LowestNorm(Eviction):
    """Evict the rows with the smallest Euclidean norm."""

    needs_rows = True

    @override
    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        pass

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return sums of squares in units of 2^-40, as integers, which add up to the same in any order."""
        squares = rows.parts["weight"].double().square_().mul_(2.0**40)
        return squares.clamp_(max=2.0**52).round_().long().sum(1)


@dataclass(frozen=True)
class Score(Eviction):
    """Evict the rows with the lowest score by a function of yours.

    Args:
        score: maps ``RowsToJudge`` to a floating-point value or integer for each row, [N]. It must treat all
            rows alike, and must not depend on which other rows it sees: each rank calls it with its own.
    """

    score: Callable[[RowsToJudge], Tensor]
    parts = (RowPart("last", torch.int32, True),)
    needs_rows = True

    def use(self, own: Mapping[str, Tensor], slots: Tensor, clock: Clock, fills: Fills) -> None:
        """Record the number of the update, which the score reads as ``rows.parts["last"]``."""
        fills.add(own["last"], slots, clock.step)

    def scores(self, rows: RowsToJudge, clock: Clock) -> Tensor:
        """Return the scores as integers of the same order.

        Raises:
            ValueError: the function gives something else than a number for each row.
        """
        found = self.score(rows)
        if not isinstance(found, Tensor) or found.shape != rows.ids.shape or bool(found.isnan().any()):
            got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(
                f"the score of an eviction policy must be a tensor of {len(rows.ids)} numbers, none of them "
                f"NaN; got {got}."
            )
        if not found.is_floating_point():
            return found.long()
        bits = (found.double() + 0.0).view(torch.int64)  # no -0.0
        return torch.where(bits < 0, bits ^ _WORD, bits)


class Admission(ABC):
    """A policy that chooses which new IDs get a row."""

    @abstractmethod
    def check(self, max_rows: int) -> None:
        """Raise ValueError if a table of so many rows cannot have this policy."""


@dataclass(frozen=True)
class MinCount(Admission):
    """Admit an ID once it was read ``k`` times in training.

    Counts are exact: the table keeps one for every ID that waits, about 24 bytes each, without a bound.
    ``MinCountSketch`` has one.
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
    """Admit an ID once it was read about ``k`` times, counted in a count-min sketch of ``bytes`` bytes.

    An ID is never admitted late. It may be admitted early, where others fell on all of its cells;
    ``TableCounts.early`` says how often. A cell is a byte, and each row of the table has ``bytes //
    max_rows`` of them, in which the IDs of that interval of keys are counted: so counts do not depend on the
    plan.
    """

    k: int
    bytes: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or not 1 <= self.k <= 255:
            raise ValueError(f"MinCountSketch: k must be an integer in [1, 255], got {self.k!r}.")

    def check(self, max_rows: int) -> None:
        """Raise ValueError if there is less than one word of cells for each row."""
        if not isinstance(self.bytes, int) or self.bytes < 8 * max_rows:
            raise ValueError(
                f"MinCountSketch: bytes must be an integer of at least 8 for each of {max_rows:,} rows, "
                f"{8 * max_rows:,}; got {self.bytes!r}."
            )


@dataclass(frozen=True)
class Probability(Admission):
    """Admit an ID with probability ``p`` each time it is read in training.

    The decision is a hash of seed, ID, the number of the table's update, and the number of the read in it.
    """

    p: float

    def __post_init__(self) -> None:
        if not isinstance(self.p, (int, float)) or not 0 < self.p <= 1:
            raise ValueError(f"Probability: p must lie in (0, 1], got {self.p!r}.")

    @override
    def check(self, max_rows: int) -> None:
        pass

    def admits(self, keys: Tensor, counts: Tensor, step: int, seed: int) -> Tensor:
        """Return which IDs, read ``counts`` times in this update, are admitted."""
        admitted = torch.zeros_like(keys, dtype=torch.bool)
        below = math.ceil(self.p * 2.0**53)
        for read in range(int(counts.max()) if len(counts) else 0):
            waiting = (~admitted & (counts > read)).nonzero()[:, 0]
            drawn = mix(mix(keys[waiting], seed) ^ ((step << 20) + read), seed + 1)
            admitted[waiting] = ((drawn >> 11) & ((1 << 53) - 1)) < below
        return admitted


@dataclass(frozen=True, kw_only=True)
class HashedKeys:
    """The keys of a table for IDs that nobody can number: any int64 is an ID, and none is reserved.

    Args:
        max_rows: the number of rows that the table may have, on all ranks together.
        max_bytes: the same as bytes of rows and index (16 a row), without optimizer state.
        admit: ``MinCount``, ``MinCountSketch`` or ``Probability``; None: every ID is admitted when it is
            first trained. An ID that is not admitted reads its first row and is not trained.
        evict: ``LRU``, ``LFU``, ``TTL``, ``LowestNorm`` or ``Score``; None: a full table is an error.
        seed: the seed of the mix of IDs, of first rows, and of admission.

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
                known = ", ".join(sorted(each.__name__ for each in kind.__subclasses__()))
                raise ValueError(f"Hashed: {name} must be None or one of {known}; got {value!r}.")
        if self.admit is not None and self.max_rows is not None:
            self.admit.check(self.max_rows)

    @property
    def counts(self) -> bool:
        """Whether IDs that wait for admission are counted."""
        return isinstance(self.admit, (MinCount, MinCountSketch))

    def rows(self, row_bytes: int) -> int:
        """Return the number of rows that a table with rows of so many bytes may have.

        Raises:
            ValueError: ``max_bytes`` has no room for a row.
        """
        if self.max_rows is not None:
            return self.max_rows
        assert self.max_bytes is not None
        found = self.max_bytes // (row_bytes + INDEX_BYTES)
        if found < 1:
            raise ValueError(
                f"Hashed: max_bytes={self.max_bytes:,} has no room for a row of {row_bytes} bytes and its "
                f"{INDEX_BYTES} bytes in the index. Raise max_bytes."
            )
        if self.admit is not None:
            self.admit.check(found)
        return found


Hashed = HashedKeys
"""``meshrec.Hashed``. (A feature of ``meshrec.data`` has that name, too.)"""
