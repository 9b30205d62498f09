"""Item scores for users without a history, from item popularity in the training data."""

import numpy as np
import numpy.typing as npt

from meshrec.data.popularity import NUM_FIRST, PopularityCounts
from meshrec.data.samples import Floats

# I items; counts and subsets as in `PopularityCounts`.

_UNSEEN = 1e-3
"""Added to all counts, so the logarithm is finite for an item without interactions."""
_BLENDS = np.array([(a, b, 4 - a - b) for a in range(4, -1, -1) for b in range(4 - a, -1, -1)]) / 4
"""Candidate weights for the C counts, multiples of 1/4 with sum 1, [15, C]. The first candidate is plain
popularity, which so wins ties."""


def new_user_scores(counts: PopularityCounts) -> Floats:
    """Score all catalog items for a user without a history, by a blend of three kinds of popularity.

    An item's score is the logarithm of its share in a weighted sum of three counts: all interactions, the
    users' first interactions, and recent interactions.

    The weights are selected in the two trials described in `PopularityCounts`. A trial measures DCG@10. Plain
    popularity counts all interactions only. Weights are candidates if their DCG is at least that of plain
    popularity in both trials. The candidate with the largest mean gain is used.

    Returns:
        Scores in catalog order, float32 [I].
    """
    smoothed = counts.counts_PCI + _UNSEEN
    shares_PCI = smoothed / smoothed.sum(2, keepdims=True)

    def dcgs(part: int) -> "npt.NDArray[np.float64]":
        """Return the DCG@10 of the item ranking per row of `_BLENDS`, float64 [15].

        It is summed over the users whose first items the ranking should predict.

        Args:
            part: index of the subset whose interactions determine the ranking.
        """
        best = np.argsort(-(_BLENDS @ shares_PCI[part]), axis=1, kind="stable")[:, :NUM_FIRST]
        sums: npt.NDArray[np.float64] = counts.predicted_firsts_PI[part][best] @ (
            1 / np.log2(np.arange(2, 2 + best.shape[1]))
        )
        return sums

    # DCG relative to plain popularity, [2 trials, 15]; 1e-9 avoids 0 / 0. The first trial runs both ways:
    # even users predict odd users, and the reverse.
    gains = np.stack([(dcg + 1e-9) / (dcg[0] + 1e-9) for dcg in (dcgs(0) + dcgs(1), dcgs(2))])
    mean_gains = np.where(gains.min(0) >= 1, gains.mean(0), 0)
    scores_I: Floats = np.log(_BLENDS[mean_gains.argmax()] @ shares_PCI[-1]).astype(np.float32)
    return scores_I
