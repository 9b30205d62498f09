"""Ranking operators in plain torch: the reference for the kernels, and the fallback without them.

Shape legend: B samples, N items in a block of scores, K best items per sample.
"""

import torch
from torch import Tensor

from meshrec.ops.library import implement
from meshrec.ops.scores.top_k import top_k


def rank_scores(scores_BN: Tensor, target_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compare every row of scores with a target score, and compute its log-sum-exp.

    Args:
        scores_BN: scores.
        target_B: target score per row.

    Returns:
        Three tensors [B] with the scores' dtype: the number of scores that are not at most the target score,
            the number of equal scores, and the log-sum-exp.
    """
    # Comparisons write floats, because sums over bool are ten times slower.
    is_true_BN = torch.empty_like(scores_BN)
    num_at_most_B = torch.le(scores_BN, target_B[:, None], out=is_true_BN).sum(1)
    num_below_B = torch.lt(scores_BN, target_B[:, None], out=is_true_BN).sum(1)
    num_above_B = scores_BN.shape[1] - num_at_most_B
    return num_above_B, num_at_most_B - num_below_B, scores_BN.logsumexp(1)


def merge_top_k(scores_BN: Tensor, ids_N: Tensor, best_BK: Tensor, best_ids_BK: Tensor) -> None:
    """Update the K largest scores per row with further scores. Ties are ordered by position.

    Args:
        scores_BN: further scores.
        ids_N: ID per column, int64.
        best_BK: largest scores so far, descending, modified in place.
        best_ids_BK: their IDs, int64, modified in place.
    """
    k = best_BK.shape[1]
    # The best scores so far come first, so that they win ties.
    merged_BK, index_BK = top_k(torch.cat([best_BK, scores_BN], dim=1), k)
    if not k:
        return
    new_ids_BK = ids_N[(index_BK - k).clamp(min=0)]
    old_ids_BK = best_ids_BK.gather(1, index_BK.clamp(max=k - 1))
    best_ids_BK.copy_(torch.where(index_BK >= k, new_ids_BK, old_ids_BK))
    best_BK.copy_(merged_BK)


implement([rank_scores, merge_top_k])
