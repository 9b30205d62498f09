"""Admission and eviction at an update: all ranks select new IDs and victims before anything changes.

[Note: one threshold for all ranks]

Every rank counts local rows by key interval, and rows to add in the update (a small sum over ranks for
all tables). If a table would be too full, the ranks find the last victim's score digit by digit, from
summed histograms. Among equal scores the smallest keys are evicted, found the same way (``eviction.py``).
Rows changed by the update itself are not evicted. Only rectangles starting at column 0 count, so a row
counts once; the other rectangles apply the same threshold to the same scores. A full table evicts 1/64 of all
rows at once, so not every step evicts.
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
from meshrec.tables.hashed.table import ALIVE, HashedRows, HashedTable, PinnedRows, evict_rows
from meshrec.tables.table import Span

# Shape legend: N rows, U distinct IDs in an update.

_NONE = torch.empty(0, dtype=torch.int64)
_SLACK = 64  # a full table evicts 1 / 64 of the rows at once


def set_event_time(model: nn.Module, seconds: int) -> None:
    """Set the present batch's event time for a model's tables. ``TTL(seconds=...)`` needs it.

    Ranks may set different times: the latest one counts.

    Args:
        model: a model with fused or sharded tables.
        seconds: the batch's latest event time, such as a Unix time.
    """
    for module in model.modules():
        members = getattr(module, "admission_evictions", None) or getattr(
            getattr(module, "tables", None), "admission_evictions", None
        )
        for admission_eviction in members or ():
            admission_eviction.seconds = max(admission_eviction.seconds, int(seconds))


class RowChanges(NamedTuple):
    """A rectangle's IDs to admit and rows to evict at an update. U IDs in the update have no row yet."""

    slots: Tensor
    """Slots for all IDs in the update; may repeat."""
    new: Tensor
    """Slots for IDs without a row, in ascending key order, int64 [U]."""
    keys: Tensor
    """Keys for IDs in ``new``, int64 [U]."""
    counts: Tensor
    """Occurrences in the update for IDs in ``new``, int64 [U]."""
    admitted: Tensor | None
    """Which IDs in ``new`` are admitted, bool [U]; None: all are."""
    victims: Tensor
    """Slots to evict."""
    clock: Clock  # update time
    pins: Sequence[object]
    """Pins on ``slots``."""

    num_admitted: int
    """Admitted ID count."""

    def of_admitted(self, of_new: Tensor) -> Tensor:
        """Select the values for admitted IDs, given a value per ID in ``new``."""
        return of_new if self.num_admitted == len(of_new) else of_new[self.admitted]


class TableChanges(NamedTuple):
    """IDs to admit and rows to evict in all tables on a rank, at one update."""

    due: dict[int, RowChanges]
    """Changes by rectangle number."""
    live: dict[int, list[int]]
    """Row counts after the update, by table and key interval."""


class AdmissionEviction:
    """Admits and evicts IDs in the hashed tables looked up together on a rank.

    Args:
        tables: rectangles on this rank, by rectangle number.
        storages: storages of all hashed tables by table number, including tables without rows on this rank.
        intervals: by table number, key intervals not cut by any rectangle on any rank.
        ranks: ranks sharing the tables; None: this process has the whole tables.
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
        self.live = self._future_rows({})
        self._evictions.forget()

    def prepare(self, pins: Sequence[object], steps: Mapping[int, int]) -> TableChanges:
        """Select the IDs to admit and the rows to evict at an update. Changes nothing. Collective.

        Args:
            pins: pins on rows changed by the update.
            steps: update number by trained table.

        Raises:
            ValueError: a table is full and has no eviction policy, or the update alone has too many IDs.
                Raised on all ranks.
        """
        seconds = self._latest()
        due = {
            i: _select_changes(table, pins, Clock(steps[table.rectangle.table], seconds))
            for i, table in self.tables.items()
            if table.rectangle.table in steps
        }
        live = self._future_rows(due)
        full = {t: sum(live[t]) for t in live if t in steps and sum(live[t]) > self.storages[t].max_rows}
        if full:
            due.update(
                self._select_evictions(full, due, {table: Clock(steps[table], seconds) for table in full})
            )
        return TableChanges(due, self._future_rows(due) if full else live)

    def apply(self, decision: TableChanges) -> None:
        """Admit IDs and evict rows, as selected by ``prepare``. The caller then updates the rows."""
        due, self.live = decision
        evict_rows((self.tables[i], changes.victims, changes.pins) for i, changes in due.items())
        with Fills() as fills:
            for i, changes in due.items():
                table, report = self.tables[i], self.tables[i].accounting.report
                if changes.admitted is not None and len(changes.new):
                    table.admission_counts.count(changes.keys, changes.counts, changes.admitted)
                table.mark_alive(changes.of_admitted(changes.new), fills)
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
        """Reset rows for IDs not admitted to initial values, after the update."""
        with Fills() as fills:
            for i, changes in decision.due.items():
                if changes.admitted is not None and changes.num_admitted < len(changes.new):
                    self.tables[i].reset(changes.new[~changes.admitted], fills)

    def _future_rows(self, due: Mapping[int, RowChanges]) -> dict[int, list[int]]:
        """Return row counts after the changes, by table and key interval, over all ranks.

        Collective.
        """
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
        """Return the latest event time over all ranks; 0 if no policy needs it. Collective."""
        policies = [storage.keys.evict for storage in self.storages.values()]
        if not any(isinstance(policy, TTL) and policy.seconds is not None for policy in policies):
            return 0
        # A maximum through a sum: every rank fills a separate entry.
        times = torch.zeros(self._ranks.size, dtype=torch.int64)
        times[self._ranks.rank] = self.seconds
        return int(self._ranks.sum(times).max())

    def _select_evictions(
        self, totals: Mapping[int, int], due: Mapping[int, RowChanges], clocks: Mapping[int, Clock]
    ) -> dict[int, RowChanges]:
        """Add rows to evict to the changes for overfull tables. Collective.

        Args:
            totals: future row count by overfull table.
            due: changes by rectangle.
            clocks: update time, by table.
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
        for table, victims in self._evictions.select_victims(requests).items():
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


def _select_changes(table: HashedTable, pins: Sequence[object], clock: Clock) -> RowChanges:
    """Select a rectangle's IDs to admit, and expired rows.

    Args:
        table: rectangle.
        pins: pins on the update's rows, in all tables.
        clock: update time.
    """
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
    """Return a rectangle's row count after the changes; with ``span``, only for keys in the interval."""
    if span is None:
        if due is None:
            return table.num_alive
        return table.num_alive - len(due.victims) + due.num_admitted
    # Slow path: the rectangle spans several intervals.
    num = int(in_span(table.live_keys()[0], span).sum())
    if due is not None:
        num -= int(in_span(table.keys_of(due.victims), span).sum())
        num += int(in_span(due.of_admitted(due.keys), span).sum())
    return num
