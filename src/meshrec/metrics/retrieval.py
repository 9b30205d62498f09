"""Metrics of ranked lists: recall, NDCG and MRR, from the rank of the one relevant item."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.grouped import Interval


def place_metrics(
    losses: Tensor,
    places: Tensor,
    *,
    ks: Sequence[int] = (10,),
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute the loss and the metrics of ranked lists over all ranks' queries, each with one relevant item.

    They are ``loss``, ``recall@k``, ``ndcg@k``, ``mrr@k`` and ``mrr``, exact, from the rank of that item
    among all candidates. With one relevant item, recall is the hit rate: the share of queries whose item is
    among the first k. MRR is the mean of 1 / rank; ``mrr@k`` counts only the first k ranks. The result is
    empty without queries, and has only the loss if no item has a rank. Collective if a process group is
    initialized.

    Args:
        losses: losses [n].
        places: ranks [n] from 1; 0: not ranked.
        ks: cut-offs.
        group: process group of the ranks; None: all ranks.
        gather: whether to include the queries of other ranks.
    """
    values = _values_of_places(places[places > 0], ks)
    sums = [float(len(losses)), float(losses.double().sum()), float((places > 0).sum())]
    totals = torch.tensor([*sums, *(float(each.sum()) for each in values.values())], dtype=torch.float64)
    if gather and dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)
    num, loss, num_ranked, *found = totals.tolist()
    if not num:
        return {}
    ranked = (
        {name: total / num_ranked for name, total in zip(values, found, strict=True)} if num_ranked else {}
    )
    return {"loss": loss / num, **ranked}


def place_intervals(
    losses: Tensor,
    places: Tensor,
    *,
    ks: Sequence[int] = (10,),
    num: int = 200,
    confidence: float = 0.95,
    seed: int = 0,
) -> dict[str, Interval]:
    """Compute bootstrap percentile intervals of `place_metrics` over the queries, such as one of each user.

    Args:
        losses, places, ks: see `place_metrics`; all queries are ranked.
        num: number of resamplings.
        confidence: share of the resamplings inside the interval.
        seed: seed of the resampling.

    Raises:
        ValueError: ``num`` or ``confidence`` is out of range, or a query is not ranked.
    """
    if num < 2 or not 0 < confidence < 1:
        raise ValueError(f"num must be at least 2 and confidence in (0, 1), got {num} and {confidence}.")
    if not len(places) or not bool((places > 0).all()):
        raise ValueError("intervals need queries that are all ranked. Leave the others out.")
    values = {"loss": losses.double(), **_values_of_places(places, ks)}
    weights = np.random.default_rng(seed).poisson(1.0, (num, len(places))).astype(np.float64)
    draws = weights @ torch.stack(list(values.values()), dim=1).numpy() / weights.sum(1, keepdims=True)
    low, high = np.quantile(draws, (0.5 - confidence / 2, 0.5 + confidence / 2), axis=0)
    return {name: Interval(float(low[at]), float(high[at])) for at, name in enumerate(values)}


def _values_of_places(places: Tensor, ks: Sequence[int]) -> dict[str, Tensor]:
    """Return each query's value of each metric, from its rank."""
    ranks = places.double()
    found: dict[str, Tensor] = {}
    for k in ks:
        hit = (ranks <= k).double()
        found |= {f"recall@{k}": hit, f"ndcg@{k}": hit / torch.log2(ranks + 1), f"mrr@{k}": hit / ranks}
    return {**found, "mrr": 1 / ranks}
