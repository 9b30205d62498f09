"""Admission and eviction at an update: all ranks select new IDs and victims before any table changes.

An update applies the gradients of a batch to the tables. At an update, the admission policy selects the IDs
without a row that get one, and the eviction policy selects the rows (victims) that make room.

[Note: one threshold for all ranks]

Every rank counts local rows, and the rows to add in the update, by key interval. A small sum over the ranks
gives the totals for all tables. If a table would be too full, the ranks find the last victim's score digit by
digit, from histograms summed over the ranks. Among equal scores the smallest keys are evicted; the last
victim's key is found the same way (``eviction.py``). So all ranks apply the same threshold, a (score, key).
Rows changed by the update itself are not evicted. A row split by columns lies in several rectangles, and
counts only in the rectangle with column 0; the other rectangles apply the same threshold to the same scores.
A full table evicts 1/64 of the row limit at once, so not every update evicts.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.ops.index import Fills, unique
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.hashed.eviction import EvictionRequest, Evictions, ProtectedRows, RankGroup, SingleRank
from meshrec.tables.hashed.keys import TTL, Clock
from meshrec.tables.hashed.row_store import ALIVE
from meshrec.tables.hashed.slots import PinnedRows
from meshrec.tables.hashed.table import HashedRows, HashedTable, evict_rows
from meshrec.tables.table import Span

# Shape legend: N rows, U distinct IDs in an update.

_NONE = torch.empty(0, dtype=torch.int64)
# A full table evicts the excess and 1/64 of max_rows more, so the next updates need not evict.
_SLACK = 64


def set_event_time(model: nn.Module, seconds: int) -> None:
    """Tell the tables in a model at what time the events in the present batch happened.

    The eviction policy ``TTL(seconds=...)`` compares this time with each row's last event time. If the ranks
    set different times, the latest counts. A time before one set earlier has no effect.

    Args:
        model: a model with fused or sharded tables.
        seconds: latest event time in the batch in seconds, such as a Unix time.
    """
    # Sharded modules hold their ``AdmissionEviction`` objects in ``tables``, fused modules themselves.
    for module in model.modules():
        members = getattr(module, "admission_evictions", None) or getattr(
            getattr(module, "tables", None), "admission_evictions", None
        )
        for admission_eviction in members or ():
            admission_eviction.seconds = max(admission_eviction.seconds, int(seconds))


class RowChanges(NamedTuple):
    """IDs to admit to a table rectangle, and rows to evict from it, at an update.

    A rectangle is a key interval times a column interval of a table. *New IDs* are the U distinct IDs in the
    update without a live row. Their slots (row positions in memory) are pending: a batch uses them, but they
    are free again after the batch unless the IDs are admitted.
    """

    slots: Tensor
    """Slots of all IDs in the update, int64; may repeat."""
    new: Tensor
    """Slots of the new IDs, in ascending key order, int64 [U]."""
    keys: Tensor
    """Keys of the new IDs, int64 [U]."""
    counts: Tensor
    """Occurrences of every new ID in the update, int64 [U]."""
    admitted: Tensor | None
    """Whether each new ID is admitted, bool [U]. None: all are."""
    victims: Tensor
    """Slots of the rows to evict, int64."""
    clock: Clock
    """Time of the update."""
    pins: Sequence[object]
    """The updating batches' pins on ``slots``."""

    num_admitted: int
    """Number of admitted IDs."""

    def of_admitted(self, values: Tensor) -> Tensor:
        """Select the values of the admitted IDs."""
        return values if self.num_admitted == len(values) else values[self.admitted]


class TableChanges(NamedTuple):
    """IDs to admit and rows to evict at an update, and the live row counts after it, for a rank's tables."""

    by_rectangle: dict[int, RowChanges]
    """Changes by rectangle number."""
    live: dict[int, list[int]]
    """By table number: the number of live rows after the update, per key interval and over all ranks."""


