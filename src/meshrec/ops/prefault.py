"""Prefaulting: memory pages for growing tables are allocated ahead of the first write.

[Note: pages ahead]

The system allocates a page at the first write. Allocating a huge page can take as long as a training step,
especially on a virtual machine. A hashed table grows in about twenty memory regions at once, and occasionally
several reach a new page in the same step. Every step therefore populates a few pages ahead: on
average as many as the new rows fill, starting with the region running out first.
"""

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from meshrec.ops.memory import HUGE_PAGE, populate_pages

# With this lead, the slowest step for a growing table took 2 to 2.7 median steps instead of 4 to 14.
_STEPS_AHEAD = 8
_MIN_SHARE = 16  # never populate more than 1/16 of the present rows ahead, so small tables stay small


class GrowingRegion:
    """Memory region filled front to back as a table grows.

    Args:
        memory: tensor containing the region, held by a weak reference.
        row_bytes: region growth per table row, in bytes.
        offset: region start in the tensor, in bytes.

    Attributes:
        row_bytes: bytes of region growth per table row.
    """

    def __init__(self, memory: Tensor, row_bytes: float, offset: int = 0) -> None:
        self._memory, self._offset, self.row_bytes = ref(memory), offset, row_bytes
        # Populated bytes from the region start. Initially up to the first whole page: the
        # partial page before it belongs to the neighboring region too.
        self._populated = -(memory.data_ptr() + offset) % HUGE_PAGE

    @property
    def num_rows(self) -> float:
        """Table row count fitting into the populated pages."""
        return self._populated / self.row_bytes

    def mark_populated(self, num_rows: int) -> None:
        """Record that writes to the first ``num_rows`` rows have populated the pages under them."""
        missing = max(0.0, num_rows * self.row_bytes - self._populated)
        self._populated += -int(-missing // HUGE_PAGE) * HUGE_PAGE

    def populate(self) -> bool:
        """Populate the next huge page. Returns whether the system could."""
        memory, first = self._memory(), self._offset + self._populated
        self._populated += HUGE_PAGE
        return memory is not None and populate_pages(memory.data_ptr() + first, HUGE_PAGE)


class PagePrefaulter:
    """Populates pages ahead for the growing regions in one table; see [Note: pages ahead]."""

    def __init__(self, regions: Sequence[GrowingRegion]) -> None:
        self._regions = list(regions)
        self._row_bytes = sum(region.row_bytes for region in regions)
        # Table rows at the last call, and the page count to populate, accumulated over calls.
        self._num_rows, self._pages_owed = 0, 0.0

    def grow(self, num_rows: int) -> None:
        """Populate pages for future rows. Call it after the table has grown to ``num_rows`` rows."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        if new <= 0:
            return
        needed = new * self._row_bytes / HUGE_PAGE
        self._pages_owed += 1.25 * needed  # 25 % more than needed, to build up a lead
        if self._pages_owed < 1:
            return
        for region in self._regions:
            region.mark_populated(num_rows)
        enough = num_rows + min(_STEPS_AHEAD * new, num_rows // _MIN_SHARE)
        for _ in range(1 + int(needed)):
            if not self._regions or self._pages_owed < 1:
                break
            # The region running out first.
            region = min(self._regions, key=lambda region: region.num_rows)
            if region.num_rows >= enough:
                self._pages_owed = 0
            elif region.populate():
                self._pages_owed -= 1
            else:
                # No memory left, or the tensor was freed: stop prefaulting for this region. Writes still
                # allocate pages.
                self._regions.remove(region)
