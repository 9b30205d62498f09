"""Retrieval metrics: recall, NDCG and MRR from the rank of the single relevant item."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.gathering import check_cutoffs, counted, gathered, refuse, stacked
from meshrec.metrics.grouped import Interval, resampled


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
    """Compute loss and ranking metrics over all ranks' queries with a single relevant item.

    Computes ``loss``, ``recall@k``, ``ndcg@k``, ``mrr@k`` and ``mrr``, exactly, from the relevant item's rank
    among all candidates. Recall equals the hit rate: the share of queries with the item among the first k.
    Gain is 1 and discount ``1 / log2(rank + 1)``. MRR is the mean of 1 / rank; ``mrr@k`` counts only the
    first k ranks. Tied items have no order: with ``ties``, metrics are averaged over all orders. Empty
    without queries; only the loss if no item has a rank. Collective if a process group is initialized.

    Args:
        losses: losses [n].
        ranks: item ranks [n] from 1, averaged over orders of tied items; 0: not ranked; infinite: not among
            the candidates.
        weights: query weights [n]; None: 1.
        ties: other items with the same score as the relevant item, [n]; None: 0.
        ks: cutoffs.
        group: process group; None: all ranks.
        gather: whether to include queries from other ranks.

    Returns:
        Metrics by name; all NaN if a loss or rank is NaN.

    Raises:
        ValueError: sizes differ, or a rank, weight, number of ties or cutoff is not allowed.

    Example::

        metrics = rank_metrics(torch.zeros(2), torch.tensor([1.0, 4.0]), ks=(2,))
        assert metrics["recall@2"] == 0.5 and metrics["mrr"] == 0.625
    """
    ties = torch.zeros_like(ranks) if ties is None else ties
    columns = stacked(losses, ties, ranks, weights=weights)
    columns = gathered(columns, group) if gather else columns
    check_cutoffs(ks)
    allowed = (columns[-2] >= 1) | (columns[-2] == 0) | columns[-2].isnan()
    losses, ties, ranks, weights = counted(columns, allowed, "0 or at least 1", name="ranks")
    if not len(losses):
        return {}
    max_ties = torch.where(ranks.isfinite() & (ranks >= 1), 2 * (ranks - 1), 0.0)
    fits = (ties >= 0) & (ties <= max_ties) | (ranks == 0) | ranks.isnan()
    refuse(
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
    """Compute bootstrap percentile intervals of `rank_metrics` over queries, such as one per user.

    Args:
        losses: see `rank_metrics`.
        ranks: see `rank_metrics`.
        weights: see `rank_metrics`.
        ties: see `rank_metrics`.
        ks: see `rank_metrics`.
        num: resamples; see `meshrec.metrics.grouped.resampled`.
        confidence: resample share inside the interval.
        seed: random seed.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range, or as for `rank_metrics`.
    """
    weights = torch.ones(len(losses), dtype=torch.float64) if weights is None else weights
    counts = weights != 0
    losses, ranks, weights = losses[counts], ranks[counts], weights[counts].double()
    ties = None if ties is None else ties[counts]

    def metrics(counts: Tensor) -> dict[str, float]:
        return rank_metrics(losses, ranks, weights * counts, ties, ks=ks, gather=False)

    return resampled(metrics, len(losses), num=num, confidence=confidence, seed=seed)


def _values_by_metric(ranks: Tensor, ties: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return every query's value per metric, averaged over the item's possible ranks among ties."""
    values: dict[str, Tensor] = {}
    first, last = ranks - ties / 2, ranks + ties / 2
    for k in ks:
        positions = torch.arange(1, k + 1, dtype=torch.float64, device=ranks.device)
        values_at = {"recall": positions**0, "ndcg": 1 / torch.log2(positions + 1), "mrr": 1 / positions}
        hit = (ranks <= k).double()
        untied = {"recall": hit, "ndcg": hit / torch.log2(ranks + 1), "mrr": hit / ranks}
        ends = (last.clamp(max=k).nan_to_num().long(), (first - 1).clamp(max=k).nan_to_num().long())
        for name, value in values_at.items():
            sums = torch.nn.functional.pad(value.cumsum(0), (1, 0))
            mean = (sums[ends[0]] - sums[ends[1]]) / (ties + 1)
            values[f"{name}@{k}"] = torch.where(ties > 0, mean, untied[name])
    # The sum of 1 / rank over consecutive ranks is a difference of digamma functions.
    mean = (torch.digamma(last + 1) - torch.digamma(first)) / (ties + 1)
    return {**values, "mrr": torch.where(ties > 0, mean, 1 / ranks)}
