"""The values that hashed tables keep of each slot, written and read for all tables in one call.

The functions with plain torch are the reference for the kernels, and the fallback without them. All lists
have an element for each table, or for each part of its rows.

Shape legend: N slots of a list.
"""

from types import TracebackType

import torch
from torch import Tensor

from meshrec.ops.library import implement

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(value: Tensor) -> int:
    """Return the bits of a tensor's first value as an integer, for ``Fills.add``."""
    return int(value.flatten()[:1].view(_INTEGERS[value.element_size()]))


class Fills:
    """Values to write to the rows at some slots, of any number of tensors in one call.

    As a context manager it writes at the end, unless an exception is raised.
    """

    def __init__(self) -> None:
        self._parts: list[Tensor] = []
        self._slots: list[Tensor] = []
        self._values: list[int] = []

    def add(self, part: Tensor, slots: Tensor, value: int) -> None:
        """Write a value later. What is added for the same slots of a tensor must not differ.

        Args:
            part: the tensor, contiguous, with a row for each slot.
            slots: int64 [N]; they may repeat.
            value: the integer, or the bits of the value as ``bits_of`` returns them.
        """
        self._parts.append(part)
        self._slots.append(slots)
        self._values.append(value)

    def run(self) -> None:
        """Write what was added so far."""
        if self._parts:
            memory = [part.data for part in self._parts]  # nobody's writes: see ``OwnWrites``
            torch.ops.meshrec.fill_slots.default(memory, self._slots, self._values)
            self._parts, self._slots, self._values = [], [], []

    def __enter__(self) -> "Fills":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.run()


def fill_slots(parts: list[Tensor], slots: list[Tensor], values: list[int]) -> None:
    """Write a value to the rows of each tensor at some slots.

    Args:
        parts: contiguous tensors with a row for each slot.
        slots: int64 [N] each; they may repeat.
        values: the bits of the value that each tensor gets.
    """
    for part, own, value in zip(parts, slots, values, strict=True):
        part.view(_INTEGERS[part.element_size()]).index_fill_(0, own, value)


def release_slots(pins: list[Tensor], alive: list[Tensor], slots: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Take a pin off each slot, and return the slots that have no more pins and are not alive, int64.

    Args:
        pins: the number of pins by slot, int32.
        alive: whether the row of each slot is alive, bool.
        slots: int64 [N] each. A slot that repeats has as many pins.

    Returns: the slots of all tables, those of each in the order of their last pins; and the number of each
        table's slots.
    """
    found: list[int] = []
    counts = []
    for own, marks, listed in zip(pins, alive, slots, strict=True):
        free = []
        for slot in listed.tolist():
            own[slot] -= 1
            if own[slot] == 0 and not marks[slot]:
                free.append(slot)
        found += free
        counts.append(len(free))
    return torch.tensor(found, dtype=torch.int64), torch.tensor(counts, dtype=torch.int64)


def first_left(
    scores: list[Tensor],
    slots: list[Tensor],
    scores_now: list[Tensor],
    alive: list[Tensor],
    used: list[Tensor],
    gone: list[Tensor],
    wanted: list[int],
) -> list[Tensor]:
    """Return the first rows of each list that are alive, have the same score as before, and do not stay.

    Args:
        scores: the scores of the rows, int32 or int64 [N].
        slots: their slots, int64 [N].
        scores_now: the scores by slot, of the same type.
        alive: whether the row of each slot is alive, bool; there may be more.
        used: slots of rows that stay, int64; they may repeat.
        gone: more of them.
        wanted: how many rows to return, at most.

    Returns: for each list the positions of its rows, int64; at last how many rows at the beginning of each
        list, up to the last row that was looked at, are not alive or have another score, int64.
    """
    found, over = [], []
    for score, slot, now, marks, *staying, most in zip(
        scores, slots, scores_now, alive, used, gone, wanted, strict=True
    ):
        holds = (now[slot] == score) & marks[slot]
        positions = (holds & ~torch.isin(slot, torch.cat(staying))).nonzero()[:most, 0]
        num_read = int(positions[-1]) + 1 if len(positions) == most > 0 else len(slot) if most else 0
        over.append(int(holds[:num_read].logical_not().cumprod(0).sum()))
        found.append(positions)
    return [*found, torch.tensor(over, dtype=torch.int64)]


implement([fill_slots, release_slots, first_left])
