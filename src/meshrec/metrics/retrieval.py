"""Retrieval metrics (recall, NDCG, MRR) for queries with one relevant item, such as the user's next item.

All are computed from the rank of this item among all candidates.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.gathering import (
    check_cutoffs,
    check_values,
    gather_columns,
    normalize_samples,
    stack_columns,
)
from meshrec.metrics.grouped import Interval, bootstrap


def rank_metrics(
    losses: Tensor,
    ranks: Tensor,
    weights: Tensor | None = None,
    ties: Tensor | None = None,
    *,
    ks: Sequence[int] = (10,),
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute retrieval metrics over the queries on all distributed ranks.

    In the following, a rank is the position of a query's relevant item among all candidates:

    - ``loss``: the mean loss.
    - ``recall@k``: the share of queries with a rank up to k (the hit rate).
    - ``ndcg@k``: the mean of ``1 / log2(rank + 1)``, or 0 for a rank above k.
    - ``mrr@k``: the mean of ``1 / rank``, or 0 for a rank above k.
    - ``mrr``: the mean of ``1 / rank``.

    If other items have the same score as the relevant item, a metric is averaged over all orders of these
    items. Collective if a process group is initialized.

    Args:
        losses: loss per query, [n].
        ranks: rank of the relevant item per query, [n], from 1; with ties, the mean over all orders. 0: the
            query counts only in ``loss``. Infinite: the item is not a candidate.
        weights: query weights [n]; None: 1.
        ties: number of other items with the same score as the relevant item, [n]; None: 0.
        ks: cutoffs k.
        group: process group; None: all distributed ranks.
        gather: whether to include queries from other distributed ranks. If False, not collective.

    Returns:
        Metrics by name; empty without queries, only ``loss`` if no query is ranked, and all NaN if a loss or
        rank is NaN.

    Raises:
        ValueError: sizes differ, or a rank, weight, tie count or cutoff is not allowed.

    Example::

        metrics = rank_metrics(torch.zeros(2), torch.tensor([1.0, 4.0]), ks=(2,))
        assert metrics["recall@2"] == 0.5 and metrics["mrr"] == 0.625
    """
    ties = torch.zeros_like(ranks) if ties is None else ties
    columns = stack_columns(losses, ties, ranks, weights=weights)
    columns = gather_columns(columns, group) if gather else columns
    check_cutoffs(ks)
    allowed = (columns[-2] >= 1) | (columns[-2] == 0) | columns[-2].isnan()
    losses, ties, ranks, weights = normalize_samples(columns, allowed, "0 or at least 1", name="ranks")
    if not len(losses):
        return {}
    # A rank is the mean over all orders of the tied items. With t of them it is at least 1 + t / 2.
    max_ties = torch.where(ranks.isfinite() & (ranks >= 1), 2 * (ranks - 1), 0.0)
    fits = (ties >= 0) & (ties <= max_ties) | (ranks == 0) | ranks.isnan()
    check_values(
        "ties",
        ties,
        fits,
        "at least 0, and at most twice the number of items above the relevant one's mean rank",
    )
    metrics = {"loss": float(losses @ weights / weights.sum())}
    is_ranked = ranks != 0
    if bool(is_ranked.any()):
        shares = weights[is_ranked] / weights[is_ranked].sum()
        values = _values_by_metric(ranks[is_ranked], ties[is_ranked], ks)
        metrics |= {name: float(value @ shares) for name, value in values.items()}
    undefined = bool(losses.isnan().any() | ranks.isnan().any())
    return dict.fromkeys(metrics, float("nan")) if undefined else metrics


def rank_intervals(
    losses: Tensor,
    ranks: Tensor,
    weights: Tensor | None = None,
    ties: Tensor | None = None,
    *,
    ks: Sequence[int] = (10,),
    num: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Compute bootstrap confidence intervals for `rank_metrics`, resampling the queries on this rank.

    Args:
        losses, ranks, weights, ties, ks: see `rank_metrics`.
        num: number of resamples.
        confidence: share of resamples inside the interval, such as 0.95.
        seed: random seed.

    Returns:
        Intervals by metric name; see `meshrec.metrics.grouped.bootstrap`.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range, or as for `rank_metrics`.
    """
    weights = torch.ones(len(losses), dtype=torch.float64) if weights is None else weights
    # `bootstrap` must not draw samples with weight 0.
    counts = weights != 0
    losses, ranks, weights = losses[counts], ranks[counts], weights[counts].double()
    ties = None if ties is None else ties[counts]

    def metrics(counts: Tensor) -> dict[str, float]:
        """Return the metrics for a resample, given the number of repetitions per query."""
        return rank_metrics(losses, ranks, weights * counts, ties, ks=ks, gather=False)

    return bootstrap(metrics, len(losses), num=num, confidence=confidence, seed=seed)


def _values_by_metric(ranks: Tensor, ties: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return every metric per query, [n], by name, averaged over all orders of tied items.

    Args:
        ranks: mean rank of the relevant item, from 1, [n].
        ties: number of other items with the same score, [n].
    """
    values: dict[str, Tensor] = {}
    # With t ties, the item's rank is equally often each of first, first + 1, ..., last = first + t.
    first, last = ranks - ties / 2, ranks + ties / 2
    for k in ks:
        positions = torch.arange(1, k + 1, dtype=torch.float64, device=ranks.device)
        values_at = {"recall": positions**0, "ndcg": 1 / torch.log2(positions + 1), "mrr": 1 / positions}
        hit = (ranks <= k).double()
        untied = {"recall": hit, "ndcg": hit / torch.log2(ranks + 1), "mrr": hit / ranks}
        # The mean of a metric over the ranks first .. last, from cumulative sums over positions up to k.
        ends = (last.clamp(max=k).nan_to_num().long(), (first - 1).clamp(max=k).nan_to_num().long())
        for name, value in values_at.items():
            sums = torch.nn.functional.pad(value.cumsum(0), (1, 0))
            mean = (sums[ends[0]] - sums[ends[1]]) / (ties + 1)
            values[f"{name}@{k}"] = torch.where(ties > 0, mean, untied[name])
    # The sum of 1 / rank over consecutive ranks is a difference of digamma functions.
    mean = (torch.digamma(last + 1) - torch.digamma(first)) / (ties + 1)
    return {**values, "mrr": torch.where(ties > 0, mean, 1 / ranks)}
