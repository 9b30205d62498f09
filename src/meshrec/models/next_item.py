"""Which item comes next: a softmax over drawn items to train by, and the place among all items to judge by.

Models of this kind say two numbers of each sample, [B, 2]: the loss, and the place of the item that followed
among all others, from 1; it is 0 while they train, and where nothing followed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.sparse import JaggedTensor

# B samples, T targets, N drawn items, C items of a chunk, D vector width

CHUNK = 4096
"""Items that are compared with all samples at a time."""


class ItemChunk(NamedTuple):
    """Vectors [C, D] of the items from ``first`` on."""

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
    """Cross-entropy of each target among itself and the drawn items, as if all items were there.

    The product of a drawn item counts as often as it stands for: less the log of how often it is expected
    among the drawn ones. Draws of the target itself do not count. Jean et al.: "On using very large target
    vocabulary for neural machine translation" (2015).

    Args:
        query_TD, target_TD, drawn_ND: vectors.
        target_T, drawn_N: ids of the items.
        log_expected_N: log of how often each drawn item is expected: of N draws with probability p, log(N p).
        temperature: products are divided by it.

    Returns:
        [T] losses.
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
    """Loss and place of each target among all items but those seen before, [B, 2].

    Items with the target's very product share their mean place with it, so that a model which says the same
    of all items is no good one.

    Args:
        query_BD, target_BD: vectors.
        target_B: ids; -1 where nothing followed, for which the loss and the place are 0.
        chunks: all items.
        seen: B bags of ids that are not to be recommended again; the target counts all the same.
        temperature: of the loss.
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
    """The last id of each bag, [B]; -1 where it is empty."""
    lengths, values = items.lengths(), items.values()
    if not len(values):
        return lengths.new_full(lengths.shape, -1, dtype=torch.int64)
    last = (items.offsets()[1:] - 1).clamp(min=0)
    return torch.where(lengths > 0, values[last].long(), -1)


def _hide(products_BC: Tensor, first: int, sample_N: Tensor, ids_N: Tensor) -> None:
    """Sets products of these samples with these items to -inf, as far as they are in the chunk."""
    place = ids_N.long() - first
    inside = (place >= 0) & (place < products_BC.shape[1])
    products_BC[sample_N[inside], place[inside]] = float("-inf")
