"""The turnover of an update: the IDs to admit and the rows to evict, chosen on all ranks before any changes.

[Note: one threshold for all ranks]

Every rank tells how many rows each interval of keys has, and how many more it would have (one small sum over
ranks for all tables). If a table would be too full, the ranks find the score of the last row that must go,
digit by digit, from histograms that they add up. Of equal scores the least keys go. Rows of the update itself
stay. Only rectangles that begin at column 0 are counted, so that each row counts once; the others follow the
threshold with the same scores. A table that is full gives up a 64th of its rows, so that it is not searched
in every step.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from meshrec.ops.index import unique
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_books import PinnedRows
from meshrec.tables.hashed_keys import TTL, Clock, RowsToJudge
from meshrec.tables.table import Span
from meshrec.tables.waiting import in_span

# N rows, U distinct IDs of an update

_NONE = torch.empty(0, dtype=torch.int64)
_NOBODY = torch.empty(0, dtype=torch.bool)
_DIGITS = 1 << 16
_MOST = (1 << 63) - 1
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


class Decision(NamedTuple):
    """The turnover of all tables of a rank."""

    due: dict[int, Due]
    """The turnover of each rectangle, by its number."""
    live: dict[int, list[int]]
    """The number of rows that each interval of each table will have, by table."""


class Turnover:
    """The coming and going of IDs in the hashed tables that a rank looks up together.

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

    def recount(self) -> None:
        """Count the rows of all ranks anew. Collective."""
        self.live = self._counted({})

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
        candidates = {i: _candidates(self.tables[i], each) for i, each in due.items()}
        owned = [i for i in due if self.tables[i].rectangle.c0 == 0]
        sizes = torch.tensor([sum(len(candidates[i]) for i in owned)])
        num_candidates = int(self._everyone.sum(sizes))
        if num_candidates < total - most:
            raise ValueError(
                f"table {storage.name!r}: this update alone has {total - num_candidates:,} distinct IDs that "
                f"need a row, and max_rows is {most:,}. Nothing was changed. Raise max_rows, or make batches "
                "smaller."
            )
        num_going = min(num_candidates, total - most + most // _SLACK)
        scores = self._scores(table, candidates, due)
        of_owned = torch.cat([sizes[:0], *(scores[i] for i in owned)])
        last, below = nth(of_owned, num_going, self._everyone)
        tied = {i: _with_keys(self.tables[i], candidates[i][scores[i] == last]) for i in due}
        ties = torch.cat([sizes[:0], *(tied[i][0] for i in owned)])
        last_key, _ = nth(ties, num_going - below, self._everyone)
        found = {}
        for i, each in due.items():
            keys, slots = tied[i]
            going = torch.cat([candidates[i][scores[i] < last], slots[keys <= last_key]])
            found[i] = each._replace(gone=torch.cat([each.gone, unique(going)[0]]))
        return found

    def _scores(
        self, number: int, candidates: Mapping[int, Tensor], due: Mapping[int, Due]
    ) -> dict[int, Tensor]:
        policy = self.storages[number].keys.evict
        assert policy is not None
        found: dict[int, Tensor] = {}
        for i, slots in candidates.items():
            table = self.tables[i]
            names = None if policy.needs_rows else [part.name for part in policy.parts]
            scores = [slots[:0]]
            # Whole rows may be more than memory holds.
            for some in slots.split(table.block_rows) if policy.needs_rows else (slots,):
                parts = table.gathered(some, table.rectangle.columns, names)
                ids = table.ids_of(table.keys_of(some)) if policy.needs_rows else some
                scores.append(policy.scores(RowsToJudge(ids, parts), due[i].clock))
            found[i] = torch.cat(scores)
        if policy.needs_rows:
            sums = self._everyone.row_sums(number, list(found.values()))
            found = dict(zip(found, sums, strict=True))
        return found


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
    """Return the slots of the rows that may go: not those of the update."""
    free = table.memory[""].clone()
    free[due.gone] = False
    free[due.slots] = False
    return free.nonzero()[:, 0]


def _with_keys(table: HashedTable, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the keys of distinct slots, and the slots in the same order."""
    if len(slots) * _FEW < table.slots.num_live:
        return table.keys_of(slots), slots
    marks = torch.zeros(len(table.memory[""]), dtype=torch.bool)
    marks[slots] = True
    return table.slots.marked(marks)


def nth(values: Tensor, n: int, everyone: Everyone) -> tuple[int, int]:
    """Return the n-th smallest value of all ranks, from 1 on, and how many are smaller. Collective.

    Args:
        values: int64, those of this rank; all ranks together have at least ``n``.
    """
    shift, base, below = _range_of(values, everyone)
    while True:
        digits = (values >> shift) - (base >> shift)
        counts = everyone.sum(torch.bincount(digits, minlength=_DIGITS))
        ends = counts.cumsum(0)
        digit = int(torch.searchsorted(ends, n - below))
        below += int(ends[digit] - counts[digit])
        base = ((base >> shift) + digit) << shift
        if shift == 0:
            return base, below
        values = values[digits == digit]
        shift = max(0, shift - 16)


def _range_of(values: Tensor, everyone: Everyone) -> tuple[int, int, int]:
    """Return the shift that makes the range of all ranks' values fit one digit, the least value, and 0."""
    own = torch.zeros(everyone.size, 3, dtype=torch.int64)
    if len(values):
        own[everyone.rank] = torch.stack([values.min(), values.max(), torch.ones((), dtype=torch.int64)])
    found = everyone.sum(own.view(-1)).view(-1, 3)
    least, greatest, _ = zip(*[row for row in found.tolist() if row[2]], strict=True)
    base, end, shift = min(least), max(greatest), 0
    while (end >> shift) - (base >> shift) >= _DIGITS:
        shift += 1
    return shift, base, 0
