"""Memory pages of growing tables, populated before the first write.

[Note: pages ahead]

The system allocates a page at the first write. Allocating a huge page can take as long as a training step,
especially on a virtual machine. A hashed table grows in about twenty memory regions at once, and occasionally
several of them reach a new page in the same step. Every step therefore populates a few pages ahead: on
average as many as the new rows fill, starting with the region that runs out first.
"""

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from meshrec.ops.memory import HUGE_PAGE, take_pages

_STEPS_AHEAD = 8
_MIN_SHARE = 16  # never populate more than 1/16 of the present rows ahead


class GrowingRegion:
    """Memory region filled front to back as a table grows.

    Args:
        memory: tensor containing the region, held by a weak reference.
        row_bytes: region growth per table row, in bytes.
        offset: start of the region in the tensor, in bytes.

    Attributes:
        row_bytes: as above.
    """

    def __init__(self, memory: Tensor, row_bytes: float, offset: int = 0) -> None:
        self._memory, self._offset, self.row_bytes = ref(memory), offset, row_bytes
        self._taken = -(memory.data_ptr() + offset) % HUGE_PAGE  # bytes up to the first whole page

    @property
    def num_rows(self) -> float:
        """Number of table rows covered by populated pages."""
        return self._taken / self.row_bytes

    def mark_populated(self, num_rows: int) -> None:
        """Record that the first writes to ``num_rows`` rows have populated their pages."""
        missing = max(0.0, num_rows * self.row_bytes - self._taken)
        self._taken += -int(-missing // HUGE_PAGE) * HUGE_PAGE

    def populate(self) -> bool:
        """Populate the next page; return whether the system could."""
        memory, first = self._memory(), self._offset + self._taken
        self._taken += HUGE_PAGE
        return memory is not None and take_pages(memory.data_ptr() + first, HUGE_PAGE)


class PagePrefaulter:
    """Populates pages ahead for the growing regions of a table; see [Note: pages ahead]."""

    def __init__(self, regions: Sequence[GrowingRegion]) -> None:
        self._regions = list(regions)
        self._row_bytes = sum(region.row_bytes for region in regions)
        self._num_rows, self._owed = 0, 0.0

    def grow(self, num_rows: int) -> None:
        """Populate pages for future rows, after the table has grown to ``num_rows``."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        if new <= 0:
            return
        needed = new * self._row_bytes / HUGE_PAGE
        self._owed += 1.25 * needed  # 25 % more than needed, to build up a lead
        if self._owed < 1:
            return
        for region in self._regions:
            region.mark_populated(num_rows)
        enough = num_rows + min(_STEPS_AHEAD * new, num_rows // _MIN_SHARE)
        for _ in range(1 + int(needed)):
            if not self._regions or self._owed < 1:
                break
            region = min(self._regions, key=lambda region: region.num_rows)
            if region.num_rows >= enough:
                self._owed = 0
            elif region.populate():
                self._owed -= 1
            else:
                # No memory, or the tensor is gone: stop prefaulting for this region. Writes still allocate
                # pages.
                self._regions.remove(region)
