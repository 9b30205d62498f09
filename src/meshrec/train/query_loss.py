"""Learning to rank: losses within a query, such as a search or a session.

Shape legend: B samples, Q queries.
"""

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from meshrec.metrics.queries import query_metrics
from meshrec.train.losses import Loss


@dataclass(frozen=True, kw_only=True)
class Ranking(Loss):
    """A learning-to-rank loss: samples are ranked only against other samples in the same query.

    The data has two labels: relevance, from 0, and the query, ``Label(kind="query")``. NDCG at the first
    cut-off selects the best weights.
    """

    kind: Literal["pairwise", "listwise"] = "listwise"
    """``pairwise``: log(1 + exp(worse - better)) over all pairs (RankNet). ``listwise``: cross-entropy
    between score softmax and label shares (ListNet).
    """
    ks: tuple[int, ...] = (10,)
    """Cut-offs for NDCG@k."""

    def __post_init__(self) -> None:
        if self.kind not in ("pairwise", "listwise"):
            raise ValueError(f"loss.kind is {self.kind!r}; take 'pairwise' or 'listwise'.")
        if not self.ks or min(self.ks) < 1:
            raise ValueError(f"loss.ks is {list(self.ks)}; it must be one number or more, each at least 1.")

    def sum(self, outputs: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """Sum the loss over all queries in the batch. A query split between two batches counts in both.

        A sample of weight 0 enters neither pairs nor lists. A pair's weight is the better sample's weight.

        Args:
            outputs: scores [B].
            labels: relevance and query, [B, 2].
            weights: sample weights [B]; None: 1.
        """
        self._check(outputs, labels)
        if weights is not None:
            # Dropped rather than multiplied by 0: a NaN score would survive the product.
            counts = weights != 0
            outputs, labels, weights = outputs[counts], labels[counts], weights[counts]
        loss = _pairwise if self.kind == "pairwise" else _listwise
        return loss(outputs, labels[:, 0], labels[:, 1], weights)

    def _metrics(
        self, outputs: Tensor, labels: Tensor, weights: Tensor | None, **ranks: Any
    ) -> dict[str, float]:
        """Compute query metrics with `meshrec.metrics.query_metrics`."""
        self._check(outputs, labels)
        return query_metrics(outputs, labels[:, 0], labels[:, 1], weights, ks=self.ks, **ranks)

    def scores(self, outputs: Tensor) -> Tensor:
        """Return the scores; only the order within a query is meaningful."""
        return outputs

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        if labels.shape != (*outputs.shape, 2):
            raise ValueError(
                f"the model returned {list(outputs.shape)} for labels {list(labels.shape)}: Ranking takes "
                "one output per sample, and two labels, the second of kind='query'. Name them in Features."
            )


def _pairwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Average the loss over pairs with different labels, and sum over queries."""
    better = (labels[:, None] > labels[None]) & (queries[:, None] == queries[None])
    first, second = better.nonzero(as_tuple=True)
    losses = nn.functional.softplus(scores[second] - scores[first])
    if weights is not None:
        losses = losses * weights[first]
    of_query = torch.unique(queries, return_inverse=True)[1][first]
    num_pairs = torch.bincount(of_query, minlength=1)
    return (losses / num_pairs[of_query]).sum()


def _listwise(scores: Tensor, labels: Tensor, queries: Tensor, weights: Tensor | None) -> Tensor:
    """Sum the cross-entropy between label shares and score softmax over queries."""
    names, of_query = torch.unique(queries, return_inverse=True)
    num = len(names)
    # Subtract the query maximum before exp, as in a stable softmax. It is detached: the shift cancels out.
    highest = scores.new_full((num,), -torch.inf).scatter_reduce(0, of_query, scores.detach(), "amax")
    shifted = scores - highest[of_query]
    total = scores.new_zeros(num).index_add(0, of_query, shifted.exp())
    logs = shifted - total.log()[of_query]
    gains = labels if weights is None else labels * weights
    shares = gains / scores.new_zeros(num).index_add(0, of_query, labels).clamp(min=1e-12)[of_query]
    return -(shares * logs).sum()
