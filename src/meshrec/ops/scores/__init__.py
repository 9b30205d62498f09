"""Operators on blocks of scores: the ranks of target scores, and a running top k.

A block has the scores for some samples and some catalog items. So no tensor has a score for every sample and
every item. ``naive.py`` has the reference versions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from meshrec.ops import operators
from meshrec.ops.scores import (
    fakes,  # noqa: F401 - registers the shapes
    naive,
)

__all__ = ["RankedScores", "merge_top_k", "rank_scores"]


class RankedScores(NamedTuple):
    """Result of :func:`rank_scores`, with a value per row, [B] each."""

    num_above: Tensor
    """Number of scores above the target score, as floats. NaN is above all scores."""
    num_equal: Tensor
    """Number of scores equal to the target score, as floats."""
    log_sums: Tensor
    """Logarithm of the sum of ``exp(score)``."""


def rank_scores(scores: Tensor, targets: Tensor) -> RankedScores:
    """Compare every row of scores with a target score, and compute its log-sum-exp.

    Not differentiable.

    Args:
        scores: scores, [B, N].
        targets: target score per row, [B]. If it is NaN, all scores are above it.

    Example::

        scores = torch.tensor([[3.0, 2.0, 1.0, float("-inf")]])
        ranked = rank_scores(scores, torch.tensor([2.0]))
        assert ranked.num_above.tolist() == [1] and ranked.num_equal.tolist() == [1]
    """
    # The kernel reads float32 only; in bf16 models, scores are bf16.
    is_float32 = scores.dtype == targets.dtype == torch.float32
    return RankedScores(*(operators if is_float32 else naive).rank_scores(scores, targets))


def merge_top_k(scores: Tensor, ids: Tensor, best_scores: Tensor, best_ids: Tensor) -> None:
    """Update the K largest scores per row with further scores; a running top k.

    Among equal scores, those found first are kept, and come first. NaN is above all scores.

    Args:
        scores: further scores, [B, N].
        ids: ID per column of ``scores``, int64 [N].
        best_scores: largest scores so far in descending order, [B, K], modified in place. -inf where a row
            had fewer than K scores.
        best_ids: their IDs, int64 [B, K], modified in place.

    Example::

        best_scores, best_ids = torch.full((1, 2), float("-inf")), torch.zeros(1, 2, dtype=torch.int64)
        merge_top_k(torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([7, 8, 9]), best_scores, best_ids)
        assert best_ids.tolist() == [[8, 9]]
    """
    is_float32 = scores.dtype == best_scores.dtype == torch.float32
    (operators if is_float32 else naive).merge_top_k(scores, ids, best_scores, best_ids)
