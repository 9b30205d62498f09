"""Slot states of a hashed table: which slots are free, pending or alive, and which batches use them.

[Note: the life of a row]

A *slot* is a row position in the table's memory. It is *free*, *pending* or *alive*. ``resolve`` looks up a
batch: it assigns free slots to the IDs that have none, and writes their initial rows there. These slots are
pending, and pinned to the batch. At the batch's update (``admission_eviction.py``) the slot of an admitted ID
becomes alive with the present row. The slot of a refused ID stays pending until no batch in flight (looked up
and not yet released) uses it, and then becomes free. If a row is evicted while a batch in flight uses it, the
slot becomes pending and gets the initial row again. So no batch reads or updates the row of another ID, and
the rows a batch reads do not depend on how early it was looked up.

New keys get slots in sorted order, so column shards, here and on other ranks, have equal slots.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import final
from weakref import WeakSet

import torch
from torch import Tensor

from meshrec.ops.index import AssignedSlots, Fills, HashIndex, release_slots, unique
from meshrec.tables.cached.cache import RowsInFlight
from meshrec.tables.hashed.accounting import RowAccounting
from meshrec.tables.hashed.admission import in_span
from meshrec.tables.index import Pin
from meshrec.tables.table import Span

_NONE = torch.empty(0, dtype=torch.int64)


class PinnedRows(Pin):
    """Pin that keeps the slots of a batch from being given to other IDs. Created by ``SlotStates.pin``.

    Args:
        states: slot states of the table.
        parts: slots used by the batch, in one or more tensors; may repeat.
        pending: distinct slots used by the batch that were pending when it was resolved.
        fresh: slots first assigned for this batch, with their keys and counts; None if there are none, or if
            the batch uses other pending slots, too.
    """

    def __init__(
        self,
        states: "SlotStates",
        parts: Sequence[Tensor],
        pending: Tensor,
        *,
        fresh: AssignedSlots | None = None,
    ) -> None:
        # ``pending`` grows if rows used by the batch are evicted before its update; see ``mark_evicted``.
        self.states, self.pending, self._fresh = states, pending, fresh
        self.changes_at_lookup = states.accounting.changes
        """``RowAccounting.changes`` when the batch was looked up: tells whether rows changed state since."""
        self._parts = parts
        self.arriving: RowsInFlight | None = None
        """Pin on the same rows in a file's cache. Set by ``resolve``; None for tables in memory."""

    @property
    def slots(self) -> Tensor:
        """Slots used by the batch, int64; may repeat."""
        return self._parts[0] if len(self._parts) == 1 else torch.cat(list(self._parts))

    def fresh(self) -> AssignedSlots | None:
        """Return the slots first assigned for this batch.

        None if there are none, or if the batch uses other pending slots, too.
        """
        # ``mark_evicted`` replaces ``pending`` when a row becomes pending, hence the identity check.
        return self._fresh if self._fresh is not None and self.pending is self._fresh.slots else None

    def release(self) -> None:
        """Release the slots. At its next lookup, the table frees the slots which are still pending."""
        if not self.is_released:
            self.is_released = True
            self.states.in_flight.discard(self)
            self.states.released.append(self.pending)
            if self.arriving is not None:
                self.arriving.release()

    def __del__(self) -> None:
        # A batch dropped without an update still holds pending slots. Queue them for the table's next lookup:
        # garbage collection may run in any thread, so the table itself must not change here.
        if not self.is_released:
            self.states.released.append(self.pending)


