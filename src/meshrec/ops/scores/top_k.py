"""Top-k selection with a fixed order for equal scores."""

from torch import Tensor


def top_k(scores_BN: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the K largest scores per row in descending order; equal scores are ordered by position.

    ``torch.topk`` may return equal scores in any order, so a recommendation would depend on the batch and on
    the program that computes it.
    """
    best_BK, index_BK = scores_BN.topk(k, dim=1)
    if not index_BK.numel():
        return best_BK, index_BK
    last_B1 = best_BK[:, -1:]
    # Rows with further scores equal to the K-th. Which positions hold -inf does not matter.
    is_tied_B = (scores_BN == last_B1).sum(1) > (best_BK == last_B1).sum(1)
    rows_T = (is_tied_B & (last_B1[:, 0] > float("-inf"))).nonzero().flatten()
    if len(rows_T):
        tied_TN, last_T1 = scores_BN[rows_T], last_B1[rows_T]
        is_equal_TN = tied_TN == last_T1
        num_equal_T1 = (best_BK[rows_T] == last_T1).sum(1, keepdim=True)
        is_best_TN = (tied_TN > last_T1) | (is_equal_TN & (is_equal_TN.cumsum(1) <= num_equal_T1))
        index_BK[rows_T] = is_best_TN.nonzero()[:, 1].view(-1, k)
    index_BK = index_BK.sort(dim=1).values
    best_BK, order_BK = scores_BN.gather(1, index_BK).sort(dim=1, descending=True, stable=True)
    return best_BK, index_BK.gather(1, order_BK)
