"""Item scores for users without a history, from popularity in the training data."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from meshrec.data.interactions import Block, Interactions
from meshrec.data.order_statistics import quantiles
from meshrec.data.samples import Bools, Floats, Ints

# I items, C counts: all, first and recent interactions, P counted interaction parts

_FIRST = 10
"""Number of first items per user, equal to the cut-off of the DCG."""
_LATE = 0.2
"""Share of users in the second trial: those with the latest first interaction."""
_RECENT = 0.1
"""Recent interaction share."""
_UNSEEN = 1e-3
"""Pseudo-count per item: scores of items without interactions are finite."""
_BLENDS = np.array([(a, b, 4 - a - b) for a in range(4, -1, -1) for b in range(4 - a, -1, -1)]) / 4
"""Weights of the counts, in quarters. Plain popularity comes first and wins ties."""


def new_user_scores(log: Interactions, stops: Ints) -> Floats:
    """Return the log of each catalog item's share among the items expected for a new user, [I].

    The shares blend three counts: all interactions, each user's first items, and recent interactions. Two
    trials choose the weights by DCG@10 on users' first items: one half of the users predicts the other half,
    and what came earlier predicts the users who came last. Of the blends that lose to plain popularity in
    neither trial, the one with the largest mean gain is taken.

    Args:
        log: interactions.
        stops: training data end per user, [num_users]; at least one interaction remains.

    Returns:
        Scores, float32 [I].
    """
    firsts, num_items = log.firsts, len(log.catalogue)
    moment = np.quantile(log.times[firsts[stops > firsts]], 1 - _LATE)

    def fitted(block: Block) -> list[Bools]:
        """Return the interactions that predict the others: those of either half, the early ones, and all."""
        is_even = block.users % 2 == 0
        return [is_even, ~is_even, block.times < moment, np.ones_like(is_even)]

    def times_of_parts() -> Iterator[list[Ints]]:
        for block in log.blocks(stops):
            times = block.times
            yield [times[mask] for mask in fitted(block)]

    recent = quantiles(times_of_parts, 1 - _RECENT)
    counts_PCI = np.zeros((len(recent), _BLENDS.shape[1], num_items), np.int64)
    taken_PI = np.zeros((len(recent) - 1, num_items), np.int64)
    for block in log.blocks(stops):
        times, positions, is_first = block.times, block.catalog_positions, block.num_earlier < _FIRST
        masks = fitted(block)
        for part, mask in enumerate(masks):
            for count, counted in enumerate((mask, mask & is_first, mask & (times >= recent[part]))):
                counts_PCI[part, count] += np.bincount(positions[counted], minlength=num_items)
        for part, predicted in enumerate((masks[1], masks[0], block.arrivals >= moment)):
            taken_PI[part] += np.bincount(positions[is_first & predicted], minlength=num_items)
    smoothed = counts_PCI + _UNSEEN
    shares_PCI = smoothed / smoothed.sum(2, keepdims=True)

    def dcgs(part: int) -> "npt.NDArray[np.float64]":
        """Return the DCG for each blend, summed over the users to predict."""
        best = np.argsort(-(_BLENDS @ shares_PCI[part]), axis=1, kind="stable")[:, :_FIRST]
        sums: npt.NDArray[np.float64] = taken_PI[part][best] @ (1 / np.log2(np.arange(2, 2 + best.shape[1])))
        return sums

    gains = np.stack([(dcg + 1e-9) / (dcg[0] + 1e-9) for dcg in (dcgs(0) + dcgs(1), dcgs(2))])
    mean_gains = np.where(gains.min(0) >= 1, gains.mean(0), 0)
    scores_I: Floats = np.log(_BLENDS[mean_gains.argmax()] @ shares_PCI[-1]).astype(np.float32)
    return scores_I
