"""The turnover of an update: the IDs to admit and the rows to evict, chosen on all ranks before any changes.

[Note: one threshold for all ranks]

Every rank tells how many rows each interval of keys has, and how many more it would have (one small sum over
ranks for all tables). If a table would be too full, the ranks find the score of the last row that must go,
digit by digit, from histograms that they add up. Of equal scores the least keys go: they are found in the
same way, first among those keys that are probably small enough. Rows of the update itself stay. Only
rectangles that begin at column 0 are counted, so that each row counts once; the others follow the threshold
with the same scores. A table that is full gives up a 64th of its rows, so that it is not searched in every
step.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshrec.ops.index import marked_between, marked_histogram, marked_range, unique
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_books import PinnedRows
from meshrec.tables.hashed_keys import TTL, Clock, RowsToJudge
from meshrec.tables.key_space import FIRST_KEY
from meshrec.tables.table import Span
from meshrec.tables.waiting import in_span

# N rows, U distinct IDs of an update

_NONE = torch.empty(0, dtype=torch.int64)
_NOBODY = torch.empty(0, dtype=torch.bool)
_DIGIT_BITS = 12
_LAST_KEY = (1 << 63) - 1
_SLACK = 64
_FEW = 8  # with fewer than an eighth of its slots, each is looked for in the index


def set_event_time(model: nn.Module, seconds: int) -> None:
    """Tell the tables of a model the event time, for ``TTL(seconds=...)``.

    Ranks may give different times: the latest one counts.

    Args:
        model: a model with fused or sharded tables.
        seconds: the time of the latest event in the batch, such as a Unix time.
    """
    for module in model.modules():
        own = getattr(module, "turnovers", None) or getattr(
            getattr(module, "tables", None), "turnovers", None
        )
        for turnover in own or ():
            turnover.seconds = max(turnover.seconds, int(seconds))


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


class Due(NamedTuple):
    """The turnover of one rectangle. U IDs of the update have no row yet."""

    slots: Tensor
    """The slots of all IDs of the update, which may repeat."""
    new: Tensor
    """The slots of IDs that have no row yet, in ascending order of their keys, int64 [U]."""
    keys: Tensor
    """The keys of ``new``, int64 [U]."""
    counts: Tensor
    """The number of times that the update has each ID of ``new``, int64 [U]."""
    admitted: Tensor
    """Whether each ID of ``new`` is admitted, bool [U]."""
    gone: Tensor
    """The slots of the rows to evict."""
    clock: Clock

    @property
    def num_admitted(self) -> int:
        """The number of IDs that are admitted."""
        return int(self.admitted.sum()) if len(self.admitted) else 0


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


class Decision(NamedTuple):
    """The turnover of all tables of a rank."""

    due: dict[int, Due]
    """The turnover of each rectangle, by its number."""
    live: dict[int, list[int]]
    """The number of rows that each interval of each table will have, by table."""


class Turnover:
    """The admission and eviction of IDs in the hashed tables that a rank looks up together.

    Args:
        tables: the rectangles of hashed tables that are here, by number.
        storages: the storages of all hashed tables, also of those that have no rows here, by table.
        intervals: for each of them the intervals of keys that no rectangle of any rank cuts.
        everyone: the ranks; None: this process has the whole tables.
    """

    def __init__(
        self,
        tables: Mapping[int, HashedTable],
        storages: Mapping[int, HashedRows],
        intervals: Mapping[int, Sequence[Span]],
        everyone: Everyone | None = None,
    ) -> None:
        self.tables, self.storages, self.intervals = dict(tables), dict(storages), dict(intervals)
        self._everyone: Everyone = everyone or Alone()
        self.live = {table: [0] * len(spans) for table, spans in intervals.items()}
        """The number of rows in each interval of each table, on whatever rank."""
        self.seconds = 0
        """The latest event time that was set on this rank."""
        self._passed: dict[int, tuple[int, int]] = {}
        """The score and the key of the last row that each table has evicted."""

    def recount(self) -> None:
        """Count the rows of all ranks anew. Collective."""
        self.live, self._passed = self._counted({}), {}

    def prepare(self, pins: Sequence[object], steps: Mapping[int, int]) -> Decision:
        """Compute the turnover of the next update, without changing anything yet. Collective.

        Args:
            pins: the pins of the rows that the update changes.
            steps: the number of the update, for each table that is trained.

        Raises:
            ValueError: a table is full and evicts nothing, or the update alone has too many IDs. All ranks
                raise it.
        """
        seconds = self._latest()
        due = {
            i: _due(table, pins, Clock(steps[table.rectangle.table], seconds))
            for i, table in self.tables.items()
            if table.rectangle.table in steps
        }
        live = self._counted(due)
        full = [t for t in live if t in steps and sum(live[t]) > self.storages[t].max_rows]
        for table in full:
            own = {i: each for i, each in due.items() if self.tables[i].rectangle.table == table}
            due.update(self._with_room(table, sum(live[table]), own))
        return Decision(due, self._counted(due) if full else live)

    def apply(self, decision: Decision) -> None:
        """Apply a turnover: admit and evict rows. The caller updates the rows afterwards."""
        due, self.live = decision
        for i, each in due.items():
            table, admitted, policy = self.tables[i], each.admitted, self.tables[i].storage.keys.evict
            report, num_admitted = table.books.report, each.num_admitted
            table.forget(each.gone)
            if len(admitted):
                table.waiting.count(each.keys, each.counts, admitted)
                table.revive(each.new if num_admitted == len(admitted) else each.new[admitted])
            report.evicted += len(each.gone)
            report.new += num_admitted
            report.refused += len(admitted) - num_admitted
            if policy is not None:
                alive = table.memory[""]
                used = each.slots if num_admitted == len(admitted) else each.slots[alive[each.slots]]
                policy.use(table.memory, used, each.clock)

    def finish(self, decision: Decision) -> None:
        """Reset the rows of IDs that were not admitted to their first values, after the update."""
        for i, each in decision.due.items():
            if len(each.new) and len(refused := each.new[~each.admitted]):
                self.tables[i].reset(refused)

    def _counted(self, due: Mapping[int, Due]) -> dict[int, list[int]]:
        """Return the rows that each interval will have, over all ranks."""
        sizes = [len(spans) for spans in self.intervals.values()]
        own = [0] * sum(sizes)
        begins = dict(zip(self.intervals, itertools.accumulate(sizes, initial=0), strict=False))
        for i, table in self.tables.items():
            r = table.rectangle
            if r.c0 == 0:
                inside = [
                    (begins[r.table] + number, span)
                    for number, span in enumerate(self.intervals[r.table])
                    if r.r0 <= span[0] and span[1] <= r.r1
                ]
                for place, span in inside:
                    own[place] = _num_rows(table, due.get(i), None if len(inside) == 1 else span)
        total = iter(self._everyone.sum(torch.tensor(own, dtype=torch.int64)).tolist())
        return {table: list(itertools.islice(total, len(spans))) for table, spans in self.intervals.items()}

    def _latest(self) -> int:
        """Return the latest event time of all ranks, where a policy asks for it. Collective."""
        policies = [storage.keys.evict for storage in self.storages.values()]
        if not any(isinstance(policy, TTL) and policy.seconds is not None for policy in policies):
            return 0
        own = torch.zeros(self._everyone.size, dtype=torch.int64)
        own[self._everyone.rank] = self.seconds
        return int(self._everyone.sum(own).max())

    def _with_room(self, table: int, total: int, due: Mapping[int, Due]) -> dict[int, Due]:
        """Choose rows to evict so that a table of ``total`` rows has at most ``max_rows``. Collective."""
        storage = self.storages[table]
        most, policy = storage.max_rows, storage.keys.evict
        if policy is None:
            raise ValueError(
                f"table {storage.name!r} is full: with the new IDs of this update it would have {total:,} "
                f"rows, and max_rows is {most:,}. Nothing was changed. Raise max_rows, or choose which rows "
                "go: Hashed(evict=LRU())."
            )
        judged = self._judged(table, due)
        owned = [judged[i] for i in due if self.tables[i].rectangle.c0 == 0]
        spread = range_of(owned, self._everyone)
        if spread.number < total - most:
            raise ValueError(
                f"table {storage.name!r}: this update alone has {total - spread.number:,} distinct IDs that "
                f"need a row, and max_rows is {most:,}. Nothing was changed. Raise max_rows, or make batches "
                "smaller."
            )
        num_going = min(spread.number, total - most + most // _SLACK)
        last = nth(owned, num_going, spread, self._everyone)
        tied = self._tied(table, judged, last, num_going - last.below)
        found = {}
        for i, each in due.items():
            smaller = marked_between(*judged[i], spread.least, last.value - 1) if last.below else _NONE
            found[i] = each._replace(gone=torch.cat([each.gone, smaller, tied[i]]))
        return found

    def _judged(self, number: int, due: Mapping[int, Due]) -> dict[int, SlotScores]:
        """Return the scores of the rows of a table. Collective where a score reads whole rows."""
        policy = self.storages[number].keys.evict
        assert policy is not None
        found = {i: SlotScores(_NONE, _candidates(self.tables[i], each)) for i, each in due.items()}
        if not policy.needs_rows:
            for i, (_, marks) in found.items():
                parts = {part.name: self.tables[i].memory[part.name][: len(marks)] for part in policy.parts}
                scores = policy.scores(RowsToJudge(_NONE, parts), due[i].clock)
                found[i] = SlotScores(scores, marks)
            return found
        slots = {i: marks.nonzero()[:, 0] for i, (_, marks) in found.items()}
        own = []
        for i, candidates in slots.items():
            table, parts_of_scores = self.tables[i], [_NONE]
            # Whole rows may be more than memory holds.
            for some in candidates.split(table.block_rows):
                rows = RowsToJudge(
                    table.ids_of(table.keys_of(some)), table.gathered(some, table.rectangle.columns)
                )
                parts_of_scores.append(policy.scores(rows, due[i].clock))
            own.append(torch.cat(parts_of_scores))
        for (i, (_, marks)), sums in zip(found.items(), self._everyone.row_sums(number, own), strict=True):
            scores_by_slot = torch.zeros(len(marks), dtype=torch.int64).index_copy_(0, slots[i], sums)
            found[i] = SlotScores(scores_by_slot, marks)
        return found

    def _tied(
        self, number: int, judged: Mapping[int, SlotScores], last: Nth, num_going: int
    ) -> dict[int, Tensor]:
        """Return the slots of the rows that go among those with the score of the last one. Collective."""
        if num_going == last.equal:
            return {i: marked_between(*each, last.value, last.value) for i, each in judged.items()}
        for most in (self._likely_bound(number, last, num_going), _LAST_KEY):
            tied = {i: _with_keys(self.tables[i], each, last.value, most) for i, each in judged.items()}
            owned = [(keys, None) for i, (keys, _) in tied.items() if self.tables[i].rectangle.c0 == 0]
            spread = range_of(owned, self._everyone)
            if spread.number >= num_going:
                break
        key = nth(owned, num_going, spread, self._everyone).value
        self._passed[number] = last.value, key
        return {i: slots[keys <= key] for i, (keys, slots) in tied.items()}

    def _likely_bound(self, number: int, last: Nth, num_going: int) -> int:
        """Return a key that probably has ``num_going`` tied rows at or below it, and not many more.

        Keys are spread evenly; of the same score, those up to a key may have gone before.
        """
        score, key = self._passed.get(number, (last.value, FIRST_KEY))
        first = key if score == last.value else FIRST_KEY
        wanted = num_going + 8 * math.isqrt(num_going) + 64
        return min(_LAST_KEY, first + (_LAST_KEY - first) * wanted // last.equal)


def _due(table: HashedTable, pins: Sequence[object], clock: Clock) -> Due:
    own = [pin for pin in pins if isinstance(pin, PinnedRows) and pin.table is table]
    slots = own[0].slots if len(own) == 1 else torch.cat([_NONE, *(pin.slots for pin in own)])
    alive, policy = table.memory[""], table.storage.keys.evict
    new = keys = counts = _NONE
    admitted = _NOBODY
    if table.slots.num_live > table.num_alive:
        fresh = own[0].fresh() if len(own) == 1 else None
        if fresh is not None and not bool(alive[fresh.slots].any()):
            new, keys, counts = fresh
        else:
            new, inverse = unique(slots[~alive[slots]])
            counts = torch.bincount(inverse, minlength=len(new))
            keys, order = table.keys_of(new).sort()
            new, counts = new[order], counts[order]
        admitted = table.waiting.admits(keys, counts, clock.step)
    gone = _NONE
    over = None if policy is None else policy.expired(table.memory, clock)
    if over is not None:
        over &= alive
        over[slots] = False
        gone = over.nonzero()[:, 0]
    return Due(slots, new, keys, counts, admitted, gone, clock)


def _num_rows(table: HashedTable, due: Due | None, span: Span | None) -> int:
    """Return the rows that a table will have, in a span of its keys."""
    if span is None:
        if due is None:
            return table.num_alive
        return table.num_alive - len(due.gone) + due.num_admitted
    num = int(in_span(table.listed()[0], span).sum())
    if due is not None:
        num -= int(in_span(table.keys_of(due.gone), span).sum())
        num += int(in_span(due.keys[due.admitted], span).sum())
    return num


def _candidates(table: HashedTable, due: Due) -> Tensor:
    """Return which rows may be evicted, bool by slot: all except those of the update."""
    free = table.memory[""][: table.slots.num_slots].clone()
    for slots in (due.gone, due.slots):
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
        shift = max(0, shift - _DIGIT_BITS)
