"""Loss, evaluation and recommendations for next-item models.

In evaluation a next-item model returns, per sample, the loss, the rank of the target item among all items,
counted from 1, and the number of other items with the target's score, [B, 3]. The rank is 0 for samples
without a target. In training it returns the loss and 0, [B, 2].
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.repeats import RepeatedItems
from meshrec.models.similarity import DotProduct, MixtureOfLogits, Similarity
from meshrec.models.step_samples import StepSamples
from meshrec.models.top_k import top_k
from meshrec.ops.index import mix
from meshrec.sparse import JaggedTensor

# B samples, T targets, N negatives, I catalogue items, C items in a chunk, D vector width, L history items

CHUNK = 4096
"""Items compared with all samples at a time."""
NO_ITEM = -(1 << 63)
"""ID for a missing item, as in hashed tables."""
_DOT_PRODUCT = DotProduct()
_SHARE_BITS = 53  # mantissa of a float64


@dataclass(frozen=True, kw_only=True)
class SampledSoftmax:
    """Training loss of a next-item model: a softmax over the target and sampled negatives.

    Raises:
        ValueError: ``num_negatives`` is below 1, or the temperature is not above 0.
    """

    negatives: Literal["uniform", "popular", "in_batch"] = "uniform"
    """Negative distribution: uniform, proportional to training frequency, or the targets of the step on all
    ranks. The loss is corrected for the distribution. All targets in a step share the negatives.
    """
    num_negatives: int = 512
    """Number of negatives per step; the maximum number with in_batch."""
    similarity: Literal["dot", "cosine", "mixture"] = "dot"
    """Item score: dot product, cosine, or a mixture of component cosines."""
    temperature: float = 1.0
    """Divisor of the scores."""
    repeats: bool = False
    """Whether the scores of history items also depend on how often and how recently the user had them, for
    logs in which users take items again; see [Note: repeated items].
    """

    def __post_init__(self) -> None:
        if self.num_negatives < 1 or not self.temperature > 0:
            raise ValueError(
                f"num_negatives {self.num_negatives} must be at least 1, and the temperature "
                f"{self.temperature} above 0."
            )

    def build_similarity(self, width: int, device: torch.device | None = None) -> Similarity:
        """Build the similarity for vectors of width ``width``."""
        if self.similarity == "mixture":
            return MixtureOfLogits(width, temperature=self.temperature, device=device)
        return DotProduct(normalise=self.similarity == "cosine", temperature=self.temperature)


class ItemChunk(NamedTuple):
    """A block of catalogue items: ascending IDs [C] and vectors [C, D]."""

    ids_C: Tensor
    vectors_CD: Tensor


class Negatives(NamedTuple):
    """Negative items for a training step."""

    ids_N: Tensor
    log_expected_N: Tensor
    """Log of the expected count per item among N draws."""


class NegativeSampler(nn.Module):
    """Sampler of negative items for a training step.

    Draws are a function of the model's initial seed, the step number and, for in_batch, the targets on all
    ranks. All ranks therefore draw the same items, and training does not depend on the number of ranks.

    Args:
        catalogue_I: All item IDs, ascending, int64.
        counts_I: Training targets per item; required unless draws are uniform.
        softmax: Number and distribution of negatives.
        device: Device of the sampled IDs.

    Raises:
        ValueError: ``counts_I`` is required and missing.
    """

    constant_buffers = ("catalogue_I", "shares_I")
    catalogue_I: Tensor  # all IDs, ascending
    num_steps: Tensor  # steps so far; saved, so that a resumed run continues the sequence of draws
    shares_I: Tensor  # sampling probability per item, float64

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
        counts = counts.double() + 1e-3  # items without training targets can still be drawn
        # The seed of the initial weights, which all ranks share.
        self._softmax, self._seed = softmax, torch.initial_seed()
        self.samples = StepSamples()  # the trainer joins all ranks
        self.register_buffer("catalogue_I", catalogue_I.to(device), persistent=False)
        self.register_buffer("shares_I", (counts / counts.sum()).to(device), persistent=False)
        self.register_buffer("num_steps", torch.zeros((), dtype=torch.int64, device=device))

    def uniform(self, counters_N: Tensor) -> Tensor:
        """Return pseudo-random values in [0, 1), float64 [N], from the counters, the step and the seed."""
        hashed = mix(mix(counters_N.long(), self._seed) + self.num_steps, self._seed)
        return (hashed & ((1 << _SHARE_BITS) - 1)).double() * 2.0**-_SHARE_BITS

    def forward(self, targets_T: Tensor) -> Negatives:
        """Draw negatives for the given targets, and advance the step."""
        num_draws, num_items = self._softmax.num_negatives, len(self.catalogue_I)
        device = targets_T.device
        if self._softmax.negatives == "in_batch":
            (all_targets,) = self.samples(targets_T).rows
            num_draws = min(num_draws, len(all_targets))
            # Systematic sampling: evenly spaced positions in the sorted targets, with a random start. All
            # targets are equally likely, and their distribution over ranks does not matter.
            grid = torch.arange(num_draws, device=device) + self.uniform(targets_T.new_zeros(1))
            points_N = (grid * (len(all_targets) / max(num_draws, 1))).long().clamp(max=len(all_targets) - 1)
            ids_N = all_targets.sort().values[points_N]
            index_N = torch.searchsorted(self.catalogue_I, ids_N).clamp(max=num_items - 1)
        else:
            points_N = self.uniform(torch.arange(num_draws, device=device))
            if self._softmax.negatives == "uniform":
                index_N = (points_N * num_items).long()
            else:
                # Inverse transform sampling.
                index_N = torch.searchsorted(self.shares_I.cumsum(0), points_N).clamp(max=num_items - 1)
            ids_N = self.catalogue_I[index_N]
        # In place, so that the buffer keeps its identity under compile and in checkpoints.
        self.num_steps += 1
        return Negatives(ids_N, (self.shares_I[index_N].log() + math.log(max(num_draws, 1))).float())


class NewUserScores(nn.Module):
    """Item scores for users without a history.

    Args:
        ids_I: All item IDs, ascending, int64.
        scores_I: Score per item, float32.
    """

    constant_buffers = ("ids_I", "scores_I")
    ids_I: Tensor
    scores_I: Tensor  # persistent: a log that grows after training must not change a trained model

    def __init__(self, ids_I: Tensor, scores_I: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids_I", ids_I.to(scores_I.device), persistent=False)
        self.register_buffer("scores_I", scores_I)

    def forward(self, ids_N: Tensor) -> Tensor:
        """Return scores for catalogue items; undefined for other IDs."""
        return self.scores_I[torch.searchsorted(self.ids_I, ids_N).clamp(max=len(self.ids_I) - 1)]


class NewUsers(NamedTuple):
    """Which samples have no history, and the item scores for them.

    Attributes:
        is_new_B: Bool, True for samples scored by ``scores`` instead of a query.
        scores: Item scores for these samples.
    """

    is_new_B: Tensor
    scores: NewUserScores


class HistoryItems(NamedTuple):
    """Scores of items in the users' histories, all of which the training loss contains, without sampling."""

    target_factors_T: Tensor
    """Factor of each target's similarity; 1 for a target outside the history."""
    target_additions_T: Tensor
    """Term added to each target's score; 0 for a target outside the history."""
    scores_TL: Tensor
    """Scores of history items other than the target; -inf for padding and repeated occurrences."""
    is_in_history_TN: Tensor
    """Whether a sampled item is in the target's history."""


