"""Pages of memory that grows, taken from the system before they are written to.

[Note: pages ahead]

The system gives a page of memory when it is first written to. A huge page may take as long as a training
step, on a virtual machine above all. A hashed table grows in twenty places at once, and now and then several
of them come to a new page in the same step. So every step takes some pages in advance: as many as its new
rows fill on average, and always those that will be needed first.
"""

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from meshrec.ops.memory import HUGE_PAGE, take_pages

_STEPS_AHEAD = 8
_LEAST_SHARE = 16  # at most a sixteenth of the rows


class GrowingPart:
    """Memory that is filled from its beginning on as a table grows.

    Args:
        memory: the tensor that it lies in. When it is gone, the part is, too.
        row_bytes: the bytes that the part grows by for each row of the table.
        offset: where the part begins in the tensor, in bytes.

    Attributes:
        row_bytes: as above.
    """

    def __init__(self, memory: Tensor, row_bytes: float, offset: int = 0) -> None:
        self._memory, self._offset, self.row_bytes = ref(memory), offset, row_bytes
        self._taken = -(memory.data_ptr() + offset) % HUGE_PAGE  # where its first whole page begins

    @property
    def num_rows(self) -> float:
        """The number of rows for which there are pages."""
        return self._taken / self.row_bytes

    def fill(self, num_rows: int) -> None:
        """Record that there are pages for so many rows."""
        missing = max(0.0, num_rows * self.row_bytes - self._taken)
        self._taken += -int(-missing // HUGE_PAGE) * HUGE_PAGE

    def take(self) -> bool:
        """Take the next page; return whether that was possible."""
        memory, first = self._memory(), self._offset + self._taken
        self._taken += HUGE_PAGE
        return memory is not None and take_pages(memory.data_ptr() + first, HUGE_PAGE)


class PagesAhead:
    """Takes pages for the growing parts of a table in advance; see [Note: pages ahead]."""

    def __init__(self, parts: Sequence[GrowingPart]) -> None:
        self._parts = list(parts)
        self._row_bytes = sum(part.row_bytes for part in parts)
        self._num_rows, self._owed = 0, 0.0

    def grow(self, num_rows: int) -> None:
        """Take pages for rows that may come; the table has grown to ``num_rows``."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        if new <= 0:
            return
        needed = new * self._row_bytes / HUGE_PAGE
        self._owed += 1.25 * needed  # so that a lead builds up
        if self._owed < 1:
            return
        for part in self._parts:
            part.fill(num_rows)
        enough = num_rows + min(_STEPS_AHEAD * new, num_rows // _LEAST_SHARE)
        for _ in range(1 + int(needed)):
            if not self._parts or self._owed < 1:
                break
            part = min(self._parts, key=lambda each: each.num_rows)
            if part.num_rows >= enough:
                self._owed = 0
            elif part.take():
                self._owed -= 1
            else:
                self._parts.remove(part)
