"""Victim selection in a full table, by all ranks together.

[Note: the order of eviction]

A search for the rows with the lowest scores reads the scores of all rows. Under ``LRU`` and ``TTL`` a score
changes only when the row is used, and is then higher than all scores of rows unused since. So the next
victims are known in advance, except for rows used in the meantime. A search therefore finds several times as
many rows as needed: all rows up to some (score, key), in this order. Later evictions take the first
rows with unchanged scores, and search again when too few are left.
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
from meshrec.tables.hashed.keys import FIRST_KEY, Clock, RowsToJudge
from meshrec.tables.hashed.table import ALIVE, HashedRows, HashedTable

# Shape legend: N rows, S slots.

_NONE = torch.empty(0, dtype=torch.int64)
_DIGIT_BITS = 12  # bits per round in `nth_smallest`: histograms with 4096 counts
_LAST_KEY = (1 << 63) - 1
_MOST_SCORE_BITS = 32  # score range up to which score and key are sorted as one word
_FEW = 8  # below 1/8 of the live rows, look keys up one by one; also the tolerated surplus tie share
_AT_ONCE = 16  # evictions per search: a quarter of the table, at 12 to 16 bytes per row


class RankGroup(Protocol):
    """Ranks holding parts of the same tables."""

    @property
    def rank(self) -> int:
        """This rank's position."""

    @property
    def size(self) -> int:
        """Rank count."""

    def sum(self, values: Tensor) -> Tensor:
        """Sum int64 values over all ranks. Collective."""

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum row values over the ranks with other columns in the rows. Collective.

        Args:
            table: table number.
            values: one value per row, for every local rectangle in the table.
        """


class SingleRank:
    """The only rank, which holds whole tables. Sums return their input."""

    rank, size = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values unchanged."""
        return list(values)


class SlotScores(NamedTuple):
    """A rectangle's row scores, by slot."""

    scores: Tensor
    """int32 or int64 [S]."""
    marks: Tensor
    """Whether the row in a slot may be evicted, bool [S]."""


class ValueRange(NamedTuple):
    """Minimum, maximum and value count."""

    least: int
    greatest: int
    number: int


class NthValue(NamedTuple):
    """The n-th smallest value, and counts of smaller and equal values."""

    value: int
    below: int
    """Smaller value count."""
    equal: int
    """Equal value count, including this one."""


class InUpdate(NamedTuple):
    """A rectangle's rows barred from eviction."""

    slots: Tensor
    """Slots for all IDs in the update; may repeat."""
    evicted: Tensor
    """Slots evicted for another reason, such as TTL."""


class EvictionRequest(NamedTuple):
    """Row count to evict from a table."""

    update: Mapping[int, InUpdate]
    """Rows not to select, by rectangle."""
    clock: Clock
    """Update time."""
    min_rows: int
    """Minimum row count to evict."""
    max_rows: int
    """Row count to evict if enough rows can be evicted."""


class NextRows(NamedTuple):
    """A rectangle's rows in eviction order: by score, then by key."""

    scores: Tensor
    """int32 or int64 [N]."""
    slots: Tensor
    """int64 [N]."""

    def select(self, positions: Tensor) -> "NextRows":
        """Return the rows at some positions in this order."""
        return NextRows(*(part.index_select(0, positions) for part in self))


class Candidates(NamedTuple):
    """A table's next rows to evict."""

    rows: Mapping[int, NextRows]
    """Rows by rectangle."""
    number: int
    """Row count, over all ranks."""


class CachedCandidates(NamedTuple):
    """A table's next rows to evict, cached from a search for later evictions."""

    rows: Mapping[int, NextRows]
    """Rows by rectangle."""
    time: int
    """Score for a row used at search time. All cached rows have lower scores."""
    loads: Mapping[int, int]
    """``RowAccounting.loads`` per rectangle at search time; another value invalidates the cache."""