def sampled_softmax(
    queries_TD: Tensor,
    targets_TD: Tensor,
    drawn_ND: Tensor,
    *,
    target_T: Tensor,
    drawn_N: Tensor,
    log_expected_N: Tensor | float,
    similarity: Similarity = _DOT_PRODUCT,
    history_items: HistoryItems | None = None,
) -> Tensor:
    """Compute the cross-entropy per target against sampled items, corrected to estimate the full softmax.

    The correction subtracts a sampled item's log expected count from the item's logit. Draws equal to the
    target are masked out. Source: Jean et al., "On using very large target vocabulary for neural machine
    translation" (2015).

    Args:
        queries_TD: Queries, converted by ``similarity.convert_queries``.
        targets_TD: Target items, converted by ``similarity.convert_items``.
        drawn_ND: Sampled items, converted by ``similarity.convert_items``.
        target_T: Target IDs.
        drawn_N: Sampled IDs.
        log_expected_N: Log expected count per sampled item: log(N p) for N draws with probability p.
        similarity: Item score.
        history_items: Further items, which are not sampled.

    Returns:
        Losses [T].
    """
    target_scores_T = similarity.score_pairs(queries_TD, targets_TD)
    scores_TN = similarity.score_matrix(queries_TD, drawn_ND) - log_expected_N
    scores_TN = scores_TN.masked_fill(target_T[:, None] == drawn_N, float("-inf"))
    logits = [target_scores_T[:, None], scores_TN]
    if history_items is not None:
        scores_TN = scores_TN.masked_fill(history_items.is_in_history_TN, float("-inf"))
        target_scores_T = target_scores_T * history_items.target_factors_T + history_items.target_additions_T
        logits = [target_scores_T[:, None], scores_TN, history_items.scores_TL]
    # The target is class 0.
    return nn.functional.cross_entropy(torch.cat(logits, dim=1), torch.zeros_like(target_T), reduction="none")


