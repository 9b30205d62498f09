"""Prefaulting: allocate memory pages for a growing table before they are first written to.

[Note: pages ahead]

The system allocates a page at the first write. Allocating a huge page can take as long as a training step,
especially on a virtual machine. A hashed table grows in about twenty memory regions at once, and occasionally
several regions reach a new page in the same step. Every step therefore allocates (populates) a few pages
ahead, on average as many as the new rows fill, starting with the region that will run out first.
"""

from collections.abc import Sequence
from weakref import ref

from torch import Tensor

from meshrec.ops.memory import HUGE_PAGE, populate_pages

# With this lead, the slowest step for a growing table took 2 to 2.7 median steps instead of 4 to 14.
_STEPS_AHEAD = 8
_MIN_SHARE = 16  # never populate more than 1/16 of the present rows ahead, so small tables stay small


class GrowingRegion:
    """A memory region that is filled from front to back as a table grows.

    Args:
        row_bytes: bytes by which the region grows per table row.
        offset: start of the region in the tensor, in bytes.

    Attributes:
        row_bytes: bytes by which the region grows per table row.
    """

    def __init__(self, memory: Tensor, row_bytes: float, offset: int = 0) -> None:
        # A weak reference, which does not keep a dropped table alive.
        self._memory, self._offset, self.row_bytes = ref(memory), offset, row_bytes
        # Populated bytes from the region start. Initially up to the first whole page: the
        # partial page before it belongs to the neighboring region too.
        self._populated = -(memory.data_ptr() + offset) % HUGE_PAGE

    @property
    def num_rows(self) -> float:
        """Number of table rows that fit into the populated pages."""
        return self._populated / self.row_bytes

    def mark_populated(self, num_rows: int) -> None:
        """Record that writes to the first ``num_rows`` rows have populated the pages that hold them."""
        missing = max(0.0, num_rows * self.row_bytes - self._populated)
        # Whole pages, rounded up.
        self._populated += -int(-missing // HUGE_PAGE) * HUGE_PAGE

    def populate(self) -> bool:
        """Populate the next huge page. Returns False if the system could not, or if the tensor is gone."""
        memory, first = self._memory(), self._offset + self._populated
        # Counted even if it fails: the caller then gives up on this region.
        self._populated += HUGE_PAGE
        return memory is not None and populate_pages(memory.data_ptr() + first, HUGE_PAGE)


class PagePrefaulter:
    """Population of memory pages ahead of a growing table's rows; see [Note: pages ahead]."""

    def __init__(self, regions: Sequence[GrowingRegion]) -> None:
        self._regions = list(regions)
        self._row_bytes = sum(region.row_bytes for region in regions)
        # Table rows at the last call, and the page count to populate, accumulated over calls.
        self._num_rows, self._pages_owed = 0, 0.0

    def grow(self, num_rows: int) -> None:
        """Populate pages for future rows. Call it after the table has grown."""
        new, self._num_rows = num_rows - self._num_rows, num_rows
        if new <= 0:
            return
        # Pages that the new rows fill, over all regions.
        needed = new * self._row_bytes / HUGE_PAGE
        self._pages_owed += 1.25 * needed  # 25 % more than needed, to build up a lead
        if self._pages_owed < 1:
            return
        # Rows written since the last call have populated their pages themselves.
        for region in self._regions:
            region.mark_populated(num_rows)
        # No region needs more lead than this.
        enough = num_rows + min(_STEPS_AHEAD * new, num_rows // _MIN_SHARE)
        # At most a page more than this step filled, which bounds the time that a step waits.
        for _ in range(1 + int(needed)):
            if not self._regions or self._pages_owed < 1:
                break
            # The region running out first.
            region = min(self._regions, key=lambda region: region.num_rows)
            if region.num_rows >= enough:
                # All regions have enough lead: forget the debt, so that it does not grow without limit.
                self._pages_owed = 0
            elif region.populate():
                self._pages_owed -= 1
            else:
                # No memory left, or the tensor was freed: stop prefaulting for this region. Writes still
                # allocate pages.
                self._regions.remove(region)
