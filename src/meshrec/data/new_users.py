"""Item scores for users without a history, from item popularity in the training data."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from meshrec.data.interactions import Block, Interactions
from meshrec.data.order_statistics import quantile
from meshrec.data.samples import Bools, Floats, Ints

# I items. C = 3 counts per item: all interactions, users' first interactions, recent interactions.
# P = 4 subsets of the interactions that popularity is counted on; see `subset_masks`.

_FIRST = 10
"""Interactions per user that count as first ones. Equals the cut-off of DCG@10."""
_LATE = 0.2
"""Share of users to predict in the second trial: the users with the latest first interaction."""
_RECENT = 0.1
"""Share of interactions that count as recent."""
_UNSEEN = 1e-3
"""Added to all counts, so the logarithm is finite for an item without interactions."""
_BLENDS = np.array([(a, b, 4 - a - b) for a in range(4, -1, -1) for b in range(4 - a, -1, -1)]) / 4
"""Candidate weights for the C counts, multiples of 1/4 with sum 1, [15, C]. The first candidate is plain
popularity, which so wins ties."""


def new_user_scores(log: Interactions, stops: Ints) -> Floats:
    """Score all catalog items for a user without a history, by a blend of three kinds of popularity.

    An item's score is the logarithm of its share in a weighted sum of three counts: all interactions, the
    users' first interactions, and recent interactions.

    The weights are selected in two trials. In the first trial, counts over half the users predict the first
    items in the other half. In the second trial, counts over early interactions predict the first items for
    the users who came last. A trial measures DCG@10. Plain popularity counts all interactions only. Weights
    are candidates if their DCG is at least that of plain popularity in both trials. The candidate with the
    largest mean gain is used.

    Args:
        log: interactions.
        stops: training data end per user, exclusive, [num_users]. Some interaction must be before it.

    Returns:
        Scores in catalog order, float32 [I].
    """
    firsts, num_items = log.firsts, len(log.catalogue)
    moment = np.quantile(log.times[firsts[stops > firsts]], 1 - _LATE)

    def subset_masks(block: Block) -> list[Bools]:
        """Return P masks [n], which select the interactions in a block on which popularity is counted.

        - Masks 0 and 1, for the first trial: users with even numbers, and users with odd numbers.
        - Mask 2, for the second trial: early interactions.
        - Mask 3, for the result: all interactions.
        """
        is_even = block.users % 2 == 0
        return [is_even, ~is_even, block.times < moment, np.ones_like(is_even)]

    def subset_times() -> Iterator[list[Ints]]:
        """Yield a list for every block, with the timestamps selected by each of the P masks."""
        for block in log.blocks(stops):
            times = block.times
            yield [times[mask] for mask in subset_masks(block)]

    # Interactions from these timestamps on are recent, per subset.
    recent = quantile(subset_times, 1 - _RECENT)
    # A prediction uses counts_PCI. taken_PI counts the items it should rank first.
    counts_PCI = np.zeros((len(recent), _BLENDS.shape[1], num_items), np.int64)
    target_counts_PI = np.zeros((len(recent) - 1, num_items), np.int64)
    for block in log.blocks(stops):
        times, positions, is_first = block.times, block.catalog_positions, block.num_earlier < _FIRST
        masks = subset_masks(block)
        for part, mask in enumerate(masks):
            for count, counted in enumerate((mask, mask & is_first, mask & (times >= recent[part]))):
                counts_PCI[part, count] += np.bincount(positions[counted], minlength=num_items)
        for part, predicted in enumerate((masks[1], masks[0], block.arrivals >= moment)):
            target_counts_PI[part] += np.bincount(positions[is_first & predicted], minlength=num_items)
    smoothed = counts_PCI + _UNSEEN
    shares_PCI = smoothed / smoothed.sum(2, keepdims=True)

    def dcgs(part: int) -> "npt.NDArray[np.float64]":
        """Return the DCG@10 of the item ranking per row of `_BLENDS`, float64 [15].

        It is summed over the users whose first items the ranking should predict.

        Args:
            part: index of the mask in `subset_masks` that selects the interactions for the ranking.
        """
        best = np.argsort(-(_BLENDS @ shares_PCI[part]), axis=1, kind="stable")[:, :_FIRST]
        sums: npt.NDArray[np.float64] = target_counts_PI[part][best] @ (
            1 / np.log2(np.arange(2, 2 + best.shape[1]))
        )
        return sums

    # DCG relative to plain popularity, [2 trials, 15]; 1e-9 avoids 0 / 0. The first trial runs both ways:
    # even users predict odd users, and the reverse.
    gains = np.stack([(dcg + 1e-9) / (dcg[0] + 1e-9) for dcg in (dcgs(0) + dcgs(1), dcgs(2))])
    mean_gains = np.where(gains.min(0) >= 1, gains.mean(0), 0)
    scores_I: Floats = np.log(_BLENDS[mean_gains.argmax()] @ shares_PCI[-1]).astype(np.float32)
    return scores_I
