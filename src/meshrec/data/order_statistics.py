"""Order statistics and quantiles of integers that are read in blocks."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshrec.data.samples import Ints

# S integer series, each with separate quantiles or ranks

_BINS_LOG2 = 16
"""Bits per pass. Each pass divides the interval of a result by 2**16: two passes find a time in seconds."""
Blocks = Callable[[], Iterable[Sequence[Ints]]]
"""Returns the blocks for S series. A block has a part from each series, possibly an empty one."""


def order_statistics(blocks: Blocks, ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ``np.sort(series)[rank]`` for each rank in each series, by counting in several passes.

    Args:
        blocks: the S series.
        ranks: positions in the sorted series, each below the series' length; [S][...].
    """
    low, high = _range(blocks)
    shift = max((high - low).bit_length() - _BINS_LOG2, 0)
    # Interval start and rank within the interval [start, start + (1 << shift + 16)) per result.
    searches = [[(low, rank) for rank in of_series] for of_series in ranks]
    while True:
        counts = {
            (number, start): np.zeros(1 << _BINS_LOG2, np.int64)
            for number, of_series in enumerate(searches)
            for start, _ in of_series
        }
        for block in blocks():
            for (number, start), histogram in counts.items():
                bins = (block[number].astype(np.int64, copy=False) - start) >> shift
                is_inside = (bins >= 0) & (bins < len(histogram))
                histogram += np.bincount(bins[is_inside], minlength=len(histogram))
        for number, of_series in enumerate(searches):
            for index, (start, rank) in enumerate(of_series):
                cumulated = counts[number, start].cumsum()
                bin_index = int(np.searchsorted(cumulated, rank, side="right"))
                num_before = int(cumulated[bin_index - 1]) if bin_index else 0
                of_series[index] = start + (bin_index << shift), rank - num_before
        if not shift:
            return [[start for start, _ in of_series] for of_series in searches]
        shift = max(shift - _BINS_LOG2, 0)


def quantiles(blocks: Blocks, share: float) -> list[float]:
    """Return ``np.quantile(series, share)`` for each series; 0 for a series without integers.

    Args:
        blocks: the S series.
        share: the quantile, in [0, 1].
    """
    sizes = np.sum([[len(part) for part in block] for block in blocks()], axis=0)
    # As in NumPy: linear interpolation between the two neighbors of a position in the sorted series.
    positions = np.maximum(sizes - 1, 0) * share
    lower = positions.astype(np.int64)
    ranks = [[rank, min(rank + 1, size - 1)] if size else [] for rank, size in zip(lower, sizes, strict=True)]
    return [
        float(np.quantile(pair, fraction)) if pair else 0.0
        for pair, fraction in zip(order_statistics(blocks, ranks), positions - lower, strict=True)
    ]


def _range(blocks: Blocks) -> tuple[int, int]:
    """Return the smallest and largest integer in all series."""
    low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for block in blocks():
        for part in block:
            if len(part):
                low, high = min(low, int(part.min())), max(high, int(part.max()))
    return int(low), int(high)
