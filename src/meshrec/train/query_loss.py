"""Learning to rank: losses within a query, such as a search or a session.

Shape legend: B samples, Q queries.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from meshrec.metrics.queries import query_metrics
from meshrec.train.losses import Loss


@dataclass(frozen=True, kw_only=True)
class Ranking(Loss):
    """A loss within queries: the samples of one query are ranked against each other, and against no others.

    The data has two labels: how good a sample is, from 0, and its query, ``Label(kind="query")``. The NDCG at
    the first cut-off selects the best weights.
    """

    kind: Literal["pairwise", "listwise"] = "listwise"
    """``pairwise``: log(1 + exp(worse - better)) of all pairs (RankNet). ``listwise``: cross-entropy between
    the softmax of the scores and the labels' shares (ListNet)."""
    ks: tuple[int, ...] = (10,)
    """Cut-offs of NDCG@k."""

    def __post_init__(self) -> None:
        if self.kind not in ("pairwise", "listwise"):
            raise ValueError(f"loss.kind is {self.kind!r}; take 'pairwise' or 'listwise'.")
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the loss over the queries of this batch. A query that two batches share counts in both."""
        self._check(outputs, labels)
        loss = _pairwise if self.kind == "pairwise" else _listwise
        return loss(outputs, labels[:, 0], labels[:, 1], weights)

    def metrics(
        self, outputs: Tensor, labels: Tensor, *, group: dist.ProcessGroup | None = None, gather: bool = True
    ) -> dict[str, float]:
        """Compute the metrics of queries, with `meshrec.metrics.query_metrics`."""
        self._check(outputs, labels)
        return query_metrics(outputs, labels[:, 0], labels[:, 1], ks=self.ks, group=group, gather=gather)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores; only their order within a query has a meaning."""
        return outputs

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        if labels.shape != (*outputs.shape, 2):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)}: Ranking takes "
                "one output per sample, and two labels, the second of kind='query'. Name them in Features."
            )


def _pairwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over queries the mean loss of their pairs of different labels."""
    better = (labels[:, None] > labels[None]) & (queries[:, None] == queries[None])
    first, second = better.nonzero(as_tuple=True)
    losses = nn.functional.softplus(scores[second] - scores[first])
    if weights is not None:
        losses = losses * weights[first]
    of_query = torch.unique(queries, return_inverse=True)[1][first]
    num_pairs = torch.bincount(of_query, minlength=1)
    return (losses / num_pairs[of_query]).sum()


def _listwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Sum over queries the cross-entropy of the labels' shares and the softmax of the scores."""
    names, of_query = torch.unique(queries, return_inverse=True)
    num = len(names)
    highest = scores.new_full((num,), -torch.inf).scatter_reduce(0, of_query, scores.detach(), "amax")
    shifted = scores - highest[of_query]
    total = scores.new_zeros(num).index_add(0, of_query, shifted.exp())
    logs = shifted - total.log()[of_query]
    gains = labels if weights is None else labels * weights
    shares = gains / scores.new_zeros(num).index_add(0, of_query, labels).clamp(min=1e-12)[of_query]
    return -(shares * logs).sum()
