"""Admission and eviction at an update: all ranks select IDs and victims before anything changes.

[Note: one threshold for all ranks]

Every rank counts the rows by key interval, and the rows the update would add (a small sum over ranks for all
tables). If a table would be too full, the ranks find the last victim's score digit by digit, from summed
histograms. Among equal scores the smallest keys are evicted, found the same way (``eviction.py``). The
update's own rows stay. Only rectangles that start at column 0 count, so a row counts once; the other
rectangles apply the same threshold to the same scores. A full table evicts 1/64 of the rows, so it does
not evict in every step.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.ops.index import Fills, unique
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.eviction import EvictionRequest, Evictions, InUpdate, RankGroup, SingleRank
from meshrec.tables.hashed.keys import TTL, Clock
from meshrec.tables.hashed.table import ALIVE, HashedRows, HashedTable, PinnedRows, forget_rows
from meshrec.tables.table import Span

# N: rows, U: distinct IDs in an update

_NONE = torch.empty(0, dtype=torch.int64)
_SLACK = 64


def set_event_time(model: nn.Module, seconds: int) -> None:
    """Set the event time for a model's tables, for ``TTL(seconds=...)``.

    Ranks may give different times: the latest time counts.

    Args:
        model: a model with fused or sharded tables.
        seconds: time of the batch's latest event, such as a Unix time.
    """
    for module in model.modules():
        members = getattr(module, "admission_evictions", None) or getattr(
            getattr(module, "tables", None), "admission_evictions", None
        )
        for admission_eviction in members or ():
            admission_eviction.seconds = max(admission_eviction.seconds, int(seconds))


class RowChanges(NamedTuple):
    """A rectangle's admitted IDs and evicted rows. U IDs in the update have no row yet."""

    slots: Tensor
    """Slots for all IDs in the update, possibly repeated."""
    new: Tensor
    """Slots for IDs without a row, in ascending key order, int64 [U]."""
    keys: Tensor
    """Keys for ``new``, int64 [U]."""
    counts: Tensor
    """Occurrences in the update by ID in ``new``, int64 [U]."""
    admitted: Tensor | None
    """Whether an ID in ``new`` is admitted, bool [U]; None: all are."""
    victims: Tensor
    """Slots to evict."""
    clock: Clock
    pins: Sequence[object]
    """Pins on ``slots``."""

    num_admitted: int
    """Number of admitted IDs."""

    def of_admitted(self, of_new: Tensor) -> Tensor:
        """Select the admitted IDs' values."""
        return of_new if self.num_admitted == len(of_new) else of_new[self.admitted]


class TableChanges(NamedTuple):
    """Admitted IDs and evicted rows in all tables on a rank, for a single update."""

    due: dict[int, RowChanges]
    """Changes by rectangle number."""
    live: dict[int, list[int]]
    """Rows by table and key interval after the update."""