def evaluate_targets(
    query_BD: Tensor,
    target_BD: Tensor,
    target_B: Tensor,
    chunks: Iterator[ItemChunk],
    *,
    seen: JaggedTensor | None = None,
    similarity: Similarity = _DOT_PRODUCT,
    new_users: NewUsers | None = None,
    repeated: RepeatedItems | None = None,
) -> Tensor:
    """Return the loss, the target's rank among all unseen items, and the number of ties, as [B, 3].

    Ties are other items with the target's score. A tie adds 0.5 to the rank, so that a model with equal
    scores for all items gets the middle rank and not the best.

    Args:
        query_BD: Queries, converted by ``similarity.convert_queries``.
        target_BD: Target items, converted by ``similarity.convert_items``.
        target_B: Target IDs; `NO_ITEM` for samples without a target, whose result is 0.
        chunks: All items, chunk by chunk.
        seen: B bags of IDs that must not be recommended again. The target is ranked even if it is among them.
        similarity: Item score.
        new_users: Samples without a history, and the item scores for them.
        repeated: Scores of history items.
    """
    target_scores_B = similarity.score_pairs(query_BD, target_BD)
    if new_users is not None:
        target_scores_B = torch.where(new_users.is_new_B, new_users.scores(target_B), target_scores_B)
    if repeated is not None:
        is_target_N = repeated.ids_N == target_B[repeated.sample_N]
        sample_N = repeated.sample_N[is_target_N]
        scores_N = target_scores_B[sample_N] * repeated.factor + repeated.additions_N[is_target_N]
        target_scores_B = target_scores_B.index_put((sample_N,), scores_N)
    log_sum_B, rank_B, ties_B = (
        target_scores_B,
        torch.ones_like(target_scores_B),
        torch.zeros_like(target_scores_B),
    )
    sample_B = torch.arange(len(target_B), device=target_B.device)
    for ids_C, vectors_CD in chunks:
        scores_BC = _chunk_scores(query_BD, ItemChunk(ids_C, vectors_CD), similarity, new_users, repeated)
        # The target itself was scored above.
        _mask_scores(scores_BC, ids_C, sample_B, target_B)
        if seen is not None:
            _mask_scores(scores_BC, ids_C, sample_indices(seen), seen.values())
        equal_B = (scores_BC == target_scores_B[:, None]).sum(1)
        # Not `>`: with a NaN target score every item counts as above, so that the target ranks last.
        above = ~(scores_BC <= target_scores_B[:, None])
        rank_B = rank_B + above.sum(1) + 0.5 * equal_B
        ties_B = ties_B + equal_B
        # Streaming log-sum-exp over chunks.
        log_sum_B = torch.logaddexp(log_sum_B, scores_BC.logsumexp(1))
    results = torch.stack([log_sum_B - target_scores_B, rank_B, ties_B], dim=1)
    return results * (target_B != NO_ITEM)[:, None]


class TopItems(NamedTuple):
    """The K best items per sample, best first."""

    ids_BK: Tensor
    """IDs, int64. Entries with score -inf are padding: fewer than K items were left."""
    scores_BK: Tensor


