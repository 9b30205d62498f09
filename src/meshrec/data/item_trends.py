"""Popularity trends: how much more or less popular items are lately than in the whole training data.

[Note: new items]

A next-item model learns from all training data alike, and so learns mean popularity. An item that is new has
few interactions, all of them recent: its mean popularity is too low. That of an item out of fashion is too
high. The score of item i therefore gets the additional term ``weight * trend_i``. Here ``trend_i`` is
``log(recent / all)``, with the item's share in the recent interactions, and in all interactions. With a
weight of 1, this is the correction of a softmax for class frequencies other than those in training: Saerens
et al., "Adjusting the outputs of a classifier to new a priori probabilities" (2002).

Recent shares are noisy, and items held out by user instead of by time have no trend. The weight is therefore
selected on validation data. A fit on all rows takes the weight of the first fit. An item that training never
saw has the trend 0.
"""

from typing import NamedTuple

import numpy as np

from meshrec.data.popularity import PopularityCounts
from meshrec.data.samples import Floats, Ints

# I items

_WEIGHTS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Candidates for the weight; the first one wins ties."""


class ItemTrends(NamedTuple):
    """Popularity trends for all catalog items, see [Note: new items]."""

    trends_I: Floats
    """Trend per item in catalog order, float32."""
    weight: float
    """Factor for the trends when they are added to scores, from 0 to 1."""


def item_trends(counts: PopularityCounts, targets_I: Ints) -> ItemTrends:
    """Compute the trends of all items, and select their weight.

    If items were drawn by popularity with trends, the selected weight would give the validation items the
    highest likelihood. Without validation items, early interactions predict the late ones, which are the
    second trial in `PopularityCounts`.

    Args:
        counts: interactions per item.
        targets_I: validation items: number of occurrences per item.
    """
    every_CI, early_CI = counts.counts_PCI[-1], counts.counts_PCI[2]
    trends_I = _trends(every_CI)
    if targets_I.any():
        return ItemTrends(trends_I, _best_weight(every_CI[0], trends_I, targets_I))
    return ItemTrends(trends_I, _best_weight(early_CI[0], _trends(early_CI), every_CI[0] - early_CI[0]))


def _trends(counts_CI: Ints) -> Floats:
    """Return the trend of every item, float32 [I], from its numbers of all, first and recent interactions."""
    every_I, _, recent_I = counts_CI
    # About a tenth, but more if many interactions have the same timestamp.
    share = recent_I.sum() / max(every_I.sum(), 1)
    # Added to the real and the expected number of recent interactions: small numbers give small trends.
    trends_I: Floats = np.log((recent_I + 1) / (share * every_I + 1)).astype(np.float32)
    return trends_I


def _best_weight(counts_I: Ints, trends_I: Floats, targets_I: Ints) -> float:
    """Select the weight with which popularity and trends predict items best.

    Args:
        targets_I: number of occurrences to predict per item.
    """

    def log_likelihood(weight: float) -> float:
        """Return the log-likelihood of all occurrences to predict."""
        logits_I = np.log(counts_I + 1.0) + weight * trends_I
        highest = logits_I.max()
        log_sum = highest + np.log(np.exp(logits_I - highest).sum())
        return float(targets_I @ (logits_I - log_sum))

    return max(_WEIGHTS, key=log_likelihood)
