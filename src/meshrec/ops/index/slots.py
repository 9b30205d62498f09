"""Operators on the per-slot tensors of hashed tables; each call covers all tables.

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
    """Return the bits of a tensor's first element as an integer, for ``Fills.add``."""
    return int(value.flatten()[:1].view(_INTEGERS[value.element_size()]))


class Fills:
    """Queue of fill operations ("set these rows of this tensor to this value"), run in one operator call.

    As a context manager it runs the queue on exit, unless an exception was raised.
    """

    def __init__(self) -> None:
        # Parallel lists with an element per queued fill. Emptied by run().
        self._parts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._values: list[int] = []

    def add(self, part: Tensor, slots: Tensor, value: int) -> None:
        """Queue a fill. Fills of the same slots of a tensor must have equal values: their order is undefined.

        Args:
            part: contiguous tensor with a row per slot.
            slots: int64 [N]; may repeat.
            value: an integer, or for other dtypes the bits from ``bits_of``.
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
        # Fill bits through an integer view, so that one call serves all dtypes.
        part.view(_INTEGERS[part.element_size()]).index_fill_(0, part_slots, value)


def release_slots(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Decrement the pin counts of slots, and return the slots that are now free: without pins or a live row.

    Args:
        pins: pin count by slot, int32, per table. Modified in place.
        alive: whether the slot holds a live row, bool, per table.
        slots: slots to unpin, int64 [N], per table. A slot given n times loses n pins.

    Returns:
        Freed slots, int64: those of the first table, then of the second, etc., each in the order in which
            they lost the last pin; and the number of freed slots per table, int64.
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
    """Select rows to evict from each list of candidates: the first ones that are still valid.

    A candidate is valid if its row is live, its score has not changed since the list was built, and it is
    not protected.
    Args:
        scores: score of each candidate when the list was built, int32 or int64 [N].
        slots: slot of each candidate, int64 [N].
        scores_now: present score by slot, same dtype.
        alive: whether the slot holds a live row, bool; may be longer than ``scores_now``.
        used: slots that the batch uses, which are protected, int64; may repeat.
        evicted: slots already selected for eviction, which are also protected.
        limits: maximum number of results per list.

    Returns:
        Indices of the selected candidates in each list, int64. The last element of the result is the number
            of leading candidates per list that are stale (dead row or changed score), int64: the caller can
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
