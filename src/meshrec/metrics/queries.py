"""Ranking metrics within queries.

Shape legend: n samples, T ties (samples with equal score and query), Q queries.
"""

from collections.abc import Sequence

import numpy as np
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.areas import Floats, Ints, ties_of
from meshrec.metrics.gathering import check_cutoffs, codes_of, counted, gathered, integer_column, stacked


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
    """Compute ``ndcg@k`` and ``mrr`` over all ranks' queries.

    Gain is ``2 ** label - 1`` and discount ``1 / log2(position + 1)``: Burges et al., "Learning to rank using
    gradient descent" (2005). MRR is the mean reciprocal position of the first sample with a positive label.
    Tied samples have no order: metrics are averaged over all orders, as in McSherry and Najork, "Computing
    information retrieval performance measures efficiently in the presence of tied scores" (2008), and in
    scikit-learn's ``ndcg_score``. Queries with only zero labels are omitted; without other queries the result
    is empty. Collective if a process group is initialized.

    Args:
        scores: [n]; may be infinite.
        labels: [n], finite, at least 0.
        queries: query per sample [n]. A query's samples may be on several ranks.
        weights: sample weights [n]; None: 1. A query's weight is the mean over its samples, as in
            LightGBM. Zero-weight samples are not ranked.
        ks: cutoffs.
        group: process group; None: all ranks.
        gather: whether to include samples from other ranks.

    Returns:
        Metrics by name; all NaN if a score is NaN.

    Raises:
        ValueError: sizes differ, or a label, weight or cutoff is not allowed.
    """
    check_cutoffs(ks)
    columns = stacked(integer_column(queries), scores, labels, weights=weights)
    columns = gathered(columns, group) if gather else columns
    columns = counted(columns, (columns[-2] >= 0) & columns[-2].isfinite(), "finite and at least 0").cpu()
    query_n = codes_of(columns[0], "queries", is_floating=queries.is_floating_point())
    score_n, label_n, weight_n = columns[1:].numpy()
    sizes_Q = np.bincount(query_n)
    is_ranked = np.bincount(query_n, label_n > 0) > 0  # [Q]
    if not is_ranked.any():
        return {}
    names = [f"ndcg@{k}" for k in ks]
    if np.isnan(score_n).any():
        return dict.fromkeys([*names, "mrr"], float("nan"))
    order, tie, firsts = ties_of(-score_n, query_n)
    query_n, label_n = query_n[order], label_n[order]
    shares = (np.bincount(query_n, weight_n[order]) / sizes_Q)[is_ranked]
    shares /= shares.sum()
    position_n = np.arange(len(order)) - (np.cumsum(sizes_Q) - sizes_Q)[query_n] + 1
    tie_sizes = np.bincount(tie)
    gain_n = _gains(label_n, query_n, sizes_Q)
    # The ideal ranking: gains in descending order within a query.
    best_n = gain_n[np.lexsort((-label_n, query_n))]
    metrics = {}
    for name, k in zip(names, ks, strict=True):
        discount_n = np.where(position_n <= k, 1 / np.log2(position_n + 1), 0.0)
        mean_n = (np.bincount(tie, discount_n) / tie_sizes)[tie]
        ideal, reached = (
            np.bincount(query_n, values)[is_ranked] for values in (best_n * discount_n, gain_n * mean_n)
        )
        metrics[name] = float(reached / ideal @ shares)
    relevant_T = np.bincount(tie, label_n > 0).astype(np.int64)
    hits = np.flatnonzero(relevant_T)
    hits = hits[np.unique(query_n[firsts[hits]], return_index=True)[1]]  # first relevant tie per query
    ranks = _mean_reciprocal_ranks(position_n[firsts[hits]], tie_sizes[hits], relevant_T[hits])
    return {**metrics, "mrr": float(ranks @ shares)}


def _gains(label_n: Floats, query_n: Ints, sizes_Q: Ints) -> Floats:
    """Return the gains of samples sorted by query, divided by 2 ** (the query's largest label).

    NDCG is a ratio of gains. Without scaling, a large label, such as a number of seconds, would overflow.
    """
    max_n = np.maximum.reduceat(label_n, np.cumsum(sizes_Q) - sizes_Q)[query_n]
    small = np.expm1(np.minimum(label_n, 1.0) * np.log(2.0))  # precise near 0
    return np.where(max_n < 1, small, np.exp2(label_n - max_n) - np.exp2(-max_n))


def _mean_reciprocal_ranks(first: Ints, size: Ints, relevant: Ints) -> Floats:
    """Return the mean reciprocal position of the first relevant sample, over all orders of every tie.

    Args:
        first: position of the tie's first sample, from 1.
        size: samples in the tie.
        relevant: relevant samples in the tie, at least 1.
    """
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
