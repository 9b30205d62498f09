"""Division of a source's rows among ranks."""

from typing import NamedTuple

import numpy as np

from meshrec.data.samples import Bools, Ints

_WINDOWS = 64
"""Windows per rank into which `cut_rows` divides the rows, to add up their costs."""
_FIT_COST = 4
"""Time to add a row to the statistics, relative to the time to read it; measured with five features."""


class RowRange(NamedTuple):
    """Consecutive rows of a block."""

    block: int
    """Block number."""
    start: int
    """First row, counted in the block."""
    stop: int
    """End of the rows, exclusive, counted in the block."""
    first_row: int
    """Row number in the whole data for the first row."""


def row_ranges(block_sizes: Ints, first: int = 0, last: int | None = None) -> list[RowRange]:
    """Return the rows ``[first, last)`` as a range per block, in order.

    The first and the last range may be a part of a block.

    Args:
        block_sizes: rows per block, int64.
        first: first row, counted in the whole data.
        last: end of the rows, exclusive; None: the end of the data. For all rows, every block has a range,
            even if it is empty.
    """
    ends = np.cumsum(block_sizes).tolist()
    num_rows = ends[-1] if ends else 0
    last = num_rows if last is None else last
    ranges = []
    for block, (end, size) in enumerate(zip(ends, block_sizes.tolist(), strict=True)):
        block_start = end - size
        start, stop = max(first, block_start), min(last, end)
        # For all rows, empty blocks are included, so that every block has a range.
        if start < stop or (first, last) == (0, num_rows):
            ranges.append(RowRange(block, start - block_start, stop - block_start, start))
    return ranges


def cut_rows(num_rows: int, num_ranks: int, selected: Bools | None = None) -> list[int]:
    """Divide rows among ranks so that all take about as long to read and fit their rows.

    Args:
        num_rows: row count.
        num_ranks: number of ranks.
        selected: mask of the rows to fit, [num_rows]; other rows are only read. None: all rows.

    Returns:
        The first row of every rank, and ``num_rows`` at the end.
    """
    if selected is None or not num_rows:
        return [num_rows * rank // num_ranks for rank in range(num_ranks + 1)]
    starts = np.arange(0, num_rows, max(num_rows // (_WINDOWS * num_ranks), 1))
    costs = np.diff([*starts, num_rows]) + _FIT_COST * np.add.reduceat(selected, starts, dtype=np.int64)
    ends = np.cumsum(costs)
    cuts = np.searchsorted(ends, ends[-1] * np.arange(1, num_ranks) / num_ranks)
    return [0, *starts[cuts].tolist(), num_rows]
