"""Loss and evaluation of next-item models: sampled softmax for training, rank among all items for evaluation.

A model of this kind returns two values per sample, [B, 2]: the loss, and the rank of the target item among
all items, counted from 1. The rank is 0 during training, and for samples without a target.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.sparse import JaggedTensor

# B samples, T targets, N drawn items, C items of a chunk, D vector width

CHUNK = 4096
"""Number of items that are compared with all samples at a time."""


class ItemChunk(NamedTuple):
    """Vectors [C, D] of the items ``first`` to ``first + C - 1``."""

    first: int
    vectors_CD: Tensor


def sampled_softmax(
    query_TD: Tensor,
    target_TD: Tensor,
    drawn_ND: Tensor,
    *,
    target_T: Tensor,
    drawn_N: Tensor,
    log_expected_N: Tensor | float,
    temperature: float = 1.0,
) -> Tensor:
    """Compute the cross-entropy of each target against drawn items, corrected to estimate the full softmax.

    The correction subtracts from each drawn item's logit the log of how often the item is expected among the
    draws. A draw that equals the target is masked out. Source: Jean et al., "On using very large target
    vocabulary for neural machine translation" (2015).

    Args:
        query_TD, target_TD, drawn_ND: vectors.
        target_T, drawn_N: IDs of the items.
        log_expected_N: log of the expected count of each drawn item: log(N p) for N draws with probability p.
        temperature: divisor of the dot products.

    Returns:
        Losses [T].
    """
    own_T = (query_TD * target_TD).sum(1) / temperature
    products_TN = query_TD @ drawn_ND.T / temperature - log_expected_N
    products_TN = products_TN.masked_fill(target_T[:, None] == drawn_N, float("-inf"))
    logits = torch.cat([own_T[:, None], products_TN], dim=1)
    return nn.functional.cross_entropy(logits, torch.zeros_like(target_T), reduction="none")


def judge_targets(
    query_BD: Tensor,
    target_BD: Tensor,
    target_B: Tensor,
    chunks: Iterator[ItemChunk],
    *,
    seen: JaggedTensor | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Return the loss and the rank of each target among all unseen items, [B, 2].

    Items whose dot product equals the target's count half, so that a model which scores all items alike gets
    the middle rank and not the best.

    Args:
        query_BD, target_BD: vectors.
        target_B: IDs; -1 for samples without a target, whose loss and rank are 0.
        chunks: the vectors of all items, chunk by chunk.
        seen: B bags of IDs that must not be recommended again. The target is ranked even if it is among them.
        temperature: divisor of the dot products in the loss.
    """
    own_B = (query_BD * target_BD).sum(1)
    log_sum_B = own_B / temperature
    place_B = torch.ones_like(own_B)
    for first, vectors_CD in chunks:
        products_BC = query_BD @ vectors_CD.T
        _hide(products_BC, first, torch.arange(len(target_B), device=target_B.device), target_B)
        if seen is not None:
            of = torch.repeat_interleave(torch.arange(len(target_B), device=target_B.device), seen.lengths())
            _hide(products_BC, first, of, seen.values())
        equal = products_BC == own_B[:, None]
        above = ~(products_BC <= own_B[:, None])  # what is not a number stands behind all others
        place_B = place_B + above.sum(1) + 0.5 * equal.sum(1)
        log_sum_B = torch.logaddexp(log_sum_B, (products_BC / temperature).logsumexp(1))
    found = torch.stack([log_sum_B - own_B / temperature, place_B], dim=1)
    return found * (target_B >= 0)[:, None]


def last_ids(items: JaggedTensor) -> Tensor:
    """Return the last ID of each bag, [B]; -1 for an empty bag."""
    lengths, values = items.lengths(), items.values()
    if not len(values):
        return lengths.new_full(lengths.shape, -1, dtype=torch.int64)
    last = (items.offsets()[1:] - 1).clamp(min=0)
    return torch.where(lengths > 0, values[last].long(), -1)


def _hide(products_BC: Tensor, first: int, sample_N: Tensor, ids_N: Tensor) -> None:
    """Set the products of the given (sample, item) pairs to -inf, for items within this chunk."""
    place = ids_N.long() - first
    inside = (place >= 0) & (place < products_BC.shape[1])
    products_BC[sample_N[inside], place[inside]] = float("-inf")
