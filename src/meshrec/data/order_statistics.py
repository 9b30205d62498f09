"""Exact order statistics and quantiles of integer arrays larger than memory, which are read in blocks."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from meshrec.data.samples import Ints

# S series of integers. A series is a long array; quantiles or ranks are computed for every series.

_BINS_LOG2 = 16
"""Binary logarithm of the histogram bins. A pass over the data narrows the result interval to one bin,
1/65,536 of its size, so two passes suffice for values within 2**32, such as times in seconds."""
Blocks = Callable[[], Iterable[Sequence[Ints]]]
"""Function that starts a new pass over S series, and returns an iterable over blocks. A block is a list of S
arrays: the next values of every series, possibly none. Concatenated over all blocks, they are the series."""


def order_statistics(blocks: Blocks, ranks: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return ``np.sort(series)[rank]`` for every requested rank, without sorting or loading a whole series.

    Counts the values in histogram bins. The bin that contains the rank is divided into smaller bins in the
    next pass over the data, until a bin has a single integer.

    Example: for the series ``[30, 10, 20]`` and ``[5, 4]``, the ranks ``[[0, 2], [1]]`` give
    ``[[10, 30], [5]]``.

    Args:
        blocks: function that starts a pass over the S series, and returns their next values block by block;
            see `Blocks`.
        ranks: a list of ranks per series. A rank is an index into the sorted series, from 0.

    Returns:
        A list of values per series, in the order of ``ranks``.
    """
    low, high = _range(blocks)
    # A bin has 1 << shift integers.
    shift = max((high - low).bit_length() - _BINS_LOG2, 0)
    # Per result: the start of an interval with all bins that contains the value, and the rank of the value
    # among the values from this start on.
    searches = [[(low, rank) for rank in of_series] for of_series in ranks]
    while True:
        # Results in the same interval share a histogram.
        counts = {
            (number, start): np.zeros(1 << _BINS_LOG2, np.int64)
            for number, of_series in enumerate(searches)
            for start, _ in of_series
        }
        for block in blocks():
            for (number, start), histogram in counts.items():
                # Values outside the interval get a bin out of range.
                bins = (block[number].astype(np.int64, copy=False) - start) >> shift
                is_inside = (bins >= 0) & (bins < len(histogram))
                histogram += np.bincount(bins[is_inside], minlength=len(histogram))
        for number, of_series in enumerate(searches):
            for index, (start, rank) in enumerate(of_series):
                cumulated = counts[number, start].cumsum()
                # The first bin with more than ``rank`` values in it and in the bins before.
                bin_index = int(np.searchsorted(cumulated, rank, side="right"))
                num_before = int(cumulated[bin_index - 1]) if bin_index else 0
                of_series[index] = start + (bin_index << shift), rank - num_before
        # A bin has a single integer: its start is the result.
        if not shift:
            return [[start for start, _ in of_series] for of_series in searches]
        # The next pass divides the bins found in this one.
        shift = max(shift - _BINS_LOG2, 0)


def quantile(blocks: Blocks, share: float) -> list[float]:
    """Return ``np.quantile(series, share)`` for every series, without loading a whole series.

    Args:
        blocks: function that starts a pass over the S series, and returns their next values block by block;
            see `Blocks`.
        share: the quantile to compute, in [0, 1], the same for all series.

    Returns:
        A value per series; 0 for an empty series.
    """
    sizes = np.sum([[len(part) for part in block] for block in blocks()], axis=0)
    # As in NumPy, a quantile is at a fractional position in the sorted series: interpolate linearly between
    # the values at the two integer positions around it.
    positions = np.maximum(sizes - 1, 0) * share
    lower = positions.astype(np.int64)
    ranks = [[rank, min(rank + 1, size - 1)] if size else [] for rank, size in zip(lower, sizes, strict=True)]
    return [
        float(np.quantile(pair, fraction)) if pair else 0.0
        for pair, fraction in zip(order_statistics(blocks, ranks), positions - lower, strict=True)
    ]


def _range(blocks: Blocks) -> tuple[int, int]:
    """Return the smallest and the largest integer in all series together, in one pass."""
    low, high = np.iinfo(np.int64).max, np.iinfo(np.int64).min
    for block in blocks():
        for part in block:
            if len(part):
                low, high = min(low, int(part.min())), max(high, int(part.max()))
    return int(low), int(high)
