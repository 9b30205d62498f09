"""Loss, evaluation and recommendations of next-item models.

A model of this kind returns two values per sample, [B, 2]: the loss, and the rank of the target item among
all items, counted from 1. The rank is 0 during training, and for samples without a target.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.similarity import DotProduct, MixtureOfLogits, Similarity
from meshrec.models.step_samples import StepSamples
from meshrec.ops.index import mix
from meshrec.sparse import JaggedTensor

# B samples, T targets, N negatives, I items of the catalogue, C items of a chunk, D vector width

CHUNK = 4096
"""Number of items that are compared with all samples at a time."""
NO_ITEM = -(1 << 63)
"""The ID that stands for no item; tables with hashed keys give it to missing values."""
_DOT_PRODUCT = DotProduct()
_SHARE_BITS = 53


@dataclass(frozen=True, kw_only=True)
class SampledSoftmax:
    """The training loss of a next-item model: a softmax over the target and some other items.

    Raises:
        ValueError: there are no other items, or the temperature is not above 0.
    """

    negatives: Literal["uniform", "popular", "in_batch"] = "uniform"
    """Source of the other items: all items alike, items by their number in the training data, or the other
    targets of the step on all ranks. The loss is corrected for how often an item is drawn. All targets of a
    step share the items.
    """
    num_negatives: int = 512
    """Number of other items per step; with in_batch at most so many."""
    similarity: Literal["dot", "cosine", "mixture"] = "dot"
    """Score of an item: a dot product, the cosine (dot product of vectors of length 1), or a mixture of the
    cosines of several components.
    """
    temperature: float = 1.0
    """Divisor of the scores."""

    def __post_init__(self) -> None:
        if self.num_negatives < 1 or not self.temperature > 0:
            raise ValueError(
                f"num_negatives {self.num_negatives} must be at least 1, and the temperature "
                f"{self.temperature} above 0."
            )

    def scores(self, width: int, device: torch.device | None = None) -> Similarity:
        """Build the similarity of vectors of a width."""
        if self.similarity == "mixture":
            return MixtureOfLogits(width, temperature=self.temperature, device=device)
        return DotProduct(normalise=self.similarity == "cosine", temperature=self.temperature)


class ItemChunk(NamedTuple):
    """Some items of the catalogue: their IDs [C], ascending, and their vectors [C, D]."""

    ids_C: Tensor
    vectors_CD: Tensor


class Negatives(NamedTuple):
    """Items that targets are compared with in training."""

    ids_N: Tensor
    log_expected_N: Tensor
    """Log of the expected number of times that each item is among the N draws."""


class NegativeDraws(nn.Module):
    """Draws of items for the training loss.

    Draws are a function of the seed of the model's first weights, the number of the step and, within a batch,
    the targets of all ranks. So all ranks draw the same items, and training does not depend on the number of
    ranks.

    Args:
        catalogue_I: the IDs of all items, ascending, int64.
        counts_I: the number of times that each is a target in the training data; needed unless draws are
            uniform.
        softmax: says how many, and how.
        device: the device of the draws.

    Raises:
        ValueError: counts are needed and missing.
    """

    constant_buffers = ("catalogue_I", "shares_I")
    catalogue_I: Tensor
    num_steps: Tensor
    shares_I: Tensor

    def __init__(
        self,
        catalogue_I: Tensor,
        softmax: SampledSoftmax,
        *,
        counts_I: Tensor | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        if counts_I is None and softmax.negatives != "uniform":
            raise ValueError(
                f"negatives {softmax.negatives!r} need the number of times that each item is a target in "
                "training, and the data does not give it. Set Dataset.item_counts, or take uniform negatives."
            )
        num_items = len(catalogue_I)
        counts = torch.ones(num_items) if counts_I is None or softmax.negatives == "uniform" else counts_I
        counts = counts.double() + 1e-3  # an item that training never met can still be drawn
        self._softmax, self._seed = softmax, torch.initial_seed()
        self.samples = StepSamples()
        self.register_buffer("catalogue_I", catalogue_I.to(device), persistent=False)
        self.register_buffer("shares_I", (counts / counts.sum()).to(device), persistent=False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64, device=device))

    def bits(self, numbers_N: Tensor) -> Tensor:
        """Return a pseudo-random value in [0, 1) for each number and step, float64 [N]."""
        mixed = mix(mix(numbers_N.long(), self._seed) + self.num_steps, self._seed)
        return (mixed & ((1 << _SHARE_BITS) - 1)).double() * 2.0**-_SHARE_BITS

    def forward(self, targets_T: Tensor) -> Negatives:
        """Draw the negatives of a step with these targets, and begin the next step."""
        num, num_items = self._softmax.num_negatives, len(self.catalogue_I)
        device = targets_T.device
        if self._softmax.negatives == "in_batch":
            (every,) = self.samples(targets_T).rows
            num = min(num, len(every))
            # Evenly from the sorted targets, from a drawn one on: each is taken with the same chance, and
            # the ranks that have them do not matter.
            each = torch.arange(num, device=device) + self.bits(targets_T.new_zeros(1))
            places_N = (each * (len(every) / max(num, 1))).long().clamp(max=len(every) - 1)
            ids_N = every.sort().values[places_N]
            at_N = torch.searchsorted(self.catalogue_I, ids_N).clamp(max=num_items - 1)
        else:
            places_N = self.bits(torch.arange(num, device=device))
            if self._softmax.negatives == "uniform":
                at_N = (places_N * num_items).long()
            else:
                at_N = torch.searchsorted(self.shares_I.cumsum(0), places_N).clamp(max=num_items - 1)
            ids_N = self.catalogue_I[at_N]
        self.num_steps += 1
        return Negatives(ids_N, (self.shares_I[at_N].log() + math.log(max(num, 1))).float())


def sampled_softmax(
    queries_TD: Tensor,
    targets_TD: Tensor,
    drawn_ND: Tensor,
    *,
    target_T: Tensor,
    drawn_N: Tensor,
    log_expected_N: Tensor | float,
    similarity: Similarity = _DOT_PRODUCT,
) -> Tensor:
    """Compute the cross-entropy of each target against drawn items, corrected to estimate the full softmax.

    The correction subtracts from each drawn item's logit the log of how often the item is expected among the
    draws. A draw that equals the target is masked out. Source: Jean et al., "On using very large target
    vocabulary for neural machine translation" (2015).

    Args:
        queries_TD, targets_TD, drawn_ND: queries and items, as the similarity prepares them.
        target_T, drawn_N: IDs of the items.
        log_expected_N: log of the expected count of each drawn item: log(N p) for N draws with probability p.
        similarity: the score of an item.

    Returns:
        Losses [T].
    """
    own_T = similarity.pairs(queries_TD, targets_TD)
    scores_TN = similarity.table(queries_TD, drawn_ND) - log_expected_N
    scores_TN = scores_TN.masked_fill(target_T[:, None] == drawn_N, float("-inf"))
    logits = torch.cat([own_T[:, None], scores_TN], dim=1)
    return nn.functional.cross_entropy(logits, torch.zeros_like(target_T), reduction="none")


def judge_targets(
    query_BD: Tensor,
    target_BD: Tensor,
    target_B: Tensor,
    chunks: Iterator[ItemChunk],
    *,
    seen: JaggedTensor | None = None,
    similarity: Similarity = _DOT_PRODUCT,
) -> Tensor:
    """Return the loss and the rank of each target among all unseen items, [B, 2].

    Items whose score equals the target's count half, so that a model which scores all items alike gets the
    middle rank and not the best.

    Args:
        query_BD, target_BD: queries and items, as the similarity prepares them.
        target_B: IDs; `NO_ITEM` for samples without a target, whose loss and rank are 0.
        chunks: all items, chunk by chunk.
        seen: B bags of IDs that must not be recommended again. The target is ranked even if it is among them.
        similarity: the score of an item.
    """
    own_B = similarity.pairs(query_BD, target_BD)
    log_sum_B, place_B = own_B, torch.ones_like(own_B)
    of_target = torch.arange(len(target_B), device=target_B.device)
    for ids_C, vectors_CD in chunks:
        scores_BC = similarity.table(query_BD, vectors_CD)
        _hide(scores_BC, ids_C, of_target, target_B)
        if seen is not None:
            _hide(scores_BC, ids_C, _samples_of(seen), seen.values())
        equal = scores_BC == own_B[:, None]
        above = ~(scores_BC <= own_B[:, None])  # what is not a number stands behind all others
        place_B = place_B + above.sum(1) + 0.5 * equal.sum(1)
        log_sum_B = torch.logaddexp(log_sum_B, scores_BC.logsumexp(1))
    found = torch.stack([log_sum_B - own_B, place_B], dim=1)
    return found * (target_B != NO_ITEM)[:, None]


class TopItems(NamedTuple):
    """The K best items of each of B samples, best first: IDs, int64 [B, K], and scores, [B, K]."""

    ids_BK: Tensor
    """IDs; those with a score of -inf are no recommendations: fewer than K items were left."""
    scores_BK: Tensor


def top_items(
    query_BD: Tensor,
    chunks: Iterator[ItemChunk],
    k: int,
    *,
    seen: JaggedTensor | None = None,
    similarity: Similarity = _DOT_PRODUCT,
) -> TopItems:
    """Return the K items with the best scores for each sample, exactly.

    Args:
        query_BD: queries, as the similarity prepares them.
        chunks: all items, chunk by chunk.
        k: the number of items.
        seen: B bags of IDs that must not be recommended.
        similarity: the score of an item.
    """
    best_scores = query_BD.new_full((len(query_BD), k), float("-inf"))
    best_ids = torch.zeros(len(query_BD), k, dtype=torch.int64, device=query_BD.device)
    for ids_C, vectors_CD in chunks:
        scores_BC = similarity.table(query_BD, vectors_CD)
        if seen is not None:
            _hide(scores_BC, ids_C, _samples_of(seen), seen.values())
        both = torch.cat([best_scores, scores_BC], dim=1)
        both_ids = torch.cat([best_ids, ids_C.expand(len(query_BD), -1)], dim=1)
        best_scores, at = both.topk(k, dim=1)
        best_ids = both_ids.gather(1, at)
    return TopItems(best_ids, best_scores)


def last_ids(items: JaggedTensor) -> Tensor:
    """Return the last ID of each bag, [B]; `NO_ITEM` for an empty bag."""
    lengths, values = items.lengths(), items.values()
    if not len(values):
        return lengths.new_full(lengths.shape, NO_ITEM, dtype=torch.int64)
    last = (items.offsets()[1:] - 1).clamp(min=0)
    return torch.where(lengths > 0, values[last].long(), NO_ITEM)


def _samples_of(bags: JaggedTensor) -> Tensor:
    """Return the sample of each ID."""
    lengths = bags.lengths()
    return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)


def _hide(scores_BC: Tensor, ids_C: Tensor, sample_N: Tensor, ids_N: Tensor) -> None:
    """Set the scores of the given (sample, item) pairs to -inf, for items of this chunk."""
    place = torch.searchsorted(ids_C, ids_N.to(ids_C.dtype)).clamp(max=len(ids_C) - 1)
    inside = ids_C[place] == ids_N
    scores_BC[sample_N[inside], place[inside]] = float("-inf")