def top_items(
    query_BD: Tensor,
    chunks: Iterator[ItemChunk],
    k: int,
    *,
    seen: JaggedTensor | None = None,
    similarity: Similarity = _DOT_PRODUCT,
    new_users: NewUsers | None = None,
    repeated: RepeatedItems | None = None,
) -> TopItems:
    """Return the K items with the highest scores per sample, exactly; equal scores in catalog order.

    Args:
        query_BD: Queries, converted by ``similarity.convert_queries``.
        chunks: All items, chunk by chunk.
        k: Item count K.
        seen: B bags of IDs that must not be recommended.
        similarity: Item score.
        new_users: Samples without a history, and the item scores for them.
        repeated: Scores of history items.
    """
    # Merged with every chunk, so that memory does not grow with the catalogue.
    best_scores = query_BD.new_full((len(query_BD), k), float("-inf"))
    # Placeholder IDs with score -inf, replaced as soon as k items were seen.
    best_ids = torch.zeros(len(query_BD), k, dtype=torch.int64, device=query_BD.device)
    for ids_C, vectors_CD in chunks:
        scores_BC = _chunk_scores(query_BD, ItemChunk(ids_C, vectors_CD), similarity, new_users, repeated)
        if seen is not None:
            _mask_scores(scores_BC, ids_C, sample_indices(seen), seen.values())
        candidate_scores = torch.cat([best_scores, scores_BC], dim=1)
        candidate_ids = torch.cat([best_ids, ids_C.expand(len(query_BD), -1)], dim=1)
        best_scores, best = top_k(candidate_scores, k)
        best_ids = candidate_ids.gather(1, best)
    return TopItems(best_ids, best_scores)


def last_ids(items: JaggedTensor) -> Tensor:
    """Return the last ID of each bag, int64 [B]; `NO_ITEM` for an empty bag."""
    lengths, values = items.lengths(), items.values()
    if not len(values):
        return lengths.new_full(lengths.shape, NO_ITEM, dtype=torch.int64)
    # The clamp only affects empty bags, which torch.where replaces.
    last = (items.offsets()[1:] - 1).clamp(min=0)
    return torch.where(lengths > 0, values[last].long(), NO_ITEM)


def _chunk_scores(
    query_BD: Tensor,
    chunk: ItemChunk,
    similarity: Similarity,
    new_users: NewUsers | None,
    repeated: RepeatedItems | None,
) -> Tensor:
    """Return scores for an item chunk per sample, [B, C].

    Args:
        query_BD: Converted queries.
        chunk: Items.
        similarity: Item score.
        new_users: Samples without a history, and the item scores for them.
        repeated: Scores of history items.
    """
    scores_BC = similarity.score_matrix(query_BD, chunk.vectors_CD)
    if new_users is not None:
        scores_BC = torch.where(new_users.is_new_B[:, None], new_users.scores(chunk.ids_C), scores_BC)
    return scores_BC if repeated is None else add_repeat_scores(scores_BC, chunk.ids_C, repeated)


def add_repeat_scores(scores_BC: Tensor, ids_C: Tensor, repeated: RepeatedItems) -> Tensor:
    """Replace the scores of (sample, history item) pairs by ``factor * score + addition``; returns [B, C].

    Args:
        scores_BC: Scores by similarity.
        ids_C: IDs in the chunk, ascending.
        repeated: Scores of history items, also of other chunks.
    """
    index_N, is_inside_N = _search_ids(ids_C, repeated.ids_N)
    pairs = repeated.sample_N[is_inside_N], index_N[is_inside_N]
    scores_N = scores_BC[pairs] * repeated.factor + repeated.additions_N[is_inside_N]
    return scores_BC.index_put(pairs, scores_N.to(scores_BC.dtype))


def sample_indices(bags: JaggedTensor) -> Tensor:
    """Return the sample of each ID, int64 [N]: bags of lengths [2, 1] give [0, 0, 1]."""
    lengths = bags.lengths()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def _mask_scores(scores_BC: Tensor, ids_C: Tensor, sample_N: Tensor, ids_N: Tensor) -> None:
    """Set the scores of (sample, item) pairs to -inf, for items in this chunk.

    Args:
        scores_BC: Scores, changed in place.
        ids_C: IDs in the chunk, ascending.
        sample_N: Sample index per pair.
        ids_N: Item ID per pair.
    """
    index, inside = _search_ids(ids_C, ids_N)
    scores_BC[sample_N[inside], index[inside]] = float("-inf")


def _search_ids(ids_C: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Return the index of each ID in ``ids_C``, which ascends, and whether it is there; both [N]."""
    index_N = torch.searchsorted(ids_C, ids_N.to(ids_C.dtype)).clamp(max=len(ids_C) - 1)
    return index_N, ids_C[index_N] == ids_N
