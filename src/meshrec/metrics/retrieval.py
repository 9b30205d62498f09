"""How good a ranked list is, given what was relevant."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshrec.data.faults import needs
from meshrec.metrics.windowed import Computed, WindowedSum
from meshrec.sparse import JaggedTensor

# Q queries, L ranked items

_KINDS = {"recall": "RetrievalRecall", "ndcg": "RetrievalNormalizedDCG", "mrr": "RetrievalMRR"}


class RetrievalMetrics:
    """``recall@k``, ``ndcg@k`` and ``mrr@k`` of torchmetrics: means over the queries with relevant items.

    Recall is the share of a query's relevant items among its first k. NDCG discounts a hit at place i (from
    1) by log2(i + 1) and divides by the best possible order, with gains of 0 and 1. MRR is 1 / the place of
    the first relevant item, and 0 where it is not among the first k. Takes about a millisecond per query and
    k. What users have seen before is to be left out of the list: ``BruteForceIndex.search(exclude=...)``.

    Args:
        ks: how many items count.
        device: where sums are kept.
        group: the ranks; without it all, where a process group is initialized.

    Raises:
        ValueError: a k is below 1, or there is none.
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
        """Takes queries.

        Args:
            ranked_QL: item ids, the best first, without repetition within a query.
            relevant: Q bags of item ids, without repetition within a bag.

        Raises:
            ValueError: shapes do not fit, or lists are shorter than the largest k.
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
        """Means over all ranks' queries, after which the window begins anew; empty without queries.

        Collective.
        """
        return Computed(*(self._metrics(totals) for totals in self._sums.take()))

    def state_dict(self) -> dict[str, Any]:
        """What ``compute`` has seen: call it before saving. The same on every rank."""
        return self._sums.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from there, on any number of ranks.

        Raises:
            ValueError: it was saved with other ``ks``.
        """
        self._sums.load_state_dict(state)

    def _metrics(self, totals: Tensor) -> dict[str, float]:
        num, *sums = totals.tolist()
        if not num:
            return {}
        names = [f"{name}@{k}" for k in self._ks for name in _KINDS]
        return {name: value / num for name, value in zip(names, sums, strict=True)}


def _samples(ranked_QL: Tensor, relevant: JaggedTensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores of items, whether they are relevant, and their queries, as torchmetrics takes them.

    The first ranked item has score L; below them all, with 0, are relevant ones that are not ranked.
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
    """``loss``, ``recall@k``, ``ndcg@k`` and ``mrr`` of all ranks' queries with one relevant item each.

    Exact, from the place of that item among all candidates. Recall is then the share of queries that find it
    among the first k (hit rate); MRR is the mean of 1 / place. Empty without queries; only the loss where no
    item has a place. Collective where a process group is initialized.

    Args:
        losses: [n].
        places: [n] from 1; 0: not ranked.
        ks: how many items count.
        group: the ranks; without it all.
        gather: whether other ranks' queries count; otherwise this is not collective.
    """
    ranked = places[places > 0].double()
    sums = [float(len(losses)), float(losses.double().sum()), float(len(ranked)), float((1 / ranked).sum())]
    for k in ks:
        hits = ranked[ranked <= k]
        sums += [float(len(hits)), float((1 / torch.log2(hits + 1)).sum())]
    totals = torch.tensor(sums, dtype=torch.float64)
    if gather and dist.is_available() and dist.is_initialized():
        dist.all_reduce(totals, group=group)
    num, loss, num_ranked, reciprocal, *found = totals.tolist()
    if not num:
        return {}
    metrics = {"loss": loss / num}
    if num_ranked:
        names = [f"{name}@{k}" for k in ks for name in ("recall", "ndcg")]
        metrics |= {name: value / num_ranked for name, value in zip(names, found, strict=True)}
        metrics["mrr"] = reciprocal / num_ranked
    return metrics
