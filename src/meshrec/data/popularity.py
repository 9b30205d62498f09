"""Counts of interactions per item, from which popularity and its trends are estimated."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meshrec.data.interactions import Block, Interactions
from meshrec.data.order_statistics import quantile
from meshrec.data.samples import Bools, Ints

# I items. C = 3 counts per item: all interactions, users' first interactions, recent interactions.
# P = 4 subsets of the interactions that are counted; see `popularity_counts`.

NUM_FIRST = 10
"""Interactions per user that count as first ones. Equals the cut-off of DCG@10."""
_LATE = 0.2
"""Share of users to predict in the second trial: the users with the latest first interaction."""
_RECENT = 0.1
"""Share of interactions that count as recent."""


class PopularityCounts(NamedTuple):
    """Interactions per item, in catalog order, for two trials and for the result.

    A trial uses the counts over some interactions to predict other ones, and so selects how counts are used.

    - First trial: counts over half the users predict the first items in the other half, and the reverse.
    - Second trial: counts over early interactions predict late interactions. "Late" starts when the last
      fifth of the users begins.
    """

    counts_PCI: Ints
    """Numbers of all, first and recent interactions. The subsets are: users with even numbers, users with odd
    numbers, early interactions, and all interactions."""
    predicted_firsts_PI: Ints
    """First interactions to predict from each of the first three subsets, int64 [3, I]. For early
    interactions, these are the first interactions of users who begin late."""


def popularity_counts(log: Interactions, stops: Ints) -> PopularityCounts:
    """Count all, first and recent interactions per item, in the four subsets of `PopularityCounts`.

    First finds the time from which a subset's interactions are recent, then counts in one pass over the log.

    Args:
        log: interactions.
        stops: training data end per user, exclusive, [num_users]. At least one user must have training data.
    """
    firsts, num_items = log.firsts, len(log.catalogue)
    moment = np.quantile(log.times[firsts[stops > firsts]], 1 - _LATE)

    def subset_masks(block: Block) -> list[Bools]:
        """Return P masks [n], which select the interactions in a block that are counted."""
        is_even = block.users % 2 == 0
        return [is_even, ~is_even, block.times < moment, np.ones_like(is_even)]

    def subset_times() -> Iterator[list[Ints]]:
        """Yield a list for every block, with the timestamps selected by each of the P masks."""
        for block in log.blocks(stops):
            times = block.times
            yield [times[mask] for mask in subset_masks(block)]

    # Interactions from these timestamps on are recent, per subset.
    recent = quantile(subset_times, 1 - _RECENT)
    counts_PCI = np.zeros((len(recent), 3, num_items), np.int64)
    predicted_PI = np.zeros((len(recent) - 1, num_items), np.int64)
    for block in log.blocks(stops):
        times, positions, is_first = block.times, block.catalog_positions, block.num_earlier < NUM_FIRST
        masks = subset_masks(block)
        for part, mask in enumerate(masks):
            for count, counted in enumerate((mask, mask & is_first, mask & (times >= recent[part]))):
                counts_PCI[part, count] += np.bincount(positions[counted], minlength=num_items)
        for part, predicted in enumerate((masks[1], masks[0], block.arrivals >= moment)):
            predicted_PI[part] += np.bincount(positions[is_first & predicted], minlength=num_items)
    return PopularityCounts(counts_PCI, predicted_PI)
