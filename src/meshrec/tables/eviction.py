"""The rows that a full table evicts, chosen by all ranks together.

[Note: the order of eviction]

A search for the rows with the least scores reads the scores of all rows. Under ``LRU`` and ``TTL`` a score
changes only when its row is used, and is then greater than those of all rows that were not used since. So the
rows that go next are known in advance, but for those that are used until then. A search therefore finds
some times as many rows as must go: all rows up to some (score, key). Later evictions take the first of those
whose score is still the same, and search again when too few are left.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.ops.index import marked_between, marked_histogram, marked_range
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_keys import Clock, RowsToJudge
from meshrec.tables.key_space import FIRST_KEY

# N rows, S slots

_NONE = torch.empty(0, dtype=torch.int64)
_DIGIT_BITS = 12
_LAST_KEY = (1 << 63) - 1
_FEW = 8  # with fewer than an eighth of its slots, each is looked for in the index
_AT_ONCE = 4  # evictions for which a search finds rows


class Everyone(Protocol):
    """The ranks that hold parts of the same tables."""

    @property
    def rank(self) -> int:
        """The number of this rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over all ranks, int64. Collective."""

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return a value of each row here, summed over the ranks that hold its other columns. Collective."""


class Alone:
    """A single rank, which holds whole tables."""

    rank, size = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values."""
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values."""
        return list(values)


class SlotScores(NamedTuple):
    """The scores of a rectangle's rows, by slot."""

    scores: Tensor
    """int32 or int64 [S]."""
    marks: Tensor
    """Whether the row may go, bool [S]."""


class ValueRange(NamedTuple):
    """The least and the greatest of some values, and their number."""

    least: int
    greatest: int
    number: int


class Nth(NamedTuple):
    """The n-th smallest of some values, from 1 on."""

    value: int
    below: int
    """The number of smaller values."""
    equal: int
    """The number of values that are equal to it."""


class InUpdate(NamedTuple):
    """The rows of a rectangle that this eviction leaves alone."""

    slots: Tensor
    """The slots of all IDs of the update, which may repeat."""
    gone: Tensor
    """The slots of rows that go anyhow."""


class NextRows(NamedTuple):
    """Rows of a rectangle: all that may go, up to some (score, key)."""

    scores: Tensor
    """int32 or int64 [N]."""
    keys: Tensor
    """int64 [N]."""
    slots: Tensor
    """int64 [N]."""

    def chosen(self, marks: Tensor) -> "NextRows":
        """Return the marked rows, bool [N]."""
        places = marks.nonzero()[:, 0]
        if len(places) == len(marks):
            return self
        return NextRows(*(each.index_select(0, places) for each in self))


class KeptRows(NamedTuple):
    """The rows of a table that go next, as a search has found them."""

    rows: Mapping[int, NextRows]
    """The rows of each rectangle."""
    time: int
    """The score of rows that were used then; all rows here have lesser ones."""
    loads: Mapping[int, int]
    """The number of times that rows had been loaded into each rectangle."""


