"""Operators on tensors with a value per slot of a hashed table. A single call covers all tables.

Plain torch: the reference for the kernels, and the fallback without them. All list arguments have an element
per table (or per tensor to fill). Shape legend: N slots.
"""

from types import TracebackType

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.library import implement

# By element size: an integer type through which the bits of any other type are written.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(value: Tensor) -> int:
    """Return the bits of the first element in a tensor as an integer, for ``Fills.add``."""
    return int(value.flatten()[:1].view(_INTEGERS[value.element_size()]))


class Fills:
    """Queue of fills ("set these rows in this tensor to this value"), which run in a single operator call.

    As a context manager, it runs the queue on exit, unless an exception was raised.
    """

    def __init__(self) -> None:
        # Parallel lists with an element per queued fill. Emptied by run().
        self._parts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._values: list[int] = []

    def add(self, part: Tensor, slots: Tensor, value: int) -> None:
        """Queue a fill: set the rows ``slots`` of a tensor to a value.

        Queued fills run in an undefined order. If two fills cover the same row, they must have the same
        value.

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
            # ``data`` keeps the tensors' version counters unchanged, see ``WriteCounter``.
            memory = [part.data for part in self._parts]
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
    """Set the rows at some slots to a value, in several tensors. Reference for the kernel.

    Args:
        slots: rows to fill in each tensor, int64 [N]; may repeat.
    """
    for part, part_slots, value in zip(parts, slots, values, strict=True):
        # Fill bits through an integer view, so one call serves all dtypes.
        part.view(_INTEGERS[part.element_size()]).index_fill_(0, part_slots, value)


def release_slots(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Decrement the pin counts of slots, and return the slots that are now free.

    A slot is free if it has no pins and holds no live row. A batch pins the slots that it still needs.

    Args:
        pins: pin count per slot, int32, for each table. Modified in place.
        slots: slots to unpin, int64 [N], for each table. A slot that occurs n times loses n pins.

    Returns:
        Freed slots, int64, table by table, in the order in which they lost the last pin; and the number of
            freed slots per table, int64.
    """
    freed: list[int] = []
    counts = []
    for table_pins, table_alive, table_slots in zip(pins, alive, slots, strict=True):
        # In the order in which slots lose the last pin, as in the kernel.
        free = []
        # One by one, because a slot may occur several times.
        for slot in table_slots.tolist():
            table_pins[slot] -= 1
            # A live row keeps its slot without pins. A removed row keeps it until the last pin is gone.
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
    """Select the rows to evict from lists of candidates: in each list, the first ones that are still valid.

    A candidate is stale if its row is no longer live, or if its score has changed since the list was built. A
    candidate is protected if the batch uses it or if it was already selected. Valid candidates are neither.

    Args:
        scores: candidate scores when the list was built, int32 or int64 [N], for each list.
        slots: slots of the candidates, int64 [N], for each list.
        alive: whether a slot holds a live row, bool; may be longer than ``scores_now``.
        used: slots that the batch uses, int64; may repeat.
        limits: maximum number of rows to select, for each list.

    Returns:
        For each list, the positions of the selected candidates, int64. One more tensor at the end holds, for
            each list, how many candidates at the front are stale, int64: the caller can drop these.
    """
    results, num_stale = [], []
    for score, slot, now, live, *protected, limit in zip(
        scores, slots, scores_now, alive, used, evicted, limits, strict=True
    ):
        # alive may be longer than scores_now, so index both by slot.
        is_current = (now[slot] == score) & live[slot]
        positions = (is_current & ~torch.isin(slot, torch.cat(protected))).nonzero()[:limit, 0]
        # The kernel stops reading once it has enough, so count stale candidates only up to there.
        num_read = int(positions[-1]) + 1 if len(positions) == limit > 0 else len(slot) if limit else 0
        # cumprod is 1 only for candidates before the first current one.
        num_stale.append(int(is_current[:num_read].logical_not().cumprod(0).sum()))
        results.append(positions)
    return [*results, torch.tensor(num_stale, dtype=torch.int64)]


implement([fill_slots, release_slots, first_left])
