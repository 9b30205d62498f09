"""Operators on the per-slot tensors in hashed tables; a call covers all tables.

Plain torch: the reference for the kernels, and the fallback without them. All lists have an element per
table, or per row tensor. Shape legend: N slots in a list.
"""

from types import TracebackType

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(value: Tensor) -> int:
    """Return the first tensor element's bits as an integer, for ``Fills.add``."""
    return int(value.flatten()[:1].view(_INTEGERS[value.element_size()]))


class Fills:
    """Fill operation queue ("set these rows in this tensor to this value"), run in one operator call.

    As a context manager it runs the queue on exit, unless an exception was raised.
    """

    def __init__(self) -> None:
        # Parallel lists with an element per queued fill. Emptied by run().
        self._parts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._values: list[int] = []

    def add(self, part: Tensor, slots: Tensor, value: int) -> None:
        """Queue a fill: set the rows ``slots`` in a tensor to a value.

        Queued fills run in an undefined order. Two fills for the same row must have the same value.

        Args:
            part: contiguous tensor with a row per slot.
            slots: rows to fill, int64 [N]; may repeat.
            value: for integer tensors the value, otherwise its bits from ``bits_of``.
        """
        self._parts.append(part)
        self._slots.append(slots)
        self._values.append(value)

    def run(self) -> None:
        """Run all queued fills, and empty the queue."""
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
    """Fill the rows at some slots with one value, for several tensors. Reference for the kernel.

    Args:
        parts: contiguous tensors with a row per slot.
        slots: int64 [N] per tensor; may repeat.
        values: value per tensor, as the bits of one element.
    """
    for part, part_slots, value in zip(parts, slots, values, strict=True):
        # Fill bits through an integer view, so one call serves all dtypes.
        part.view(_INTEGERS[part.element_size()]).index_fill_(0, part_slots, value)


def release_slots(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Decrement slot pin counts, and return slots now free: without pins or a live row.

    Args:
        pins: pin count by slot, int32, per table. Modified in place.
        alive: whether the slot holds a live row, bool, per table.
        slots: slots to unpin, int64 [N], per table. A slot given n times loses n pins.

    Returns:
        Freed slots, int64: for the first table, then the second, etc., in the order in which
            they lost the last pin; and the freed slot count per table, int64.
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
    """Select rows to evict from candidate lists: the first ones still valid.

    A candidate is valid if the row is live, the score has not changed since the list was built, and it is
    not protected.
    Args:
        scores: score per candidate when the list was built, int32 or int64 [N].
        slots: slot per candidate, int64 [N].
        scores_now: present score by slot, same dtype.
        alive: whether the slot holds a live row, bool; may be longer than ``scores_now``.
        used: slots used by the batch, which are protected, int64; may repeat.
        evicted: slots already selected for eviction, which are also protected.
        limits: maximum result count per list.

    Returns:
        Indices of selected candidates per list, int64. The last result element counts the leading
            candidates per list which are stale (dead row or changed score), int64: the caller can
            drop them from the list.
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
