"""Item scores for users without a history, from popularity in the training data."""

import numpy as np
import numpy.typing as npt

from meshrec.data.samples import Bools, Floats, Ints

# N interactions, I items, C counts: all, first and recent interactions

_FIRST = 10
"""Number of first items per user, equal to the cut-off of the DCG."""
_LATE = 0.2
"""Share of users in the second trial: those with the latest first interaction."""
_RECENT = 0.1
"""Share of interactions that are recent."""
_UNSEEN = 1e-3
"""Pseudo-count per item: scores of items without interactions are finite."""
_BLENDS = np.array([(a, b, 4 - a - b) for a in range(4, -1, -1) for b in range(4 - a, -1, -1)]) / 4
"""Weights of the counts, in quarters. Plain popularity comes first and wins ties."""


def new_user_scores(users: Ints, items: Ints, times: Ints, num_items: int) -> Floats:
    """Return the log of each item's share among the items that a new user is expected to take, [I].

    The shares blend three counts: all interactions, each user's first items, and recent interactions. Two
    trials choose the weights by DCG@10 on users' first items: one half of the users predicts the other half,
    and what came earlier predicts the users who came last. Of the blends that lose to plain popularity in
    neither trial, the one with the largest mean gain is taken.

    Args:
        users: user numbers [N], ascending.
        items: positions [N] of the items among the I items, in the order in which the user took them.
        times: times [N], ascending within a user.
        num_items: the number I of items.

    Returns:
        Scores, float32 [I].
    """
    starts, lengths = np.unique(users, return_index=True, return_counts=True)[1:]
    is_first_N = np.arange(len(users)) - np.repeat(starts, lengths) < _FIRST
    arrivals_N = np.repeat(times[starts], lengths)
    moment = np.quantile(times[starts], 1 - _LATE)

    def dcgs(fitted_N: Bools, predicted_N: Bools) -> "npt.NDArray[np.float64]":
        """Return the DCG of each blend, summed over the users to predict."""
        taken_I = np.bincount(items[is_first_N & predicted_N], minlength=num_items)
        shares_CI = _shares(items, times, is_first_N, fitted_N, num_items)
        best = np.argsort(-(_BLENDS @ shares_CI), axis=1, kind="stable")[:, :_FIRST]
        sums: npt.NDArray[np.float64] = taken_I[best] @ (1 / np.log2(np.arange(2, 2 + best.shape[1])))
        return sums

    is_even_N = users % 2 == 0
    halves = dcgs(is_even_N, ~is_even_N) + dcgs(~is_even_N, is_even_N)
    late = dcgs(times < moment, arrivals_N >= moment)
    gains = np.stack([(dcg + 1e-9) / (dcg[0] + 1e-9) for dcg in (halves, late)])
    mean_gains = np.where(gains.min(0) >= 1, gains.mean(0), 0)
    everything_N = np.ones_like(is_first_N)
    shares_I = _BLENDS[mean_gains.argmax()] @ _shares(items, times, is_first_N, everything_N, num_items)
    scores_I: Floats = np.log(shares_I).astype(np.float32)
    return scores_I


def _shares(
    items: Ints, times: Ints, is_first_N: Bools, counted_N: Bools, num_items: int
) -> "npt.NDArray[np.float64]":
    """Return the items' shares of all, first and recent interactions among those counted, [C, I]."""
    recent = np.quantile(times[counted_N], 1 - _RECENT) if counted_N.any() else 0
    masks = (counted_N, counted_N & is_first_N, counted_N & (times >= recent))
    counts = np.stack([np.bincount(items[mask], minlength=num_items) for mask in masks]) + _UNSEEN
    shares: npt.NDArray[np.float64] = counts / counts.sum(1, keepdims=True)
    return shares