class AdmissionEviction:
    """Admission of IDs to hashed tables and eviction of rows, at the same update on all ranks.

    An update calls three methods. ``prepare`` selects the IDs and rows, and may raise an error. ``apply``
    admits and evicts them. The update then changes the rows, and calls ``finish``. A single object serves all
    hashed tables looked up by a module.

    Args:
        tables: rectangles on this rank, by rectangle number.
        storages: storages of all hashed tables by table number, including tables without rows on this rank.
        intervals: by table number, the key intervals in which rows are counted. A rectangle, on any rank,
            contains an interval completely or not at all.
        ranks: the ranks among which the tables are split. None: this process has the whole tables.
    """

    def __init__(
        self,
        tables: Mapping[int, HashedTable],
        storages: Mapping[int, HashedRows],
        intervals: Mapping[int, Sequence[Span]],
        ranks: RankGroup | None = None,
    ) -> None:
        # Fixed for this object's life; resharding creates a new object.
        self.tables, self.storages, self.intervals = dict(tables), dict(storages), dict(intervals)
        self._ranks: RankGroup = ranks or SingleRank()
        self.live = {table: [0] * len(spans) for table, spans in intervals.items()}
        """By table number: the number of live rows per key interval, over all ranks. Replaced by ``apply``
        and ``recount``."""
        self.seconds = 0
        """Latest event time on this rank, in seconds. Set by ``set_event_time``; other ranks may differ."""
        # Caches eviction candidates between updates. ``recount`` drops them.
        self._evictions = Evictions(self.tables, self.storages, self._ranks)

    def recount(self) -> None:
        """Count the rows on all ranks again, after rows were loaded or moved. Collective."""
        self.live = self._future_rows({})
        self._evictions.forget()

    def prepare(self, pins: Sequence[object], steps: Mapping[int, int]) -> TableChanges:
        """Select the IDs to admit and the rows to evict at an update. Changes no table. Collective.

        Args:
            pins: pins on the rows changed by the update, from the batches' lookups.
            steps: update number by table number, for the tables that this update trains.

        Returns:
            The changes, to be passed to ``apply`` and ``finish``.

        Raises:
            ValueError: a table is full and has no eviction policy, or the update alone has too many IDs.
                Raised on all ranks.
        """
        seconds = self._latest()
        # Admissions and expired rows first, without communication; the sum below then tells which tables are
        # too full.
        changes = {
            i: _select_changes(table, pins, Clock(steps[table.rectangle.table], seconds))
            for i, table in self.tables.items()
            if table.rectangle.table in steps
        }
        # Collective, as is the sum in _latest: all ranks call prepare() for the same updates.
        live = self._future_rows(changes)
        # All ranks see the same sums, so they agree on the full tables without another message.
        full = {t: sum(live[t]) for t in live if t in steps and sum(live[t]) > self.storages[t].max_rows}
        if full:
            changes.update(
                self._select_evictions(full, changes, {table: Clock(steps[table], seconds) for table in full})
            )
        return TableChanges(changes, self._future_rows(changes) if full else live)

    def apply(self, changes: TableChanges) -> None:
        """Admit IDs and evict rows, as selected by ``prepare``. The caller then updates the rows."""
        by_rectangle, self.live = changes
        evict_rows(
            (self.tables[i], row_changes.victims, row_changes.pins) for i, row_changes in by_rectangle.items()
        )
        with Fills() as fills:
            for i, row_changes in by_rectangle.items():
                table, report = self.tables[i], self.tables[i].accounting.report
                if row_changes.admitted is not None and len(row_changes.new):
                    table.admission_counts.count(row_changes.keys, row_changes.counts, row_changes.admitted)
                table.slots.mark_alive(row_changes.of_admitted(row_changes.new), fills)
                report.evicted += len(row_changes.victims)
                report.new += row_changes.num_admitted
                report.refused += len(row_changes.new) - row_changes.num_admitted
        # A second queue, because fills run in any order and these read the liveness flags written above.
        with Fills() as fills:
            for i, row_changes in by_rectangle.items():
                memory, policy = self.tables[i].memory, self.tables[i].storage.keys.evict
                if policy is not None:
                    # Rows of refused IDs stay pending and do not count as used.
                    is_whole = row_changes.num_admitted == len(row_changes.new)
                    used = (
                        row_changes.slots if is_whole else row_changes.slots[memory[ALIVE][row_changes.slots]]
                    )
                    policy.use(memory, used, row_changes.clock, fills)

    def finish(self, changes: TableChanges) -> None:
        """Undo the update in the rows of IDs that were not admitted: write their initial values again."""
        # The update changes the rows of all IDs in the batch, and later batches in flight may read these.
        with Fills() as fills:
            for i, row_changes in changes.by_rectangle.items():
                if row_changes.admitted is not None and row_changes.num_admitted < len(row_changes.new):
                    self.tables[i].reset(row_changes.new[~row_changes.admitted], fills)

    def _future_rows(self, changes: Mapping[int, RowChanges]) -> dict[int, list[int]]:
        """Return the numbers of live rows after some changes, over all ranks. Collective."""
        # The counts of all tables and intervals lie in one list, so a single sum is enough.
        sizes = [len(spans) for spans in self.intervals.values()]
        counts = [0] * sum(sizes)
        starts = dict(zip(self.intervals, itertools.accumulate(sizes, initial=0), strict=False))
        for i, table in self.tables.items():
            r = table.rectangle
            # Count a row once: only in the rectangle with column 0.
            if r.c0 == 0:
                # No rectangle cuts an interval, so it lies inside or outside.
                inside = [
                    (starts[r.table] + number, span)
                    for number, span in enumerate(self.intervals[r.table])
                    if r.r0 <= span[0] and span[1] <= r.r1
                ]
                for position, span in inside:
                    counts[position] = _num_rows(table, changes.get(i), None if len(inside) == 1 else span)
        total = iter(self._ranks.sum(torch.tensor(counts, dtype=torch.int64)).tolist())
        return {table: list(itertools.islice(total, len(spans))) for table, spans in self.intervals.items()}

    def _latest(self) -> int:
        """Return the latest event time over all ranks in seconds; 0 if no policy needs it. Collective."""
        policies = [storage.keys.evict for storage in self.storages.values()]
        if not any(isinstance(policy, TTL) and policy.seconds is not None for policy in policies):
            return 0
        # A maximum through a sum: every rank fills a separate entry.
        times = torch.zeros(self._ranks.size, dtype=torch.int64)
        times[self._ranks.rank] = self.seconds
        return int(self._ranks.sum(times).max())

    def _select_evictions(
        self, totals: Mapping[int, int], changes: Mapping[int, RowChanges], clocks: Mapping[int, Clock]
    ) -> dict[int, RowChanges]:
        """Select victims in overfull tables, which would exceed their row limit after this update.

        Collective.
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
                i: ProtectedRows(row_changes.slots, row_changes.victims)
                for i, row_changes in changes.items()
                if self.tables[i].rectangle.table == table
            }
            excess = total - max_rows
            # At least ``excess`` rows must go. Evicting more spreads the cost of a search over the next
            # updates.
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
                before = changes[i].victims
                new_changes[i] = changes[i]._replace(
                    victims=torch.cat([before, slots]) if len(before) else slots
                )
        return new_changes


def _select_changes(table: HashedTable, pins: Sequence[object], clock: Clock) -> RowChanges:
    """Select the IDs to admit to a rectangle, and the rows with an expired time to live.

    Does not check the row limit, and needs no communication.
    """
    held = [pin for pin in pins if isinstance(pin, PinnedRows) and pin.states is table.slots]
    slots = held[0].slots if len(held) == 1 else torch.cat([_NONE, *(pin.slots for pin in held)])
    # A table that no batch in the update uses still has expired rows to evict.
    alive, policy = table.memory[ALIVE], table.storage.keys.evict
    new = keys = counts = _NONE
    admitted = None
    # Slots in the index that are not alive are pending: only then can the update have new IDs.
    if table.slots.num_pending:
        # The lookup has already listed the new IDs if they are the batch's only pending rows.
        fresh = held[0].fresh() if len(held) == 1 else None
        # An earlier update may have made these rows alive since the batch was resolved.
        if fresh is not None and (
            held[0].changes_at_lookup == table.accounting.changes or not bool(alive[fresh.slots].any())
        ):
            new, keys, counts = fresh
        else:
            new, inverse = unique(slots[~alive[slots]])
            counts = torch.bincount(inverse, minlength=len(new))
            keys, order = table.keys_at(new).sort()
            new, counts = new[order], counts[order]
        admitted = table.admission_counts.admits(keys, counts, clock.step)
    victims = _NONE
    is_expired = None if policy is None else policy.expired(table.memory, clock)
    if is_expired is not None:
        is_expired &= alive
        # The update's own rows stay: otherwise a row could be evicted and updated at the same time.
        is_expired[slots] = False
        victims = is_expired.nonzero()[:, 0]
    num_admitted = len(new) if admitted is None else int(admitted.sum())
    return RowChanges(slots, new, keys, counts, admitted, victims, clock, held, num_admitted)


def _num_rows(table: HashedTable, changes: RowChanges | None, span: Span | None) -> int:
    """Return the number of live rows in a rectangle after some changes."""
    if span is None:
        if changes is None:
            return table.num_alive
        return table.num_alive - len(changes.victims) + changes.num_admitted
    # Slow path, which reads all keys: the rectangle spans several intervals.
    num = int(in_span(table.live_keys()[0], span).sum())
    if changes is not None:
        num -= int(in_span(table.keys_at(changes.victims), span).sum())
        num += int(in_span(changes.of_admitted(changes.keys), span).sum())
    return num
