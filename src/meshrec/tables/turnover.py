"""The turnover of an update: the IDs to admit and the rows to evict, chosen on all ranks before any changes.

[Note: one threshold for all ranks]

Every rank tells how many rows each interval of keys has, and how many more it would have (one small sum over
ranks for all tables). If a table would be too full, the ranks find the score of the last row that must go,
digit by digit, from histograms that they add up. Of equal scores the least keys go, which are found in the
same way (``tables/eviction.py``). Rows of the update itself stay. Only rectangles that begin at column 0 are
counted, so that each row counts once; the others follow the threshold with the same scores. A table that is
full gives up a 64th of its rows, so that it does not evict in every step.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.ops.index import Fills, unique
from meshrec.tables.eviction import Alone, Everyone, EvictionRequest, Evictions, InUpdate
from meshrec.tables.hashed import HashedRows, HashedTable
from meshrec.tables.hashed_books import PinnedRows
from meshrec.tables.hashed_keys import TTL, Clock
from meshrec.tables.hashed_slots import forget_rows
from meshrec.tables.table import Span
from meshrec.tables.waiting import in_span

# N rows, U distinct IDs of an update

_NONE = torch.empty(0, dtype=torch.int64)
_SLACK = 64


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
    admitted: Tensor | None
    """Whether each ID of ``new`` is admitted, bool [U]; None: all are."""
    gone: Tensor
    """The slots of the rows to evict."""
    clock: Clock
    pins: Sequence[object]
    """The pins of ``slots``."""

    num_admitted: int
    """The number of IDs that are admitted."""

    def chosen(self, of_new: Tensor) -> Tensor:
        """Return what belongs to the admitted IDs, of a value for each ID of ``new``."""
        return of_new if self.num_admitted == len(of_new) else of_new[self.admitted]


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
        self._evictions = Evictions(self.tables, self.storages, self._everyone)

    def recount(self) -> None:
        """Count the rows of all ranks anew. Collective."""
        self.live = self._counted({})
        self._evictions.forget()

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
        full = {t: sum(live[t]) for t in live if t in steps and sum(live[t]) > self.storages[t].max_rows}
        if full:
            due.update(self._with_room(full, due, {table: Clock(steps[table], seconds) for table in full}))
        return Decision(due, self._counted(due) if full else live)

    def apply(self, decision: Decision) -> None:
        """Apply a turnover: admit and evict rows. The caller updates the rows afterwards."""
        due, self.live = decision
        forget_rows((self.tables[i], each.gone, each.pins) for i, each in due.items())
        with Fills() as fills:
            for i, each in due.items():
                table, report = self.tables[i], self.tables[i].books.report
                if each.admitted is not None and len(each.new):
                    table.waiting.count(each.keys, each.counts, each.admitted)
                table.revive(each.chosen(each.new), fills)
                report.evicted += len(each.gone)
                report.new += each.num_admitted
                report.refused += len(each.new) - each.num_admitted
        with Fills() as fills:
            for i, each in due.items():
                memory, policy = self.tables[i].memory, self.tables[i].storage.keys.evict
                if policy is not None:
                    is_whole = each.num_admitted == len(each.new)
                    used = each.slots if is_whole else each.slots[memory[""][each.slots]]
                    policy.use(memory, used, each.clock, fills)

    def finish(self, decision: Decision) -> None:
        """Reset the rows of IDs that were not admitted to their first values, after the update."""
        with Fills() as fills:
            for i, each in decision.due.items():
                if each.admitted is not None and each.num_admitted < len(each.new):
                    self.tables[i].reset(each.new[~each.admitted], fills)

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

    def _with_room(
        self, totals: Mapping[int, int], due: Mapping[int, Due], clocks: Mapping[int, Clock]
    ) -> dict[int, Due]:
        """Choose rows to evict so that tables have at most ``max_rows``. Collective.

        ``totals``: the number of rows that each of the tables would have.
        """
        requests = {}
        for table, total in totals.items():
            storage, most = self.storages[table], self.storages[table].max_rows
            if storage.keys.evict is None:
                raise ValueError(
                    f"table {storage.name!r} is full: with the new IDs of this update it would have "
                    f"{total:,} rows, and max_rows is {most:,}. Nothing was changed. Raise max_rows, or "
                    "choose which rows go: Hashed(evict=LRU())."
                )
            staying = {
                i: InUpdate(each.slots, each.gone)
                for i, each in due.items()
                if self.tables[i].rectangle.table == table
            }
            least = total - most
            requests[table] = EvictionRequest(staying, clocks[table], least, least + most // _SLACK)
        found = {}
        for table, gone in self._evictions.choose(requests).items():
            if isinstance(gone, int):
                storage = self.storages[table]
                raise ValueError(
                    f"table {storage.name!r}: this update alone has {totals[table] - gone:,} distinct IDs "
                    f"that need a row, and max_rows is {storage.max_rows:,}. Nothing was changed. Raise "
                    "max_rows, or make batches smaller."
                )
            for i, slots in gone.items():
                before = due[i].gone
                found[i] = due[i]._replace(gone=torch.cat([before, slots]) if len(before) else slots)
        return found


def _due(table: HashedTable, pins: Sequence[object], clock: Clock) -> Due:
    own = [pin for pin in pins if isinstance(pin, PinnedRows) and pin.table is table]
    slots = own[0].slots if len(own) == 1 else torch.cat([_NONE, *(pin.slots for pin in own)])
    alive, policy = table.memory[""], table.storage.keys.evict
    new = keys = counts = _NONE
    admitted = None
    if table.slots.num_live > table.num_alive:
        fresh = own[0].fresh() if len(own) == 1 else None
        # Rows may have come alive since the batch was resolved.
        if fresh is not None and (
            own[0].changes == table.books.changes or not bool(alive[fresh.slots].any())
        ):
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
    num_admitted = len(new) if admitted is None else int(admitted.sum())
    return Due(slots, new, keys, counts, admitted, gone, clock, own, num_admitted)


def _num_rows(table: HashedTable, due: Due | None, span: Span | None) -> int:
    """Return the rows that a table will have, in a span of its keys."""
    if span is None:
        if due is None:
            return table.num_alive
        return table.num_alive - len(due.gone) + due.num_admitted
    num = int(in_span(table.listed()[0], span).sum())
    if due is not None:
        num -= int(in_span(table.keys_of(due.gone), span).sum())
        num += int(in_span(due.chosen(due.keys), span).sum())
    return num
