"""Victim selection in full tables: all ranks together find the rows with the lowest eviction scores.

A table is cut into rectangles (a key interval times a column interval), and a rank holds some of them. The
policy (``keys.Eviction``) gives every row an integer score. The row with the lowest score is evicted first;
among rows with equal scores, the row with the smallest key.

[Note: the order of eviction]

A search for the rows with the lowest scores reads the scores of all rows. Under ``LRU`` and ``TTL``, a row's
score changes only when the row is used, and is then at least as high as every other score. So a
search also knows the victims after the next ones, unless those rows are used in the meantime. It therefore
returns several times as many rows as needed, sorted by (score, key), and the ranks cache them. Later
evictions take the first cached rows with unchanged scores, and search again when too few are left.
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
from meshrec.tables.hashed.row_store import ALIVE
from meshrec.tables.hashed.table import HashedRows, HashedTable

# Shape legend: N rows, S slots.

_NONE = torch.empty(0, dtype=torch.int64)
_DIGIT_BITS = 12  # bits per round in `_nth_smallest`: histograms with 4096 counts
_LAST_KEY = (1 << 63) - 1
# If the scores span at most this many bits, score and key are sorted as a single 64-bit word.
_MOST_SCORE_BITS = 32
# If fewer than 1/8 of the live rows are selected, their keys are looked up slot by slot instead of in a
# scan over the index.
_SCAN_SHARE = 8
# Up to 1/8 more rows than needed are sorted, if the excess rows are tied with the last victim.
_TIE_SURPLUS_SHARE = 8
# Evictions served by a search. An eviction takes 1/64 of the rows, so the cached rows are a quarter of the
# table, with 12 to 16 bytes (score and slot) per row.
_EVICTIONS_PER_SEARCH = 16


class RankGroup(Protocol):
    """The ranks among which the same tables are split, and the sums over these ranks."""

    @property
    def rank(self) -> int:
        """Position of this rank in the group, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Return the elementwise sum of an int64 tensor over all ranks. Collective."""

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Sum values per row, such as squared norms, over the column shards of a table. Collective.

        Adds to every row's value the values from the ranks holding the row's other columns.

        Args:
            table: table number.
            values: for every local rectangle in the table, one int64 value per row.

        Returns:
            The sums in the same shapes.
        """


class SingleRank:
    """``RankGroup`` for a process with whole tables: the sums return their input."""

    rank, size = 0, 1

    def sum(self, values: Tensor) -> Tensor:
        """Return the values unchanged."""
        return values

    def row_sums(self, table: int, values: Sequence[Tensor]) -> list[Tensor]:
        """Return the values unchanged."""
        return list(values)


class SlotScores(NamedTuple):
    """Eviction scores for the S slots (row positions) of a rectangle, and which slots to consider."""

    scores: Tensor
    """Score of the row in a slot, int32 or int64 [S]. Meaningless at slots that are not marked."""
    marks: Tensor
    """Whether a slot holds a row to consider, bool [S]."""


class ValueRange(NamedTuple):
    """Smallest value, greatest value, and number of values, over all ranks."""

    least: int
    greatest: int
    number: int


class NthValue(NamedTuple):
    """The n-th smallest value over all ranks, and how many values are smaller or equal."""

    value: int
    below: int
    """Number of smaller values."""
    equal: int
    """Number of values equal to ``value``, including itself."""


class ProtectedRows(NamedTuple):
    """Rows in a rectangle that must not be selected as victims at this update."""

    slots: Tensor
    """Slots of all IDs in the update, int64; may repeat."""
    evicted: Tensor
    """Slots already selected for eviction for another reason, such as TTL, int64."""


class EvictionRequest(NamedTuple):
    """How many rows to evict from a table at an update, and which rows to spare."""

    update: Mapping[int, ProtectedRows]
    """Rows not to select, by rectangle number."""
    clock: Clock
    """Time of the update."""
    min_rows: int
    """Number of rows that must be evicted to meet the row limit."""
    max_rows: int
    """Number of rows to evict, unless fewer can be evicted. Exceeds ``min_rows``, so the table has room
    for the next updates."""


class OrderedRows(NamedTuple):
    """Rows in a rectangle in eviction order, that is by score, then by key. N rows."""

    scores: Tensor
    """Scores, ascending, int32 or int64 [N]."""
    slots: Tensor
    """Slots of these rows, int64 [N]."""

    def select(self, positions: Tensor) -> "OrderedRows":
        """Return the rows at these positions of the list (not slots), int64."""
        return OrderedRows(*(part.index_select(0, positions) for part in self))


