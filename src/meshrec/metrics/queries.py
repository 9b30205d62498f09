"""Ranking metrics for queries with graded labels: the samples with the same query are ranked by their scores.

Shape legend: n samples, T ties (samples with equal score and query), Q queries.
"""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import Floats, Ints, sort_into_ties
from meshrec.metrics.gathering import (
    check_cutoffs,
    encode_ids,
    gather_columns,
    id_column,
    normalize_samples,
    stack_columns,
)


def query_metrics(
    scores: Tensor,
    labels: Tensor,
    queries: Tensor,
    weights: Tensor | None = None,
    *,
    ks: Sequence[int] = (10,),
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute NDCG and MRR, averaged over the queries on all ranks.

    - ``ndcg@k``: normalized discounted cumulative gain in the first k positions, with the gain
      ``2 ** label - 1`` and the discount ``1 / log2(position + 1)``; see Burges et al., "Learning to rank
      using gradient descent" (2005).
    - ``mrr``: the mean of 1 / position of the first sample with a positive label.

    If samples have equal scores, a metric is averaged over all orders of these samples, as in scikit-learn's
    ``ndcg_score``. See McSherry and Najork, "Computing information retrieval performance measures efficiently
    in the presence of tied scores" (2008). Queries without a positive label are omitted. Collective if
    a process group is initialized.

    Args:
        scores: scores, [n]; may be infinite.
        labels: labels, [n], finite, at least 0.
        queries: query ID per sample, [n]. The samples with the same query may be on several ranks.
        weights: sample weights [n]; None: 1. A query's weight is the mean over the samples, as in LightGBM.
            Samples with weight 0 are not ranked.
        ks: cutoffs k.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks. If False, not collective.

    Returns:
        Metrics by name; all NaN if a score is NaN, and empty if no query has a positive label.

    Raises:
        ValueError: sizes differ, or a label, weight or cutoff is not allowed.
    """
    check_cutoffs(ks)
    columns = stack_columns(id_column(queries), scores, labels, weights=weights)
    columns = gather_columns(columns, group) if gather else columns
    columns = normalize_samples(
        columns, (columns[-2] >= 0) & columns[-2].isfinite(), "finite and at least 0"
    ).cpu()
    query_n = encode_ids(columns[0], "queries", is_floating=queries.is_floating_point())
    score_n, label_n, weight_n = columns[1:].numpy()
    # Query numbers have no gaps, because `encode_ids` numbers the queries that occur.
    sizes_Q = np.bincount(query_n)
    is_ranked = np.bincount(query_n, label_n > 0) > 0  # [Q]
    if not is_ranked.any():
        return {}
    names = [f"ndcg@{k}" for k in ks]
    if np.isnan(score_n).any():
        return dict.fromkeys([*names, "mrr"], float("nan"))
    # Negated, so the highest score comes first.
    order, tie, firsts = sort_into_ties(-score_n, query_n)
    query_n, label_n = query_n[order], label_n[order]
    shares = (np.bincount(query_n, weight_n[order]) / sizes_Q)[is_ranked]
    shares /= shares.sum()
    # Position in the query's ranking, from 1.
    position_n = np.arange(len(order)) - (np.cumsum(sizes_Q) - sizes_Q)[query_n] + 1
    tie_sizes = np.bincount(tie)
    gain_n = _gains(label_n, query_n, sizes_Q)
    # The ideal ranking: gains in descending order within a query.
    best_n = gain_n[np.lexsort((-label_n, query_n))]
    metrics = {}
    for name, k in zip(names, ks, strict=True):
        discount_n = np.where(position_n <= k, 1 / np.log2(position_n + 1), 0.0)
        # The mean over all orders of tied samples: every sample gets the tie's mean discount.
        mean_n = (np.bincount(tie, discount_n) / tie_sizes)[tie]
        ideal, reached = (
            np.bincount(query_n, values)[is_ranked] for values in (best_n * discount_n, gain_n * mean_n)
        )
        metrics[name] = float(reached / ideal @ shares)
    relevant_T = np.bincount(tie, label_n > 0).astype(np.int64)
    # Ties with a relevant sample, by query, then by position.
    hits = np.flatnonzero(relevant_T)
    hits = hits[np.unique(query_n[firsts[hits]], return_index=True)[1]]  # first relevant tie per query
    ranks = _mean_reciprocal_ranks(position_n[firsts[hits]], tie_sizes[hits], relevant_T[hits])
    return {**metrics, "mrr": float(ranks @ shares)}


def _gains(label_n: Floats, query_n: Ints, sizes_Q: Ints) -> Floats:
    """Return the gain ``2 ** label - 1`` per sample, scaled by a factor per query to avoid overflow.

    Gains are divided by ``2 ** m`` for the largest label m in the query, unless m is below 1.
    """
    # NDCG is a ratio of gains, so a factor per query changes nothing. Without it, a large label such as a
    # duration in seconds would overflow.
    max_n = np.maximum.reduceat(label_n, np.cumsum(sizes_Q) - sizes_Q)[query_n]
    small = np.expm1(np.minimum(label_n, 1.0) * np.log(2.0))  # precise near 0
    return np.where(max_n < 1, small, np.exp2(label_n - max_n) - np.exp2(-max_n))


def _mean_reciprocal_ranks(first: Ints, size: Ints, relevant: Ints) -> Floats:
    """Return the reciprocal position of the first relevant sample per query, as a mean over tied orders.

    A relevant sample has a positive label, and a tie has all samples of a query with equal score. The first
    relevant sample is in the first tie that contains any. All arguments describe this tie, with an entry per
    query.

    Args:
        first: position of the tie's first sample in the ranking, from 1.
        size: number of samples in the tie.
        relevant: number of relevant samples in the tie, at least 1.
    """
    # Many queries have ties of the same kind, so compute every distinct kind once.
    means = 1.0 / first
    several = np.flatnonzero(relevant < size)
    kinds, kind = np.unique(np.stack([first, size, relevant])[:, several], axis=1, return_inverse=True)
    values = np.empty(kinds.shape[1])
    for number, (start, num, hits) in enumerate(kinds.T):
        before = np.arange(num - hits + 1)  # samples before the first relevant one
        # P(none of the first j is relevant) is the product over i < j of (num - hits - i) / (num - i).
        none_before = np.cumprod(np.append(1.0, (num - hits - before[:-1]) / (num - before[:-1])))
        values[number] = none_before * (hits / (num - before)) @ (1 / (start + before))
    means[several] = values[kind.reshape(-1)]
    return means
