"""Metrics of rankings within queries.

Shape legend: n samples, Q queries.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.metrics.gathering import gathered


def query_metrics(
    scores: Tensor,
    labels: Tensor,
    queries: Tensor,
    *,
    ks: Sequence[int] = (10,),
    group: dist.ProcessGroup | None = None,
    gather: bool = True,
) -> dict[str, float]:
    """Compute ``ndcg@k`` and ``mrr`` over the queries of all ranks.

    The gain of a sample is ``2 ** label - 1`` and its discount is ``1 / log2(place + 1)``: Burges et al.,
    "Learning to rank using gradient descent" (2005). MRR is the mean of 1 / place of the first sample with a
    positive label. Samples of one score keep their order. Queries whose labels are all 0 are left out; the
    result is empty if there are no others. Collective if a process group is initialized.

    Args:
        scores, labels: tensors [n]; labels are at least 0.
        queries: the query of each sample [n]. Samples of a query may be on several ranks.
        ks: cut-offs.
        group: process group of the ranks; None: all ranks.
        gather: whether to include the samples of other ranks.
    """
    columns = torch.stack([scores.double(), labels.double(), queries.double()])
    if gather:
        columns = gathered(columns, group)
    scores, labels, queries = columns
    if not len(labels):
        return {}
    names, of_query = torch.unique(queries, return_inverse=True)
    places = places_within(scores, of_query)
    found: dict[str, float] = {}
    gains = torch.exp2(labels) - 1
    best = places_within(labels, of_query)

    def summed(values: Tensor) -> Tensor:
        return torch.zeros(len(names), dtype=torch.float64).index_add_(0, of_query, values)

    counts = summed(gains) > 0
    if not bool(counts.any()):
        return {}
    for k in ks:
        reached = summed(torch.where(places <= k, gains / torch.log2(places + 1.0), 0.0))
        ideal = summed(torch.where(best <= k, gains / torch.log2(best + 1.0), 0.0))
        found[f"ndcg@{k}"] = float((reached[counts] / ideal[counts]).mean())
    first = torch.full((len(names),), torch.inf, dtype=torch.float64)
    at = torch.where(labels > 0, places.double(), torch.inf)
    first.scatter_reduce_(0, of_query, at, reduce="amin")
    found["mrr"] = float((1 / first[counts]).mean())
    return found


def places_within(scores: Tensor, of_query: Tensor) -> Tensor:
    """Return the place of each sample in its query by falling score, from 1."""
    order = torch.argsort(scores, descending=True, stable=True)
    order = order[torch.argsort(of_query[order], stable=True)]
    sizes = torch.bincount(of_query)
    starts = sizes.cumsum(0) - sizes
    places = torch.empty_like(of_query)
    places[order] = torch.arange(len(order)) - starts[of_query[order]] + 1
    return places
