"""Metrics of ranked lists: recall, NDCG and MRR."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics.grouped import Interval
from meshrec.metrics.windowed import Computed, WindowedSum
from meshrec.sparse import JaggedTensor

# Q queries, L ranked items

_KINDS = {"recall": "RetrievalRecall", "ndcg": "RetrievalNormalizedDCG", "mrr": "RetrievalMRR"}


class RetrievalMetrics:
    """Mean ``recall@k``, ``ndcg@k`` and ``mrr@k`` over the queries that have relevant items, by torchmetrics.

    Recall is the share of a query's relevant items among its first k. NDCG discounts a hit at rank i (from 1)
    by log2(i + 1) and divides by the value of the best possible order; gains are 0 and 1. MRR is 1 / the rank
    of the first relevant item, or 0 if it is not among the first k. The cost is about a millisecond per query
    and k. Leave items that users have already seen out of the lists: ``BruteForceIndex.search(exclude=...)``.

    Args:
        ks: cut-offs, such as (10, 100).
        device: device of the sums.
        group: process group of the ranks; None: all ranks, if a process group is initialized.

    Raises:
        ValueError: a cut-off is below 1, or there is none.
    """

    def __init__(
        self,
        ks: Sequence[int] = (10, 100),
        *,
        device: torch.device | str = "cpu",
        group: dist.ProcessGroup | None = None,
    ) -> None:
        if not ks or min(ks) < 1:
            raise ValueError(f"ks must be numbers >= 1, got {list(ks)}.")
        self._ks = list(ks)
        self._sums = WindowedSum(1 + len(_KINDS) * len(self._ks), torch.device(device), group)

    def update(self, ranked_QL: Tensor, relevant: JaggedTensor) -> None:
        """Add the ranked lists of some queries.

        Args:
            ranked_QL: item IDs, best first, without repetition within a query.
            relevant: Q bags of item IDs, without repetition within a bag.

        Raises:
            ValueError: the shapes do not fit, or the lists are shorter than the largest cut-off.
        """
        lengths = relevant.lengths()
        if ranked_QL.dim() != 2 or len(lengths) != len(ranked_QL):
            raise ValueError(
                f"ranked must be [queries, items] and relevant have a bag for each query, got "
                f"{list(ranked_QL.shape)} and {len(lengths)} bags."
            )
        if ranked_QL.shape[1] < max(self._ks):
            raise ValueError(f"ranked lists have {ranked_QL.shape[1]} items, k = {max(self._ks)} needs more.")
        found = needs("torchmetrics.retrieval", "metrics")
        num = float((lengths > 0).sum())
        samples = _samples(ranked_QL, relevant)
        sums = [num]
        for k in self._ks if num else []:
            for kind in _KINDS.values():
                # A metric for these queries alone: one that sees them all keeps all of their items.
                mean = getattr(found, kind)(top_k=k, empty_target_action="skip")(*samples)
                sums.append(num * float(mean))
        self._sums.window[: len(sums)] += self._sums.window.new_tensor(sums)

    def compute(self) -> Computed:
        """Compute the means over the queries of all ranks, and start a new window. Collective.

        The result is empty without queries.
        """
        return Computed(*(self._metrics(totals) for totals in self._sums.take()))

    def state_dict(self) -> dict[str, Any]:
        """Return the lifetime sums, the same on every rank. Call `compute` first."""
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums that `state_dict` returned, on any number of ranks.

        Raises:
            ValueError: the state has other cut-offs.
        """
        self._sums.load_state_dict(state)

    def _metrics(self, totals: Tensor) -> dict[str, float]:
        num, *sums = totals.tolist()
        if not num:
            return {}
        names = [f"{name}@{k}" for k in self._ks for name in _KINDS]
        return {name: value / num for name, value in zip(names, sums, strict=True)}


def _samples(ranked_QL: Tensor, relevant: JaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return scores of items, whether they are relevant, and their queries, in the form of torchmetrics.

    The first ranked item has score L. Relevant items that are not in the list have score 0, below all others.
    """
    num_queries, num_items = ranked_QL.shape
    values, device = relevant.values(), ranked_QL.device
    span = 1 + max((int(ids.max()) for ids in (ranked_QL, values) if ids.numel()), default=0)
    query = torch.arange(num_queries, device=device)
    ranked = (query[:, None] * span + ranked_QL).flatten()
    wanted = torch.repeat_interleave(query, relevant.lengths()) * span + values
    missed = wanted[~torch.isin(wanted, ranked)]
    scores = torch.arange(num_items, 0, -1, dtype=torch.float64, device=device).repeat(num_queries)
    items = torch.cat([ranked, missed])
    scores = torch.cat([scores, scores.new_zeros(len(missed))])
    return scores, torch.isin(items, wanted), items // span


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