class Candidates(NamedTuple):
    """Rows in a table that may be evicted now and come before all other rows in eviction order."""

    rows: Mapping[int, OrderedRows]
    """The candidates on this rank, by rectangle number."""
    number: int
    """Number of candidates over all ranks."""


class CachedCandidates(NamedTuple):
    """Candidates in a table left over from a search, cached for later evictions."""

    rows: Mapping[int, OrderedRows]
    """The candidates on this rank, by rectangle number."""
    use_score: int
    """Score of rows used by the update during which the search ran. All cached rows have lower scores."""
    loads: Mapping[int, int]
    """``RowAccounting.loads`` by rectangle number at the search. If it differs later, rows were loaded since,
    and the candidates are stale."""


class Evictions:
    """Selection of the rows to evict (victims) from the hashed tables looked up by a module.

    A search finds more candidates than needed, and caches the others for later updates. All ranks must call
    the collective methods in the same order.

    Args:
        tables: rectangles on this rank, by rectangle number.
        storages: storages of all hashed tables on all ranks, by table number.
        ranks: the ranks among which the tables are split.
    """

    def __init__(
        self, tables: Mapping[int, HashedTable], storages: Mapping[int, HashedRows], ranks: RankGroup
    ) -> None:
        self._tables, self._storages, self._ranks = tables, storages, ranks
        self._last_evicted: dict[int, tuple[int, int]] = {}
        """Score and key for the row evicted last, by table number. Rows with the same score and smaller keys
        are gone, so remaining ties have greater keys. Used to guess a key bound; a wrong value only costs a
        second pass."""
        # By table number. An entry lives from a search until the next search, until rows are loaded into the
        # table, until time goes back, or until ``forget``.
        self._cached: dict[int, CachedCandidates] = {}

    def forget(self) -> None:
        """Drop the results of earlier searches. To be called after rows changed other than by updates."""
        self._last_evicted, self._cached = {}, {}

    def select_victims(self, requests: Mapping[int, EvictionRequest]) -> dict[int, dict[int, Tensor] | int]:
        """Select the rows to evict from full tables. Changes no table. Collective.

        Returns:
            By table number, the slots to evict by rectangle number. If fewer than ``min_rows`` rows can be
                evicted from a table, the value is the number of evictable rows instead.
        """
        victims: dict[int, dict[int, Tensor] | int] = {}
        # All tables at once, because the cached candidates of all tables are checked with a single sum.
        candidates = self._valid_cached(requests)
        for number, request in requests.items():
            rows = candidates[number]
            # The counts are sums over ranks, so all ranks decide alike whether to search.
            if rows.number < request.max_rows:
                rows = self._search(number, request)
            is_enough = rows.number >= request.min_rows
            victims[number] = self._select_first(number, rows, request.max_rows) if is_enough else rows.number
        return victims

    def _valid_cached(self, requests: Mapping[int, EvictionRequest]) -> dict[int, Candidates]:
        """Return the cached candidates that are still valid and not barred by the requests. Collective.

        Tables without cached candidates get an empty ``Candidates``. Stale candidates (evicted, or used since
        the search) at the head of a list are dropped from the cache.
        """
        cached = {}
        for number, request in requests.items():
            use_score = self._use_score(number, request)
            searched = self._cached.pop(number, None)
            # If time has gone back, a row used since may have a score below the cached ones.
            if searched is not None and use_score is not None and use_score >= searched.use_score:
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
        # Candidates stay cached after they are returned. The next call drops them: by then they are dead.
        left: dict[int, dict[int, OrderedRows]] = {number: {} for number in requests}
        candidates: dict[int, dict[int, OrderedRows]] = {number: {} for number in requests}
        for (number, i), ordered, unchanged, num in zip(
            rectangles, rows, positions, skipped.tolist(), strict=True
        ):
            candidates[number][i] = ordered.select(unchanged)
            left[number][i] = OrderedRows(ordered.scores[num:], ordered.slots[num:])
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
        """Find candidates by reading all scores in a table. Collective.

        Returns at least ``max_rows`` candidates, or all evictable rows if there are fewer. If the policy
        allows, the search finds and caches candidates for later evictions, too.
        """
        use_score, num_rows = self._use_score(number, request), request.max_rows
        slot_scores = self._score_rows(number, request, with_update=use_score is not None)
        owned = [part for i, part in slot_scores.items() if self._is_counted(i)]
        value_range = _global_range(owned, self._ranks)
        if use_score is not None:
            # Stagger the tables: first searches serve different eviction counts, so later
            # searches do not coincide.
            num_times = (
                _EVICTIONS_PER_SEARCH if number in self._last_evicted else 1 + number % _EVICTIONS_PER_SEARCH
            )
            if value_range.least >= use_score:
                num_times = 1  # only rows with scores below ``use_score`` may be cached, and there are none
            # Rows in the update are marked, too, but cannot be victims now: find as many more.
            num_staying = sum(
                len(part.slots) + len(part.evicted)
                for i, part in request.update.items()
                if self._is_counted(i)
            )
            num_rows = num_times * num_rows + int(self._ranks.sum(torch.tensor([num_staying])))
        num_rows = min(num_rows, value_range.number)
        # All ranks return here together, because ``num_rows`` comes from sums over ranks.
        if num_rows == 0:
            return Candidates(dict.fromkeys(slot_scores, OrderedRows(_NONE, _NONE)), 0)
        last = _nth_smallest(owned, num_rows, value_range, self._ranks)
        rows = self._lowest_rows(number, slot_scores, last, num_rows - last.below)
        if use_score is None:
            return Candidates(rows, int(self._ranks.sum(torch.tensor([self._count(rows)]))))
        self._cached[number] = CachedCandidates(rows, use_score, self._loads(rows))
        # Removes the rows in the update, which the search has included.
        candidates = self._valid_cached({number: request})[number]
        # Rows used from now on may get the score ``use_score`` and a smaller key than a candidate with that
        # score.
        if last.value >= use_score:
            self._cached.pop(number, None)
        return candidates

    def _use_score(self, number: int, request: EvictionRequest) -> int | None:
        """Return the score for a row used at this update.

        None if the policy's scores also change without use, so candidates cannot be cached.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        return policy.score_of_use(request.clock)

    def _loads(self, rectangles: Iterable[int]) -> dict[int, int]:
        """Return the number of ``load`` calls so far for these rectangles, by rectangle number."""
        return {i: self._tables[i].accounting.loads for i in rectangles}

    def _is_counted(self, rectangle: int) -> bool:
        """Return whether rows in a rectangle count in sums over ranks.

        A row split by columns lies in several rectangles. It counts only in the rectangle with column 0.
        """
        return self._tables[rectangle].rectangle.c0 == 0

    def _count(self, rows: Mapping[int, OrderedRows]) -> int:
        """Return the number of rows on this rank in a candidate list. A row split by columns counts once."""
        return sum(len(ordered.slots) for i, ordered in rows.items() if self._is_counted(i))

    def _scores(self, rectangle: int, clock: Clock) -> Tensor:
        """Return the score per slot, int32 or int64 [S], for a policy with ``needs_rows`` False."""
        table = self._tables[rectangle]
        policy = table.storage.keys.evict
        assert policy is not None
        num = table.key_index.num_slots
        parts = {part.name: table.memory[part.name][:num] for part in policy.parts}
        return policy.scores(RowsToJudge(_NONE, parts), clock)

    def _score_rows(
        self, number: int, request: EvictionRequest, *, with_update: bool
    ) -> dict[int, SlotScores]:
        """Return the scores of all live rows in a table, by rectangle number.

        Collective if the policy's scores depend on weights or optimizer state.

        Args:
            with_update: whether rows that the request bars from eviction are marked, too.
        """
        policy = self._storages[number].keys.evict
        assert policy is not None
        # Slots with rows to consider, per rectangle.
        marks = {
            i: self._tables[i].memory[ALIVE][: self._tables[i].key_index.num_slots]
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
            # In blocks, because the gathered rows of a whole table may exceed the memory.
            for some in candidates.split(table.store.block_rows):
                rows = RowsToJudge(
                    table.ids_of(table.keys_at(some)), table.store.gather(some, table.rectangle.columns)
                )
                scores.append(policy.scores(rows, request.clock))
            sums.append(torch.cat(scores))
        by_rectangle = {}
        for (i, marked), row_sums in zip(marks.items(), self._ranks.row_sums(number, sums), strict=True):
            by_slot = torch.zeros(len(marked), dtype=torch.int64).index_copy_(0, slots[i], row_sums)
            by_rectangle[i] = SlotScores(by_slot, marked)
        return by_rectangle

    def _lowest_rows(
        self, number: int, slot_scores: Mapping[int, SlotScores], last: NthValue, num_tied: int
    ) -> dict[int, OrderedRows]:
        """Return all rows with a score below ``last.value``, and at least ``num_tied`` rows with this score.

        Among the rows with the score ``last.value`` (tied rows), the smallest keys are returned. Collective.
        """
        bounds = [_LAST_KEY]
        if last.equal - num_tied > (last.below + num_tied) // _TIE_SURPLUS_SHARE:
            bounds = [self._likely_bound(number, last, num_tied), _LAST_KEY]
        # With many ties, first try only keys up to a bound, to avoid sorting all ties. The last bound admits
        # every key, so the loop always ends with enough rows.
        for bound in bounds:
            rows = {
                i: _lowest_rows_in(self._tables[i], scores, last, bound) for i, scores in slot_scores.items()
            }
            if bound == _LAST_KEY:
                break
            count = torch.tensor([self._count(rows)])
            if int(self._ranks.sum(count)) >= last.below + num_tied:
                break
        return rows

    def _likely_bound(self, number: int, last: NthValue, num_tied: int) -> int:
        """Guess a key such that slightly more than ``num_tied`` tied rows have a key up to it.

        Keys are hashes, so the tied rows are spread evenly over the key range. If rows with this score were
        evicted before, the range starts after their keys.
        """
        score, key = self._last_evicted.get(number, (last.value, FIRST_KEY))
        first = key if score == last.value else FIRST_KEY
        # The number of ties up to a key has a standard deviation of at most about sqrt(num_tied). Eight of
        # them above the mean make a second pass rare; 64 more cover small counts.
        num_keys = num_tied + 8 * math.isqrt(num_tied) + 64
        return min(_LAST_KEY, first + (_LAST_KEY - first) * num_keys // last.equal)

    def _select_first(self, number: int, candidates: Candidates, num_victims: int) -> dict[int, Tensor]:
        """Select the first candidates in eviction order over all ranks. Collective."""
        rows, num_victims = candidates.rows, min(num_victims, candidates.number)
        # A single rectangle holds all rows in order already.
        if self._ranks.size == len(rows) == 1:
            ((i, ordered),) = rows.items()
            victims = ordered.slots[:num_victims]
            self._last_evicted[number] = (
                int(ordered.scores[num_victims - 1]),
                int(self._tables[i].keys_at(victims[-1:])),
            )
            return {i: victims}
        # Find the last victim's score, then the last key among the candidates with this score.
        counted: list[tuple[Tensor, Tensor | None]] = [
            (ordered.scores, None) for i, ordered in rows.items() if self._is_counted(i)
        ]
        last = _nth_smallest(counted, num_victims, _global_range(counted, self._ranks), self._ranks)
        keys = {i: self._tables[i].keys_at(ordered.slots) for i, ordered in rows.items()}
        tied = {i: ordered.scores == last.value for i, ordered in rows.items()}
        counted = [(keys[i], tied[i]) for i in rows if self._is_counted(i)]
        key_range = _global_range(counted, self._ranks)
        key = _nth_smallest(counted, num_victims - last.below, key_range, self._ranks).value
        self._last_evicted[number] = last.value, key
        return {
            i: ordered.slots[(keys[i] <= key).logical_and_(tied[i]).logical_or_(ordered.scores < last.value)]
            for i, ordered in rows.items()
        }


def _evictable(table: HashedTable, update: ProtectedRows) -> Tensor:
    """Return whether a slot holds a live row that the update does not bar from eviction, bool [S]."""
    free = table.memory[ALIVE][: table.key_index.num_slots].clone()
    for slots in (update.evicted, update.slots):
        free.index_fill_(0, slots, False)
    return free


def _lowest_rows_in(table: HashedTable, slot_scores: SlotScores, last: NthValue, max_key: int) -> OrderedRows:
    """Return marked rows with a score below ``last.value``, and tied rows up to the key ``max_key``."""
    marks = (slot_scores.scores <= last.value).logical_and_(slot_scores.marks)
    if int(marks.count_nonzero()) * _SCAN_SHARE >= table.key_index.num_live:
        keys, slots = table.key_index.marked(marks, _LAST_KEY if last.below else max_key)
    else:
        slots = marks.nonzero()[:, 0]
        keys = table.keys_at(slots)
    if last.below:
        scores = slot_scores.scores.index_select(0, slots)
    else:  # all selected rows are tied, so no score needs to be read
        scores = slot_scores.scores.new_full((1,), last.value).expand(len(slots))
    is_inside = (scores < last.value).logical_or_(keys <= max_key)
    if not bool(is_inside.all()):
        scores, keys, slots = (part[is_inside] for part in (scores, keys, slots))
    return OrderedRows(scores, slots).select(order_of_rows(scores, keys))


def order_of_rows(scores: Tensor, keys: Tensor) -> Tensor:
    """Return the permutation that sorts rows by score, then by key, int64 [N]."""
    if len(keys) == 0:
        return keys
    least, greatest = (int(bound) for bound in scores.aminmax())
    bits = (greatest - least).bit_length()
    if bits == 0:
        return order(keys)
    if bits <= _MOST_SCORE_BITS:
        # Sort a single word with the score in the highest bits and the start of the key below. The lowest
        # key bits are cut off. Keys are hashes, so the words are nearly always distinct; if not, sort again.
        ranks = (scores.long() - least) << (64 - bits)
        # The addition makes the key start non-negative, so it fits below the score. The xor turns the
        # unsigned order of the words into the signed order by which ``order`` sorts.
        words = (ranks | (keys >> bits) + (1 << (63 - bits))) ^ FIRST_KEY
        positions = order(words)
        words = words.index_select(0, positions)
        if not bool((words[1:] == words[:-1]).any()):
            return positions
    # Slow path: sort by key, then stably by score.
    by_key = order(keys)
    return by_key[scores[by_key].argsort(stable=True)]


def _global_range(parts: Sequence[tuple[Tensor, Tensor | None]], ranks: RankGroup) -> ValueRange:
    """Return the minimum, the maximum and the number of marked values over all ranks. Collective.

    Args:
        parts: pairs (values, marks) on this rank. Only values with a true mark count; without marks, all do.

    Returns:
        The range; all zeros if no rank has a marked value.
    """
    # A row per rank, filled only by that rank, so that a sum over ranks gathers all rows.
    ranges = torch.zeros(ranks.size, 3, dtype=torch.int64)
    local_ranges = [marked_range(*part) for part in parts]
    if local_ranges:
        least, greatest, counts = torch.stack(local_ranges).unbind(1)
        ranges[ranks.rank] = torch.stack([least.min(), greatest.max(), counts.sum()])
    # A rank without marked values has neither a minimum nor a maximum.
    rows = [row for row in ranks.sum(ranges.view(-1)).view(-1, 3).tolist() if row[2]]
    if not rows:
        return ValueRange(0, 0, 0)
    least_of, greatest_of, number_of = zip(*rows, strict=True)
    return ValueRange(min(least_of), max(greatest_of), sum(number_of))


def _nth_smallest(
    parts: Sequence[tuple[Tensor, Tensor | None]], n: int, value_range: ValueRange, ranks: RankGroup
) -> NthValue:
    """Return the n-th smallest marked value over all ranks. Collective.

    A radix select: every round counts values by their next 12 bits, sums these histograms over the ranks,
    and continues with the bucket that contains the n-th value. The values themselves are not exchanged.

    Args:
        parts: pairs (values, marks) on this rank. Only values with a true mark count; without marks, all do.
        n: position of the value in ascending order, from 1 to ``value_range.number``.
    """
    # Start with the bits in which the values can differ, so small ranges take a single round.
    size, shift = 1 << _DIGIT_BITS, 0
    while (value_range.greatest >> shift) - (value_range.least >> shift) >= size:
        shift += 1
    base, below = value_range.least, 0
    while True:
        histogram = torch.zeros(size, dtype=torch.int64)
        for part in parts:
            histogram += marked_histogram(*part, base, shift, size)
        counts = ranks.sum(histogram)
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, n - below))
        equal = int(counts[digit])
        below += int(ends[digit]) - equal
        base = ((base >> shift) + digit) << shift
        if shift == 0:
            return NthValue(base, below, equal)
        # Only values in the selected bucket take part in the next round.
        greatest = min(_LAST_KEY, base + (1 << shift) - 1)
        parts = [(part[0][marked_between(*part, base, greatest)], None) for part in parts]
        shift = max(0, shift - _DIGIT_BITS)