class Evictions:
    """Selects victims in the hashed tables looked up together on a rank.

    Args:
        tables: rectangles on this rank, by rectangle number.
        storages: storages of all hashed tables, by table number.
        ranks: ranks sharing the tables.
    """

    def __init__(
        self, tables: Mapping[int, HashedTable], storages: Mapping[int, HashedRows], ranks: RankGroup
    ) -> None:
        self._tables, self._storages, self._ranks = tables, storages, ranks
        self._passed: dict[int, tuple[int, int]] = {}
        """Last evicted row's score and key, by table: where ties in the next search may start."""
        # From a search until the cached rows run out, rows are loaded, or ``forget``.
        self._cached: dict[int, CachedCandidates] = {}

    def forget(self) -> None:
        """Drop results from earlier searches."""
        self._passed, self._cached = {}, {}

    def select_victims(self, requests: Mapping[int, EvictionRequest]) -> dict[int, dict[int, Tensor] | int]:
        """Select the rows to evict. Collective.

        Args:
            requests: by table number.

        Returns:
            By table number: the slots to evict by rectangle; or the number of evictable rows, if
                it is below ``min_rows``.
        """
        victims: dict[int, dict[int, Tensor] | int] = {}
        candidates = self._valid_cached(requests)
        for number, request in requests.items():
            rows = candidates[number]
            if rows.number < request.max_rows:
                rows = self._search(number, request)
            is_enough = rows.number >= request.min_rows
            victims[number] = self._select_first(number, rows, request.max_rows) if is_enough else rows.number
        return victims

    def _valid_cached(self, requests: Mapping[int, EvictionRequest]) -> dict[int, Candidates]:
        """Return the cached rows that may still be evicted. Collective."""
        cached = {}
        for number, request in requests.items():
            time = self._present_score(number, request)
            searched = self._cached.pop(number, None)
            # Cached scores are valid only if time has not gone back.
            if searched is not None and time is not None and time >= searched.time:
                cached[number] = searched
        rectangles = [(number, i) for number, searched in cached.items() for i in searched.rows]
        updates = [requests[number].update[i] for number, i in rectangles]
        rows = [cached[number].rows[i] for number, i in rectangles]
        *positions, skipped = first_left(
            [ordered.scores for ordered in rows],
            [ordered.slots for ordered in rows],
            [self._scores(i, requests[number].clock) for number, i in rectangles],
            [self._tables[i].memory[ALIVE] for _, i in rectangles],
            [update.slots for update in updates],
            [update.evicted for update in updates],
            [requests[number].max_rows for number, _ in rectangles],
        )
        left: dict[int, dict[int, NextRows]] = {number: {} for number in requests}
        candidates: dict[int, dict[int, NextRows]] = {number: {} for number in requests}
        for (number, i), ordered, unchanged, num in zip(
            rectangles, rows, positions, skipped.tolist(), strict=True
        ):
            candidates[number][i] = ordered.select(unchanged)
            left[number][i] = NextRows(ordered.scores[num:], ordered.slots[num:])
        counts = torch.zeros(2, len(requests), dtype=torch.int64)
        for column, (number, table_rows) in enumerate(candidates.items()):
            counts[0, column] = self._count(table_rows)
            if number in cached:
                # Stale on any rank means stale on all ranks, which must search together.
                counts[1, column] = cached[number].loads != self._loads(table_rows)
        totals, num_stale = self._ranks.sum(counts.view(-1)).view(2, -1).tolist()
        result = {}
        for number, total, is_stale in zip(requests, totals, num_stale, strict=True):
            result[number] = Candidates(candidates[number], 0 if is_stale else total)
            if number in cached and not is_stale:
                self._cached[number] = cached[number]._replace(rows=left[number])
        return result

    def _search(self, number: int, request: EvictionRequest) -> Candidates:
        """Find rows to evict: at least the requested number, or all evictable rows. Collective.

        Caches more rows for later evictions if the policy allows.
        """
        time, num_rows = self._present_score(number, request), request.max_rows
        judged = self._score_rows(number, request, with_update=time is not None)
        owned = [part for i, part in judged.items() if self._is_counted(i)]
        spread = global_range(owned, self._ranks)
        if time is not None:
            # Stagger the tables: first searches serve different eviction counts, so later
            # searches do not coincide.
            num_times = _AT_ONCE if number in self._passed else 1 + number % _AT_ONCE
            if spread.least >= time:
                num_times = 1  # none may be cached
            num_staying = sum(
                len(part.slots) + len(part.evicted)
                for i, part in request.update.items()
                if self._is_counted(i)
            )
            num_rows = num_times * num_rows + int(self._ranks.sum(torch.tensor([num_staying])))
        num_rows = min(num_rows, spread.number)
        if num_rows == 0:
            return Candidates(dict.fromkeys(judged, NextRows(_NONE, _NONE)), 0)
        last = nth_smallest(owned, num_rows, spread, self._ranks)
        rows = self._rows_up_to_score(number, judged, last, num_rows - last.below)
        if time is None:
            return Candidates(rows, int(self._ranks.sum(torch.tensor([self._count(rows)]))))
        self._cached[number] = CachedCandidates(rows, time, self._loads(rows))
        candidates = self._valid_cached({number: request})[number]
        if last.value >= time:
            self._cached.pop(number, None)
        return candidates

    def _present_score(self, number: int, request: EvictionRequest) -> int | None:
        """Return the score for a row used now.

        None if search scores are not valid for later evictions.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        return policy.score_of_use(request.clock)

    def _loads(self, rectangles: Iterable[int]) -> dict[int, int]:
        """Return load counters by rectangle."""
        return {i: self._tables[i].accounting.loads for i in rectangles}

    def _is_counted(self, rectangle: int) -> bool:
        """Return whether a rectangle's rows are counted: only in the column shard with column 0."""
        return self._tables[rectangle].rectangle.c0 == 0

    def _count(self, rows: Mapping[int, NextRows]) -> int:
        """Return the row count in counted rectangles."""
        return sum(len(ordered.slots) for i, ordered in rows.items() if self._is_counted(i))

    def _scores(self, rectangle: int, clock: Clock) -> Tensor:
        """Return scores by slot, for a policy reading only policy parts."""
        table = self._tables[rectangle]
        policy = table.storage.keys.evict
        assert policy is not None
        num = table.slots.num_slots
        parts = {part.name: table.memory[part.name][:num] for part in policy.parts}
        return policy.scores(RowsToJudge(_NONE, parts), clock)

    def _score_rows(
        self, number: int, request: EvictionRequest, *, with_update: bool
    ) -> dict[int, SlotScores]:
        """Return a table's row scores, by rectangle.

        Collective if scores read whole rows.

        Args:
            number: table number.
            request: eviction to prepare.
            with_update: whether rows barred from eviction are marked, too.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        marks = {
            i: self._tables[i].memory[ALIVE][: self._tables[i].slots.num_slots]
            if with_update
            else _evictable(self._tables[i], update)
            for i, update in request.update.items()
        }
        if not policy.needs_rows:
            return {i: SlotScores(self._scores(i, request.clock), marked) for i, marked in marks.items()}
        slots = {i: marked.nonzero()[:, 0] for i, marked in marks.items()}
        sums = []
        for i, candidates in slots.items():
            table, scores = self._tables[i], [_NONE]
            # Whole rows may exceed memory.
            for some in candidates.split(table.block_rows):
                rows = RowsToJudge(
                    table.ids_of(table.keys_of(some)), table.gather_parts(some, table.rectangle.columns)
                )
                scores.append(policy.scores(rows, request.clock))
            sums.append(torch.cat(scores))
        by_rectangle = {}
        for (i, marked), row_sums in zip(marks.items(), self._ranks.row_sums(number, sums), strict=True):
            by_slot = torch.zeros(len(marked), dtype=torch.int64).index_copy_(0, slots[i], row_sums)
            by_rectangle[i] = SlotScores(by_slot, marked)
        return by_rectangle

    def _rows_up_to_score(
        self, number: int, judged: Mapping[int, SlotScores], last: NthValue, num_tied: int
    ) -> dict[int, NextRows]:
        """Return the rows with a score below ``last``, and rows with an equal score, by rectangle.

        Collective.

        Args:
            number: table number.
            judged: scores by rectangle.
            last: the last victim's score.
            num_tied: minimum count of rows with an equal score to return, by ascending key.
        """
        bounds = [_LAST_KEY]
        if last.equal - num_tied > (last.below + num_tied) // _FEW:
            bounds = [self._likely_bound(number, last, num_tied), _LAST_KEY]
        # With many ties, first try a key bound, to avoid sorting them all.
        for bound in bounds:
            rows = {i: _rows_up_to(self._tables[i], scores, last, bound) for i, scores in judged.items()}
            if bound == _LAST_KEY:
                break
            count = torch.tensor([self._count(rows)])
            if int(self._ranks.sum(count)) >= last.below + num_tied:
                break
        return rows

    def _likely_bound(self, number: int, last: NthValue, num_tied: int) -> int:
        """Return a key up to which there are probably at least ``num_tied`` tied rows, but few more.

        Keys are spread evenly. If ties with this score were evicted before, they had the smallest keys.
        """
        score, key = self._passed.get(number, (last.value, FIRST_KEY))
        first = key if score == last.value else FIRST_KEY
        # About eight standard deviations above the mean, so a second pass is rare.
        num_keys = num_tied + 8 * math.isqrt(num_tied) + 64
        return min(_LAST_KEY, first + (_LAST_KEY - first) * num_keys // last.equal)

    def _select_first(self, number: int, candidates: Candidates, num_victims: int) -> dict[int, Tensor]:
        """Return slots for the first ``num_victims`` candidates by (score, key), by rectangle.

        Collective.
        """
        rows, num_going = candidates.rows, min(num_victims, candidates.number)
        # A single rectangle holds all rows in order already.
        if self._ranks.size == len(rows) == 1:
            ((i, ordered),) = rows.items()
            going = ordered.slots[:num_going]
            self._passed[number] = (
                int(ordered.scores[num_going - 1]),
                int(self._tables[i].keys_of(going[-1:])),
            )
            return {i: going}
        counted: list[tuple[Tensor, Tensor | None]] = [
            (ordered.scores, None) for i, ordered in rows.items() if self._is_counted(i)
        ]
        last = nth_smallest(counted, num_going, global_range(counted, self._ranks), self._ranks)
        keys = {i: self._tables[i].keys_of(ordered.slots) for i, ordered in rows.items()}
        tied = {i: ordered.scores == last.value for i, ordered in rows.items()}
        counted = [(keys[i], tied[i]) for i in rows if self._is_counted(i)]
        spread_of_keys = global_range(counted, self._ranks)
        key = nth_smallest(counted, num_going - last.below, spread_of_keys, self._ranks).value
        self._passed[number] = last.value, key
        return {
            i: ordered.slots[(keys[i] <= key).logical_and_(tied[i]).logical_or_(ordered.scores < last.value)]
            for i, ordered in rows.items()
        }


def _evictable(table: HashedTable, update: InUpdate) -> Tensor:
    """Return which slots hold an evictable row: live, and not protected by the update. bool [S]."""
    free = table.memory[ALIVE][: table.slots.num_slots].clone()
    for slots in (update.evicted, update.slots):
        free.index_fill_(0, slots, False)
    return free


def _rows_up_to(table: HashedTable, judged: SlotScores, last: NthValue, most: int) -> NextRows:
    """Return the rows with a score below ``last``, and tied rows with a key up to ``most``."""
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
        scores, keys, slots = (part[is_inside] for part in (scores, keys, slots))
    return NextRows(scores, slots).select(order_of_rows(scores, keys))


def order_of_rows(scores: Tensor, keys: Tensor) -> Tensor:
    """Return the permutation sorting rows by (score, key), int64 [N].

    Args:
        scores: int32 or int64.
        keys: int64, distinct.
    """
    if len(keys) == 0:
        return keys
    least, greatest = (int(bound) for bound in scores.aminmax())
    bits = (greatest - least).bit_length()
    if bits == 0:
        return order(keys)
    if bits <= _MOST_SCORE_BITS:
        # Score above the key's highest bits, in a single word. These bits nearly always distinguish the keys.
        ranks = (scores.long() - least) << (64 - bits)
        words = (ranks | (keys >> bits) + (1 << (63 - bits))) ^ FIRST_KEY
        positions = order(words)
        words = words.index_select(0, positions)
        if not bool((words[1:] == words[:-1]).any()):
            return positions
    by_key = order(keys)
    return by_key[scores[by_key].argsort(stable=True)]


def global_range(parts: Sequence[tuple[Tensor, Tensor | None]], ranks: RankGroup) -> ValueRange:
    """Return minimum, maximum and count for marked values over all ranks. Collective.

    Args:
        parts: this rank's values, with a bool mark per value (None: all are marked).
        ranks: the ranks.
    """
    ranges = torch.zeros(ranks.size, 3, dtype=torch.int64)
    local_ranges = [marked_range(*part) for part in parts]
    if local_ranges:
        least, greatest, counts = torch.stack(local_ranges).unbind(1)
        ranges[ranks.rank] = torch.stack([least.min(), greatest.max(), counts.sum()])
    rows = [row for row in ranks.sum(ranges.view(-1)).view(-1, 3).tolist() if row[2]]
    if not rows:
        return ValueRange(0, 0, 0)
    least_of, greatest_of, number_of = zip(*rows, strict=True)
    return ValueRange(min(least_of), max(greatest_of), sum(number_of))


def nth_smallest(
    parts: Sequence[tuple[Tensor, Tensor | None]], n: int, spread: ValueRange, ranks: RankGroup
) -> NthValue:
    """Return the n-th smallest marked value over all ranks. Collective.

    A radix select: every round determines 12 value bits from histograms summed over ranks.

    Args:
        parts: this rank's values, with a bool mark per value (None: all are marked).
        n: counted from 1, at most ``spread.number``.
        spread: ``global_range`` result for the same values.
        ranks: the ranks.
    """
    size, shift = 1 << _DIGIT_BITS, 0
    while (spread.greatest >> shift) - (spread.least >> shift) >= size:
        shift += 1
    base, below = spread.least, 0
    while True:
        histogram = torch.zeros(size, dtype=torch.int64)
        for part in parts:
            histogram += marked_histogram(*part, base, shift, size)
        # A round fixes the next 12 bits, so ranks exchange histograms and never the values.
        counts = ranks.sum(histogram)
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, n - below))
        equal = int(counts[digit])
        below += int(ends[digit]) - equal
        base = ((base >> shift) + digit) << shift
        if shift == 0:
            return NthValue(base, below, equal)
        greatest = min(_LAST_KEY, base + (1 << shift) - 1)
        parts = [(part[0][marked_between(*part, base, greatest)], None) for part in parts]
        shift = max(0, shift - _DIGIT_BITS)
