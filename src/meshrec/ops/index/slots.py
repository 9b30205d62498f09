"""Per-slot values of hashed tables, written and read for all tables in one call.

Plain torch: the reference for the kernels, and the fallback without them. All lists have an element per
table, or per tensor of table rows. Shape legend: N slots in a list.
"""

from types import TracebackType

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(value: Tensor) -> int:
    """Return the bits of a tensor's first value as an integer, for ``Fills.add``."""
    return int(value.flatten()[:1].view(_INTEGERS[value.element_size()]))


class Fills:
    """Pending writes to rows at some slots, for any number of tensors, executed in one call.

    As a context manager it executes the writes on exit, unless an exception is raised.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._values: list[int] = []

    def add(self, part: Tensor, slots: Tensor, value: int) -> None:
        """Queue a write. Writes to the same slots of a tensor must have equal values.

        Args:
            part: contiguous tensor with a row per slot.
            slots: int64 [N]; may repeat.
            value: the integer, or the value's bits from ``bits_of``.
        """
        self._parts.append(part)
        self._slots.append(slots)
        self._values.append(value)

    def run(self) -> None:
        """Execute the queued writes."""
        if self._parts:
            memory = [
                part.data for part in self._parts
            ]  # .data keeps the tensors' version counters unchanged, see ``WriteCounter``
            operators.fill_slots(memory, self._slots, self._values)
            self._parts, self._slots, self._values = [], [], []

    def __enter__(self) -> "Fills":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.run()


def fill_slots(parts: list[Tensor], slots: list[Tensor], values: list[int]) -> None:
    """Write a value to the rows at some slots, per tensor.

    Args:
        parts: contiguous tensors with a row per slot.
        slots: int64 [N] per tensor; may repeat.
        values: value bits per tensor.
    """
    for part, part_slots, value in zip(parts, slots, values, strict=True):
        # Fill bits through an integer view, so that one call serves all dtypes.
        part.view(_INTEGERS[part.element_size()]).index_fill_(0, part_slots, value)


def release_slots(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Decrement pin counts, and return the slots without pins and without a live row, int64.

    Args:
        pins: pin count by slot, int32, per table. Modified in place.
        alive: whether a slot's row is live, bool, per table.
        slots: slots to unpin, int64 [N], per table. A repeated slot loses several pins.

    Returns:
        Freed slots of all tables, per table in the order of their last pins; and freed slots per table.
    """
    freed: list[int] = []
    counts = []
    for table_pins, table_alive, table_slots in zip(pins, alive, slots, strict=True):
        free = []
        for slot in table_slots.tolist():
            table_pins[slot] -= 1
            if table_pins[slot] == 0 and not table_alive[slot]:
                free.append(slot)
        freed += free
        counts.append(len(free))
    return torch.tensor(freed, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)


def first_left(
    scores: list[Tensor],
    slots: list[Tensor],
    scores_now: list[Tensor],
    alive: list[Tensor],
    used: list[Tensor],
    evicted: list[Tensor],
    limits: list[int],
) -> list[Tensor]:
    """Return the first eviction candidates per list whose row is live, unprotected, and has an unchanged
    score.

    Args:
        scores: scores when the list was built, int32 or int64 [N].
        slots: candidate slots, int64 [N].
        scores_now: present scores by slot, same type.
        alive: whether a slot's row is live, bool; may be longer.
        used: protected slots, int64; may repeat.
        evicted: more protected slots.
        limits: maximum number of results per list.

    Returns:
        Positions per list, int64. Last element: per list, the length of the stale prefix (dead rows or
            changed scores) among the entries read, int64.
    """
    results, num_stale = [], []
    for score, slot, now, live, *protected, limit in zip(
        scores, slots, scores_now, alive, used, evicted, limits, strict=True
    ):
        is_current = (now[slot] == score) & live[slot]
        positions = (is_current & ~torch.isin(slot, torch.cat(protected))).nonzero()[:limit, 0]
        num_read = int(positions[-1]) + 1 if len(positions) == limit > 0 else len(slot) if limit else 0
        num_stale.append(int(is_current[:num_read].logical_not().cumprod(0).sum()))
        results.append(positions)
    return [*results, torch.tensor(num_stale, dtype=torch.int64)]


implement([fill_slots, release_slots, first_left])
