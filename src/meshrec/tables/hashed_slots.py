"""Functions that free slots of hashed tables, of all tables in few calls; see [Note: the life of a row] in
tables/hashed.py.
"""

from collections import deque
from collections.abc import Collection, Iterable, Sequence
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from meshrec.ops.index import Fills, HashIndex, free_slots, release_slots, unique
from meshrec.tables.file_hashed import HashedFile
from meshrec.tables.hashed_books import Books, PinnedRows

_NONE = torch.empty(0, dtype=torch.int64)


class SlotOwner(Protocol):
    """The slots of a ``HashedTable`` and their records."""

    memory: dict[str, Tensor]
    file: HashedFile | None
    slots: HashIndex
    in_flight: WeakSet[PinnedRows]
    released: deque[Tensor]
    books: Books

    def keys_of(self, slots: Tensor) -> Tensor:
        """Return the key that has each slot."""

    def reset(self, slots: Tensor, fills: Fills) -> None:
        """Reset pending rows to their first values."""


def release_rows(tables: Iterable[SlotOwner]) -> None:
    """Free the pending slots that no batch in flight has any more."""
    left = [(table, own) for table in tables if table.released and len(own := _released(table))]
    if left:
        memories, slots = [table.memory for table, _ in left], [own for _, own in left]
        free, counts = release_slots([own["pins"] for own in memories], [own[""] for own in memories], slots)
        if len(free):
            listed = zip(left, free.split(counts.tolist()), strict=True)
            _free([(table, own) for (table, _), own in listed if len(own)])


def forget_rows(going: Iterable[tuple[SlotOwner, Tensor, Collection[object]]]) -> None:
    """Evict rows. Those that a batch in flight holds become pending, with their first values.

    Args:
        going: each table, the slots of its rows, and the pins of batches that have none of these.
    """
    with Fills() as fills:
        left = [(each[0], *_leave(*each, fills)) for each in going if len(each[1])]
    freed = _free([(table, slots) for table, _, slots in left])
    for (table, held, _), keys in zip(left, freed, strict=True):
        if table.books.is_watched:
            table.books.evicted.append(torch.cat([table.keys_of(held), keys]))


def _released(table: SlotOwner) -> Tensor:
    """Return the pending slots of the batches that have gone; a slot of two batches is there twice."""
    found = [_NONE]
    while table.released:
        found.append(table.released.popleft())
    found = [slots for slots in found if len(slots)]
    return found[0] if len(found) == 1 else torch.cat([_NONE, *found])


def _leave(
    table: SlotOwner, slots: Tensor, besides: Collection[object], fills: Fills
) -> tuple[Tensor, Tensor]:
    """Mark rows as evicted. Return the slots that a batch in flight holds, and those to free."""
    fills.add(table.memory[""], slots, 0)
    table.books.report.live -= len(slots)
    table.books.changes += 1
    if table.file is not None:
        table.file.table.log(slots.sort().values)
    others = [pin for pin in table.in_flight if pin not in besides]
    if not others and not table.released:
        return _NONE, slots
    pins = table.memory["pins"]
    gone = torch.zeros_like(table.memory[""]).index_fill_(0, slots, True)
    for pin in others:
        held = unique(pin.slots[gone[pin.slots]])[0]
        pin.pending = torch.cat([pin.pending, held])
        pins[held] += 1
    is_held = pins.index_select(0, slots) > 0
    if not bool(is_held.any()):
        return _NONE, slots
    held = slots[is_held]
    table.reset(held, fills)
    return held, slots[~is_held]


def _free(rows: Sequence[tuple[SlotOwner, Tensor]]) -> list[Tensor]:
    """Remove the IDs of some slots from their indexes, and return the keys of each table's."""
    keys = free_slots([(table.slots, slots) for table, slots in rows])
    for table, slots in rows:
        if table.file is not None and len(slots):
            table.file.table.drop(slots.sort().values)
    return keys