class AdmissionEviction:
    """ID admission and eviction for the hashed tables looked up together on a rank.

    Args:
        tables: local hashed-table rectangles, by number.
        storages: storage for all hashed tables, including tables without local rows, by table.
        intervals: key intervals not cut by any rectangle on any rank, by table.
        ranks: the ranks; None: this process has the whole tables.
    """

    def __init__(
        self,
        tables: Mapping[int, HashedTable],
        storages: Mapping[int, HashedRows],
        intervals: Mapping[int, Sequence[Span]],
        ranks: RankGroup | None = None,
    ) -> None:
        self.tables, self.storages, self.intervals = dict(tables), dict(storages), dict(intervals)
        self._ranks: RankGroup = ranks or SingleRank()
        self.live = {table: [0] * len(spans) for table, spans in intervals.items()}
        """Rows by table and key interval, over all ranks. Every update replaces it."""
        self.seconds = 0
        """Latest event time set on this rank."""
        self._evictions = Evictions(self.tables, self.storages, self._ranks)

    def recount(self) -> None:
        """Count the rows on all ranks again. Collective."""
        self.live = self._counted({})
        self._evictions.forget()

    def prepare(self, pins: Sequence[object], steps: Mapping[int, int]) -> TableChanges:
        """Select the IDs to admit and the rows to evict at the next update. Changes nothing. Collective.

        Args:
            pins: pins on the rows that the update changes.
            steps: update number by trained table.

        Raises:
            ValueError: a table is full and has no eviction policy, or the update alone has too many IDs.
                Raised on all ranks.
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
        return TableChanges(due, self._counted(due) if full else live)

    def apply(self, decision: TableChanges) -> None:
        """Admit and evict rows. The caller updates the rows afterward."""
        due, self.live = decision
        forget_rows((self.tables[i], changes.victims, changes.pins) for i, changes in due.items())
        with Fills() as fills:
            for i, changes in due.items():
                table, report = self.tables[i], self.tables[i].accounting.report
                if changes.admitted is not None and len(changes.new):
                    table.admission_counts.count(changes.keys, changes.counts, changes.admitted)
                table.revive(changes.of_admitted(changes.new), fills)
                report.evicted += len(changes.victims)
                report.new += changes.num_admitted
                report.refused += len(changes.new) - changes.num_admitted
        with Fills() as fills:
            for i, changes in due.items():
                memory, policy = self.tables[i].memory, self.tables[i].storage.keys.evict
                if policy is not None:
                    is_whole = changes.num_admitted == len(changes.new)
                    used = changes.slots if is_whole else changes.slots[memory[ALIVE][changes.slots]]
                    policy.use(memory, used, changes.clock, fills)

    def finish(self, decision: TableChanges) -> None:
        """Reset rejected IDs' rows to their initial values, after the update."""
        with Fills() as fills:
            for i, changes in decision.due.items():
                if changes.admitted is not None and changes.num_admitted < len(changes.new):
                    self.tables[i].reset(changes.new[~changes.admitted], fills)

    def _counted(self, due: Mapping[int, RowChanges]) -> dict[int, list[int]]:
        """Return the future row counts by table and interval, over all ranks."""
        sizes = [len(spans) for spans in self.intervals.values()]
        counts = [0] * sum(sizes)
        starts = dict(zip(self.intervals, itertools.accumulate(sizes, initial=0), strict=False))
        for i, table in self.tables.items():
            r = table.rectangle
            # Count a row once: only in the rectangle with column 0.
            if r.c0 == 0:
                inside = [
                    (starts[r.table] + number, span)
                    for number, span in enumerate(self.intervals[r.table])
                    if r.r0 <= span[0] and span[1] <= r.r1
                ]
                for position, span in inside:
                    counts[position] = _num_rows(table, due.get(i), None if len(inside) == 1 else span)
        total = iter(self._ranks.sum(torch.tensor(counts, dtype=torch.int64)).tolist())
        return {table: list(itertools.islice(total, len(spans))) for table, spans in self.intervals.items()}

    def _latest(self) -> int:
        """Return the latest event time over all ranks, if a policy needs it. Collective."""
        policies = [storage.keys.evict for storage in self.storages.values()]
        if not any(isinstance(policy, TTL) and policy.seconds is not None for policy in policies):
            return 0
        # A maximum through a sum: every rank fills a separate entry.
        times = torch.zeros(self._ranks.size, dtype=torch.int64)
        times[self._ranks.rank] = self.seconds
        return int(self._ranks.sum(times).max())

    def _with_room(
        self, totals: Mapping[int, int], due: Mapping[int, RowChanges], clocks: Mapping[int, Clock]
    ) -> dict[int, RowChanges]:
        """Select rows to evict so that tables have at most ``max_rows``. Collective.

        Args:
            totals: future rows by table.
            due: changes by rectangle.
            clocks: update time by table.
        """
        requests = {}
        for table, total in totals.items():
            storage, max_rows = self.storages[table], self.storages[table].max_rows
            if storage.keys.evict is None:
                raise ValueError(
                    f"table {storage.name!r} is full: with the new IDs of this update it would have "
                    f"{total:,} rows, and max_rows is {max_rows:,}. Nothing was changed. Raise max_rows, or "
                    "choose which rows go: Hashed(evict=LRU())."
                )
            staying = {
                i: InUpdate(changes.slots, changes.victims)
                for i, changes in due.items()
                if self.tables[i].rectangle.table == table
            }
            excess = total - max_rows
            requests[table] = EvictionRequest(staying, clocks[table], excess, excess + max_rows // _SLACK)
        new_changes = {}
        for table, victims in self._evictions.choose(requests).items():
            if isinstance(victims, int):
                storage = self.storages[table]
                raise ValueError(
                    f"table {storage.name!r}: this update alone has {totals[table] - victims:,} distinct IDs "
                    f"that need a row, and max_rows is {storage.max_rows:,}. Nothing was changed. Raise "
                    "max_rows, or make batches smaller."
                )
            for i, slots in victims.items():
                before = due[i].victims
                new_changes[i] = due[i]._replace(victims=torch.cat([before, slots]) if len(before) else slots)
        return new_changes


def _due(table: HashedTable, pins: Sequence[object], clock: Clock) -> RowChanges:
    held = [pin for pin in pins if isinstance(pin, PinnedRows) and pin.table is table]
    slots = held[0].slots if len(held) == 1 else torch.cat([_NONE, *(pin.slots for pin in held)])
    alive, policy = table.memory[ALIVE], table.storage.keys.evict
    new = keys = counts = _NONE
    admitted = None
    if table.slots.num_live > table.num_alive:
        fresh = held[0].fresh() if len(held) == 1 else None
        # Rows may have come alive since the batch was resolved.
        if fresh is not None and (
            held[0].changes == table.accounting.changes or not bool(alive[fresh.slots].any())
        ):
            new, keys, counts = fresh
        else:
            new, inverse = unique(slots[~alive[slots]])
            counts = torch.bincount(inverse, minlength=len(new))
            keys, order = table.keys_of(new).sort()
            new, counts = new[order], counts[order]
        admitted = table.admission_counts.admits(keys, counts, clock.step)
    victims = _NONE
    is_expired = None if policy is None else policy.expired(table.memory, clock)
    if is_expired is not None:
        is_expired &= alive
        # The update's own rows stay.
        is_expired[slots] = False
        victims = is_expired.nonzero()[:, 0]
    num_admitted = len(new) if admitted is None else int(admitted.sum())
    return RowChanges(slots, new, keys, counts, admitted, victims, clock, held, num_admitted)


def _num_rows(table: HashedTable, due: RowChanges | None, span: Span | None) -> int:
    """Return a table's future rows, in a key span."""
    if span is None:
        if due is None:
            return table.num_alive
        return table.num_alive - len(due.victims) + due.num_admitted
    # Slow path: the rectangle spans several intervals.
    num = int(in_span(table.listed()[0], span).sum())
    if due is not None:
        num -= int(in_span(table.keys_of(due.victims), span).sum())
        num += int(in_span(due.of_admitted(due.keys), span).sum())
    return num