@final
class SlotStates:
    """Slot states of a hashed table, see [Note: the life of a row].

    Args:
        index: map from the keys of live and pending rows to slots.
        is_alive: whether a slot is alive, bool by slot. Grows in place, see [Note: memory that grows].
        pins: how many batches in flight use a pending slot, int32 by slot. Grows in place, too.
    """

    def __init__(self, index: HashIndex, is_alive: Tensor, pins: Tensor) -> None:
        self.index, self.is_alive, self.pins = index, is_alive, pins
        self.accounting = RowAccounting()
        # Batches between lookup and ``release``. Weak, so a dropped batch leaves by itself.
        self.in_flight: WeakSet[PinnedRows] = WeakSet()
        # Pending slots from finished batches, until the next lookup frees them.
        self.released: deque[Tensor] = deque()

    @property
    def num_pending(self) -> int:
        """Number of slots in the index that are not alive: not admitted yet, refused, or evicted in use."""
        return self.index.num_live - self.accounting.report.live

    def live_keys(self, keys: Span | None = None) -> tuple[Tensor, Tensor]:
        """Return the live rows' keys, ascending, and their slots, both int64 [n]."""
        all_keys, slots = self.index.items()
        # The index also lists pending slots. Skip the test if there are none.
        selected = self.is_alive[slots] if self.num_pending else None
        if keys is not None:
            inside = in_span(all_keys, keys)
            selected = inside if selected is None else inside & selected
        return (all_keys, slots) if selected is None else (all_keys[selected], slots[selected])

    def pin(self, parts: Sequence[Tensor], fills: Fills, fresh: AssignedSlots | None) -> PinnedRows:
        """Pin the slots used by a batch.

        Args:
            parts: slots used by the batch, in one or more int64 tensors; may repeat.
            fills: queue for writes to the slots.
            fresh: slots just assigned for this batch, with their keys; None: none.
        """
        # Only pending slots are counted in ``pins``. Live rows need no count: if they are evicted, the pins
        # in ``in_flight`` tell who uses them.
        pending, num_pending = _NONE, self.num_pending
        if fresh is not None and len(fresh.slots) == num_pending:
            # Common case: all pending slots in the table are new in this batch.
            pending = fresh.slots
            fills.add(self.pins, pending, 1)
        elif num_pending:
            # Earlier batches have pending rows, too, and this batch may use them. Read the liveness flags,
            # which queued fills may still change.
            fills.run()
            fresh = None
            slots = torch.cat(list(parts))
            pending = unique(slots[~self.is_alive[slots]])[0]
            self.pins[pending] += 1
        pin = PinnedRows(self, parts, pending, fresh=fresh)
        self.in_flight.add(pin)
        return pin

    def mark_alive(self, slots: Tensor, fills: Fills) -> None:
        """Make pending slots alive. Their rows then survive the release of the batch."""
        if len(slots):
            fills.add(self.is_alive, slots, 1)
            self.accounting.report.live += len(slots)
            self.accounting.changes += 1

    def mark_evicted(
        self, slots: Tensor, updating: Collection[object], fills: Fills
    ) -> tuple[Tensor, Tensor]:
        """Mark slots as no longer alive. The slots used by batches in flight become pending.

        Args:
            slots: slots to evict, distinct, int64.
            updating: pins of batches known to use none of these slots.
            fills: queue for writes to the slots.

        Returns:
            The slots that batches in flight use, now pending; and the remaining slots, to be freed.
        """
        fills.add(self.is_alive, slots, 0)
        self.accounting.report.live -= len(slots)
        self.accounting.changes += 1
        # Rows of the updating batches are never victims, so only other batches may use these slots.
        # Identity suffices: pins do not define equality.
        other_pins = [pin for pin in self.in_flight if pin not in updating]
        if not other_pins and not self.released:
            return _NONE, slots
        # Which slots are victims, by slot: a lookup table for the slots used by each batch.
        is_victim = torch.zeros_like(self.is_alive).index_fill_(0, slots, True)
        # ``pins`` counts users of pending slots only, and these slots were alive until now: count them here.
        for pin in other_pins:
            held = unique(pin.slots[is_victim[pin.slots]])[0]
            pin.pending = torch.cat([pin.pending, held])
            self.pins[held] += 1
        is_held = self.pins.index_select(0, slots) > 0
        return slots[is_held], slots[~is_held]

    def pop_released(self) -> Tensor:
        """Return the pending slots of finished batches, int64, and clear the list ``released``.

        A slot used by two finished batches occurs twice.
        """
        parts = [_NONE]
        # Other threads may append meanwhile: ``popleft`` and ``append`` are atomic.
        while self.released:
            parts.append(self.released.popleft())
        parts = [slots for slots in parts if len(slots)]
        return parts[0] if len(parts) == 1 else torch.cat([_NONE, *parts])


def unused_slots(states: Sequence[SlotStates]) -> list[tuple[int, Tensor]]:
    """Return the pending slots that no batch in flight uses any longer. Forgets the pins released by now.

    Args:
        states: slot states of several tables, which one kernel call treats.

    Returns:
        Positions in ``states`` and slots, int64, of the tables with such slots.
    """
    released = [(number, part.pop_released()) for number, part in enumerate(states) if part.released]
    released = [(number, slots) for number, slots in released if len(slots)]
    if not released:
        return []
    free, counts = release_slots(
        [states[number].pins for number, _ in released],
        [states[number].is_alive for number, _ in released],
        [slots for _, slots in released],
    )
    unused = zip(released, free.split(counts.tolist()), strict=True)
    return [(number, slots) for (number, _), slots in unused if len(slots)]
