"""The rows that a full table evicts, chosen by all ranks together.

[Note: the order of eviction]

A search for the rows with the least scores reads the scores of all rows. Under ``LRU`` and ``TTL`` a score
changes only when its row is used, and is then greater than those of all rows that were not used since. So the
rows that go next are known in advance, but for those that are used until then. A search therefore finds
some times as many rows as must go: all rows up to some (score, key), in this order. Later evictions take the
first of those whose score is still the same, and search again when too few are left.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from meshrec.ops.index import (
    first_left,
    marked_between,
    marked_histogram,
    marked_range,
    order,
)
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_keys import Clock, RowsToJudge
from meshrec.tables.key_space import FIRST_KEY

# N rows, S slots

_NONE = torch.empty(0, dtype=torch.int64)
_DIGIT_BITS = 12
_LAST_KEY = (1 << 63) - 1
_MOST_SCORE_BITS = 32
_FEW = 8  # with fewer than an eighth of its slots, each is looked for in the index; as many may be too many
_AT_ONCE = 16  # evictions for which a search finds rows: a quarter of the table, kept at 12 to 16 bytes each


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


class EvictionRequest(NamedTuple):
    """The rows of a table that must go."""

    update: Mapping[int, InUpdate]
    """The rows of its rectangles that stay."""
    clock: Clock
    """The time of the update."""
    least: int
    """The number of rows that must go."""
    wanted: int
    """The number of rows that go, if so many may."""


class NextRows(NamedTuple):
    """Rows of a rectangle in the order of (score, key)."""

    scores: Tensor
    """int32 or int64 [N]."""
    slots: Tensor
    """int64 [N]."""

    def at(self, positions: Tensor) -> "NextRows":
        """Return the rows at some positions."""
        return NextRows(*(each.index_select(0, positions) for each in self))


class FoundRows(NamedTuple):
    """The first rows of a table that may go."""

    rows: Mapping[int, NextRows]
    """The rows of each rectangle."""
    number: int
    """The number of rows on all ranks."""


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

    def choose(self, requests: Mapping[int, EvictionRequest]) -> dict[int, dict[int, Tensor] | int]:
        """Choose rows of tables to evict. Collective.

        Returns: for each table the slots by rectangle, or the number of rows that may go if they are too few.
        """
        chosen: dict[int, dict[int, Tensor] | int] = {}
        found = self._left(requests)
        for number, request in requests.items():
            own = found[number]
            if own.number < request.wanted:
                own = self._searched(number, request)
            is_enough = own.number >= request.least
            chosen[number] = self._first(number, own, request.wanted) if is_enough else own.number
        return chosen

    def _left(self, requests: Mapping[int, EvictionRequest]) -> dict[int, FoundRows]:
        """Return the rows that an earlier search has found and that may still go. Collective."""
        kept = {}
        for number, request in requests.items():
            time = self._time(number, request)
            own = self._kept.pop(number, None)
            if own is not None and time is not None and time >= own.time:
                kept[number] = own
        places = [(number, i) for number, own in kept.items() for i in own.rows]
        updates = [requests[number].update[i] for number, i in places]
        rows = [kept[number].rows[i] for number, i in places]
        *positions, skipped = first_left(
            [each.scores for each in rows],
            [each.slots for each in rows],
            [self._scores(i, requests[number].clock) for number, i in places],
            [self._tables[i].memory[""] for _, i in places],
            [each.slots for each in updates],
            [each.gone for each in updates],
            [requests[number].wanted for number, _ in places],
        )
        left: dict[int, dict[int, NextRows]] = {number: {} for number in requests}
        found: dict[int, dict[int, NextRows]] = {number: {} for number in requests}
        for (number, i), each, own, num in zip(places, rows, positions, skipped.tolist(), strict=True):
            found[number][i] = each.at(own)
            left[number][i] = NextRows(each.scores[num:], each.slots[num:])
        counts = torch.zeros(2, len(requests), dtype=torch.int64)
        for place, (number, chosen) in enumerate(found.items()):
            counts[0, place] = self._count(chosen)
            if number in kept:
                counts[1, place] = kept[number].loads != self._loads(chosen)
        totals, num_stale = self._everyone.sum(counts.view(-1)).view(2, -1).tolist()
        result = {}
        for number, total, is_stale in zip(requests, totals, num_stale, strict=True):
            result[number] = FoundRows(found[number], 0 if is_stale else total)
            if number in kept and not is_stale:
                self._kept[number] = kept[number]._replace(rows=left[number])
        return result

    def _searched(self, number: int, request: EvictionRequest) -> FoundRows:
        """Find rows that may go: at least so many, or all. Keep those of later evictions. Collective."""
        time, wanted = self._time(number, request), request.wanted
        judged = self._judged(number, request, with_update=time is not None)
        owned = [each for i, each in judged.items() if self._counts(i)]
        spread = range_of(owned, self._everyone)
        if time is not None:
            # The first searches of several tables find rows for different times: later ones do not coincide.
            num_times = _AT_ONCE if number in self._passed else 1 + number % _AT_ONCE
            if spread.least >= time:
                num_times = 1  # none may be kept
            num_staying = sum(
                len(each.slots) + len(each.gone) for i, each in request.update.items() if self._counts(i)
            )
            wanted = num_times * wanted + int(self._everyone.sum(torch.tensor([num_staying])))
        wanted = min(wanted, spread.number)
        if wanted == 0:
            return FoundRows(dict.fromkeys(judged, NextRows(_NONE, _NONE)), 0)
        last = nth(owned, wanted, spread, self._everyone)
        rows = self._up_to(number, judged, last, wanted - last.below)
        if time is None:
            return FoundRows(rows, int(self._everyone.sum(torch.tensor([self._count(rows)]))))
        self._kept[number] = KeptRows(rows, time, self._loads(rows))
        found = self._left({number: request})[number]
        if last.value >= time:
            self._kept.pop(number, None)
        return found

    def _time(self, number: int, request: EvictionRequest) -> int | None:
        """Return the score of rows that are used now, if a search may find rows of later evictions."""
        policy = self._storages[number].keys.evict
        assert policy is not None
        return policy.score_of_use(request.clock)

    def _loads(self, rectangles: Iterable[int]) -> dict[int, int]:
        """Return how many times rows were loaded into rectangles."""
        return {i: self._tables[i].books.loads for i in rectangles}

    def _counts(self, rectangle: int) -> bool:
        """Return whether the rows of a rectangle are counted; those of other columns follow."""
        return self._tables[rectangle].rectangle.c0 == 0

    def _count(self, rows: Mapping[int, NextRows]) -> int:
        """Return the number of rows here that are counted."""
        return sum(len(own.slots) for i, own in rows.items() if self._counts(i))

    def _scores(self, rectangle: int, clock: Clock) -> Tensor:
        """Return the scores of a policy that reads no rows, by slot."""
        table = self._tables[rectangle]
        policy = table.storage.keys.evict
        assert policy is not None
        num = table.slots.num_slots
        parts = {part.name: table.memory[part.name][:num] for part in policy.parts}
        return policy.scores(RowsToJudge(_NONE, parts), clock)

    def _judged(self, number: int, request: EvictionRequest, *, with_update: bool) -> dict[int, SlotScores]:
        """Return the scores of the rows of a table; ``with_update``: also of those that stay.

        Collective where a score reads whole rows.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        marks = {
            i: self._tables[i].memory[""][: self._tables[i].slots.num_slots]
            if with_update
            else _candidates(self._tables[i], each)
            for i, each in request.update.items()
        }
        if not policy.needs_rows:
            return {i: SlotScores(self._scores(i, request.clock), own) for i, own in marks.items()}
        slots = {i: own.nonzero()[:, 0] for i, own in marks.items()}
        sums = []
        for i, candidates in slots.items():
            table, scores = self._tables[i], [_NONE]
            # Whole rows may be more than memory holds.
            for some in candidates.split(table.block_rows):
                rows = RowsToJudge(
                    table.ids_of(table.keys_of(some)), table.gathered(some, table.rectangle.columns)
                )
                scores.append(policy.scores(rows, request.clock))
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
        if last.equal - num_tied > (last.below + num_tied) // _FEW:
            bounds = [self._likely_bound(number, last, num_tied), _LAST_KEY]
        for bound in bounds:
            found = {i: _rows_up_to(self._tables[i], each, last, bound) for i, each in judged.items()}
            if bound == _LAST_KEY:
                break
            own = torch.tensor([self._count(found)])
            if int(self._everyone.sum(own)) >= last.below + num_tied:
                break
        return found

    def _likely_bound(self, number: int, last: Nth, num_tied: int) -> int:
        """Return a key that probably has ``num_tied`` tied rows at or below it, and not many more.

        Keys are spread evenly; of the same score, those up to a key may have gone before.
        """
        score, key = self._passed.get(number, (last.value, FIRST_KEY))
        first = key if score == last.value else FIRST_KEY
        wanted = num_tied + 8 * math.isqrt(num_tied) + 64
        return min(_LAST_KEY, first + (_LAST_KEY - first) * wanted // last.equal)

    def _first(self, number: int, found: FoundRows, wanted: int) -> dict[int, Tensor]:
        """Return the slots of the rows with the least (score, key), at most so many. Collective."""
        rows, num_going = found.rows, min(wanted, found.number)
        if self._everyone.size == len(rows) == 1:
            ((i, own),) = rows.items()
            going = own.slots[:num_going]
            self._passed[number] = int(own.scores[num_going - 1]), int(self._tables[i].keys_of(going[-1:]))
            return {i: going}
        counted: list[tuple[Tensor, Tensor | None]] = [
            (own.scores, None) for i, own in rows.items() if self._counts(i)
        ]
        last = nth(counted, num_going, range_of(counted, self._everyone), self._everyone)
        keys = {i: self._tables[i].keys_of(own.slots) for i, own in rows.items()}
        tied = {i: own.scores == last.value for i, own in rows.items()}
        counted = [(keys[i], tied[i]) for i in rows if self._counts(i)]
        spread_of_keys = range_of(counted, self._everyone)
        key = nth(counted, num_going - last.below, spread_of_keys, self._everyone).value
        self._passed[number] = last.value, key
        return {
            i: own.slots[(keys[i] <= key).logical_and_(tied[i]).logical_or_(own.scores < last.value)]
            for i, own in rows.items()
        }


def _candidates(table: HashedTable, update: InUpdate) -> Tensor:
    """Return which rows may be evicted, bool by slot: all except those of the update."""
    free = table.memory[""][: table.slots.num_slots].clone()
    for slots in (update.gone, update.slots):
        free.index_fill_(0, slots, False)
    return free


def _rows_up_to(table: HashedTable, judged: SlotScores, last: Nth, most: int) -> NextRows:
    """Return the rows below the score ``last``, and those with it and keys up to ``most``."""
    marks = (judged.scores <= last.value).logical_and_(judged.marks)
    if int(marks.count_nonzero()) * _FEW >= table.slots.num_live:
        keys, slots = table.slots.marked(marks, _LAST_KEY if last.below else most)
    else:
        slots = marks.nonzero()[:, 0]
        keys = table.keys_of(slots)
    if last.below:
        scores = judged.scores.index_select(0, slots)
    else:
        scores = judged.scores.new_full((1,), last.value).expand(len(slots))
    is_inside = (scores < last.value).logical_or_(keys <= most)
    if not bool(is_inside.all()):
        scores, keys, slots = (each[is_inside] for each in (scores, keys, slots))
    return NextRows(scores, slots).at(order_of_rows(scores, keys))


def order_of_rows(scores: Tensor, keys: Tensor) -> Tensor:
    """Return the positions of rows in the order of (score, key), int64.

    Args:
        scores: int32 or int64.
        keys: int64, distinct.
    """
    if len(keys) == 0:
        return keys
    least, greatest = (int(each) for each in scores.aminmax())
    bits = (greatest - least).bit_length()
    if bits == 0:
        return order(keys)
    if bits <= _MOST_SCORE_BITS:
        # The score above the highest bits of the key, in one word. In nearly all cases these tell keys apart.
        ranks = (scores.long() - least) << (64 - bits)
        words = (ranks | (keys >> bits) + (1 << (63 - bits))) ^ FIRST_KEY
        positions = order(words)
        words = words.index_select(0, positions)
        if not bool((words[1:] == words[:-1]).any()):
            return positions
    by_key = order(keys)
    return by_key[scores[by_key].argsort(stable=True)]


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