class Evictions:
    """The choice of rows to evict from the hashed tables that a rank looks up together.

    Args:
        tables: the rectangles of hashed tables that are here, by number.
        storages: the storages of all hashed tables, by table.
        everyone: the ranks.
    """

    def __init__(
        self, tables: Mapping[int, HashedTable], storages: Mapping[int, HashedRows], everyone: Everyone
    ) -> None:
        self._tables, self._storages, self._everyone = tables, storages, everyone
        self._passed: dict[int, tuple[int, int]] = {}
        """The score and the key of the last row that each table has evicted."""
        self._kept: dict[int, KeptRows] = {}

    def forget(self) -> None:
        """Forget the rows that earlier searches have found."""
        self._passed, self._kept = {}, {}

    def choose(
        self, number: int, update: Mapping[int, InUpdate], clock: Clock, *, least: int, wanted: int
    ) -> dict[int, Tensor] | int:
        """Return the slots of rows of a table to evict, by rectangle. Collective.

        Args:
            number: the table.
            update: the rows of its rectangles that stay.
            clock: the time.
            least: how many rows must go.
            wanted: how many rows go, if so many may.

        Returns: the slots, or the number of rows that may go if they are fewer than ``least``.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        time = policy.score_of_use(clock)
        rows, spread = self._left(number, update, clock, time)
        if spread.number < wanted:
            rows, spread = self._searched(number, update, clock, time, wanted)
        if spread.number < least:
            return spread.number
        return self._first(number, rows, min(wanted, spread.number), spread)

    def _left(
        self, number: int, update: Mapping[int, InUpdate], clock: Clock, time: int | None
    ) -> tuple[Mapping[int, NextRows], ValueRange]:
        """Return the rows that an earlier search has found and that may still go. Collective."""
        nothing: tuple[dict[int, NextRows], ValueRange] = {}, ValueRange(0, 0, 0)
        kept = self._kept.pop(number, None)
        if kept is None or time is None or time < kept.time:
            return nothing
        is_stale = any(self._tables[i].books.loads != loads for i, loads in kept.loads.items())
        if int(self._everyone.sum(torch.tensor([int(is_stale)]))):
            return nothing
        rows = {}
        for i, own in kept.rows.items():
            is_same = self._scores(i, clock).index_select(0, own.slots) == own.scores
            is_alive = self._tables[i].memory[""].index_select(0, own.slots)
            rows[i] = own.chosen(is_same.logical_and_(is_alive))
        self._kept[number] = kept._replace(rows=rows)
        return self._without(rows, update)

    def _searched(
        self,
        number: int,
        update: Mapping[int, InUpdate],
        clock: Clock,
        time: int | None,
        wanted: int,
    ) -> tuple[Mapping[int, NextRows], ValueRange]:
        """Search rows that may go: at least so many, or all. Keep those of later evictions. Collective."""
        judged = self._judged(number, update, clock, with_update=time is not None)
        owned = [each for i, each in judged.items() if self._counts(i)]
        spread = range_of(owned, self._everyone)
        if time is not None:
            num_staying = sum(
                len(each.slots) + len(each.gone) for i, each in update.items() if self._counts(i)
            )
            wanted = _AT_ONCE * wanted + int(self._everyone.sum(torch.tensor([num_staying])))
        wanted = min(wanted, spread.number)
        if wanted == 0:
            return dict.fromkeys(judged, NextRows(_NONE, _NONE, _NONE)), spread
        last = nth(owned, wanted, spread, self._everyone)
        rows = self._up_to(number, judged, last, wanted - last.below)
        if time is None:
            return rows, self._spread(rows)
        if last.value < time:
            self._kept[number] = KeptRows(rows, time, {i: self._tables[i].books.loads for i in rows})
        return self._without(rows, update)

    def _without(
        self, rows: Mapping[int, NextRows], update: Mapping[int, InUpdate]
    ) -> tuple[Mapping[int, NextRows], ValueRange]:
        """Return the rows that may go in this update. Collective."""
        found = {
            i: own.chosen(_candidates(self._tables[i], update[i]).index_select(0, own.slots))
            for i, own in rows.items()
        }
        return found, self._spread(found)

    def _spread(self, rows: Mapping[int, NextRows]) -> ValueRange:
        return range_of([(own.scores, None) for i, own in rows.items() if self._counts(i)], self._everyone)

    def _counts(self, rectangle: int) -> bool:
        """Return whether the rows of a rectangle are counted; those of other columns follow."""
        return self._tables[rectangle].rectangle.c0 == 0

    def _scores(self, rectangle: int, clock: Clock) -> Tensor:
        """Return the scores of a policy that reads no rows, by slot."""
        table = self._tables[rectangle]
        policy = table.storage.keys.evict
        assert policy is not None
        num = table.slots.num_slots
        parts = {part.name: table.memory[part.name][:num] for part in policy.parts}
        return policy.scores(RowsToJudge(_NONE, parts), clock)

    def _judged(
        self, number: int, update: Mapping[int, InUpdate], clock: Clock, *, with_update: bool
    ) -> dict[int, SlotScores]:
        """Return the scores of the rows of a table; ``with_update``: also of those that stay.

        Collective where a score reads whole rows.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        marks = {
            i: self._tables[i].memory[""][: self._tables[i].slots.num_slots]
            if with_update
            else _candidates(self._tables[i], each)
            for i, each in update.items()
        }
        if not policy.needs_rows:
            return {i: SlotScores(self._scores(i, clock), own) for i, own in marks.items()}
        slots = {i: own.nonzero()[:, 0] for i, own in marks.items()}
        sums = []
        for i, candidates in slots.items():
            table, scores = self._tables[i], [_NONE]
            # Whole rows may be more than memory holds.
            for some in candidates.split(table.block_rows):
                rows = RowsToJudge(
                    table.ids_of(table.keys_of(some)), table.gathered(some, table.rectangle.columns)
                )
                scores.append(policy.scores(rows, clock))
            sums.append(torch.cat(scores))
        found = {}
        for (i, own), own_sums in zip(marks.items(), self._everyone.row_sums(number, sums), strict=True):
            by_slot = torch.zeros(len(own), dtype=torch.int64).index_copy_(0, slots[i], own_sums)
            found[i] = SlotScores(by_slot, own)
        return found

    def _up_to(
        self, number: int, judged: Mapping[int, SlotScores], last: Nth, num_tied: int
    ) -> dict[int, NextRows]:
        """Return all rows below the score ``last``, and ``num_tied`` or more of those with it, by least keys.

        Collective.
        """
        bounds = [_LAST_KEY]
        if num_tied < last.equal:
            bounds = [self._likely_bound(number, last, num_tied), _LAST_KEY]
        for bound in bounds:
            tied = {i: _with_keys(self._tables[i], each, last.value, bound) for i, each in judged.items()}
            own = sum(len(keys) for i, (keys, _) in tied.items() if self._counts(i))
            if bound == _LAST_KEY or int(self._everyone.sum(torch.tensor([own]))) >= num_tied:
                break
        found = {}
        for i, (scores, marks) in judged.items():
            keys, slots = tied[i]
            if last.below:
                smaller = marked_between(scores, marks, torch.iinfo(scores.dtype).min, last.value - 1)
                keys = torch.cat([self._tables[i].keys_of(smaller), keys])
                slots = torch.cat([smaller, slots])
            found[i] = NextRows(scores.index_select(0, slots), keys, slots)
        return found

    def _likely_bound(self, number: int, last: Nth, num_tied: int) -> int:
        """Return a key that probably has ``num_tied`` tied rows at or below it, and not many more.

        Keys are spread evenly; of the same score, those up to a key may have gone before.
        """
        score, key = self._passed.get(number, (last.value, FIRST_KEY))
        first = key if score == last.value else FIRST_KEY
        wanted = num_tied + 8 * math.isqrt(num_tied) + 64
        return min(_LAST_KEY, first + (_LAST_KEY - first) * wanted // last.equal)

    def _first(
        self, number: int, rows: Mapping[int, NextRows], num_going: int, spread: ValueRange
    ) -> dict[int, Tensor]:
        """Return the slots of the rows with the least (score, key). Collective."""
        if num_going == spread.number:
            return {i: own.slots for i, own in rows.items()}
        owned = [(own.scores, None) for i, own in rows.items() if self._counts(i)]
        last = nth(owned, num_going, spread, self._everyone)
        if num_going - last.below == last.equal:
            return {i: own.slots[own.scores <= last.value] for i, own in rows.items()}
        tied = {i: own.scores == last.value for i, own in rows.items()}
        keys = [(own.keys, tied[i]) for i, own in rows.items() if self._counts(i)]
        spread_of_keys = range_of(keys, self._everyone)
        key = nth(keys, num_going - last.below, spread_of_keys, self._everyone).value
        self._passed[number] = last.value, key
        return {
            i: own.slots[(own.keys <= key).logical_and_(tied[i]).logical_or_(own.scores < last.value)]
            for i, own in rows.items()
        }


def _candidates(table: HashedTable, update: InUpdate) -> Tensor:
    """Return which rows may be evicted, bool by slot: all except those of the update."""
    free = table.memory[""][: table.slots.num_slots].clone()
    for slots in (update.gone, update.slots):
        free.index_fill_(0, slots, False)
    return free


def _with_keys(table: HashedTable, judged: SlotScores, score: int, most: int) -> tuple[Tensor, Tensor]:
    """Return the keys up to ``most`` of the rows with a score, and their slots."""
    tied = (judged.scores == score).logical_and_(judged.marks)
    if int(tied.count_nonzero()) * _FEW >= table.slots.num_live:
        return table.slots.marked(tied, most)
    slots = tied.nonzero()[:, 0]
    keys = table.keys_of(slots)
    inside = keys <= most
    return keys[inside], slots[inside]


def range_of(parts: Sequence[tuple[Tensor, Tensor | None]], everyone: Everyone) -> ValueRange:
    """Return the least and the greatest marked value of all ranks, and their number. Collective.

    Args:
        parts: the values of this rank and their marks, as ``marked_range`` takes them.
    """
    own = torch.zeros(everyone.size, 3, dtype=torch.int64)
    found = [marked_range(*part) for part in parts]
    if found:
        least, greatest, numbers = torch.stack(found).unbind(1)
        own[everyone.rank] = torch.stack([least.min(), greatest.max(), numbers.sum()])
    rows = [row for row in everyone.sum(own.view(-1)).view(-1, 3).tolist() if row[2]]
    if not rows:
        return ValueRange(0, 0, 0)
    least_of, greatest_of, number_of = zip(*rows, strict=True)
    return ValueRange(min(least_of), max(greatest_of), sum(number_of))


def nth(parts: Sequence[tuple[Tensor, Tensor | None]], n: int, spread: ValueRange, everyone: Everyone) -> Nth:
    """Return the n-th smallest of the marked values of all ranks. Collective.

    Args:
        parts: the values of this rank and their marks.
        n: from 1 on, at most ``spread.number``.
        spread: what ``range_of`` returned for the same values.
        everyone: the ranks.
    """
    size, shift = 1 << _DIGIT_BITS, 0
    while (spread.greatest >> shift) - (spread.least >> shift) >= size:
        shift += 1
    base, below = spread.least, 0
    while True:
        own = torch.zeros(size, dtype=torch.int64)
        for part in parts:
            own += marked_histogram(*part, base, shift, size)
        counts = everyone.sum(own)
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, n - below))
        equal = int(counts[digit])
        below += int(ends[digit]) - equal
        base = ((base >> shift) + digit) << shift
        if shift == 0:
            return Nth(base, below, equal)
        greatest = min(_LAST_KEY, base + (1 << shift) - 1)
        parts = [(part[0][marked_between(*part, base, greatest)], None) for part in parts]
        shift = max(0, shift - _DIGIT_BITS)
