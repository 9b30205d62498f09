"""Sampled softmax loss, evaluation and recommendations for next-item models.

The functions here get encoded histories, called queries, and item vectors. `HistoryModel` computes both.
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
from meshrec.models.trends import TrendScores
from meshrec.ops.index import mix
from meshrec.ops.scores import merge_top_k, rank_scores
from meshrec.sparse import JaggedTensor

# B samples, T targets, N negatives, I catalogue items, C items in a chunk, D vector width, L history items

CHUNK = 4096
"""Catalog items that are looked up, and scored for all samples, at a time."""
_CPU_BLOCK = 128
"""Samples whose scores for a chunk are computed at a time on a CPU: 2 MiB, which stay in the cache. With 256
samples, matrix products took 1.1 times as long, and with 4,096 samples five times."""
NO_ITEM = -(1 << 63)
"""ID that stands for a missing item. The same as the key for missing values in hashed tables."""
_DOT_PRODUCT = DotProduct()
_SHARE_BITS = 53  # mantissa of a float64


@dataclass(frozen=True, kw_only=True)
class SampledSoftmax:
    """Options for the training loss of a next-item model: a softmax over the target and sampled negatives.

    Raises:
        ValueError: ``num_negatives`` is below 1, or the temperature is not above 0.
    """

    negatives: Literal["uniform", "popular", "in_batch"] = "uniform"
    """How negative items are drawn: "uniform", "popular" (in proportion to the training frequency), or
    "in_batch" (from the targets in the step, on all ranks). The loss is corrected for the distribution. All
    targets in a step share the negatives.
    """
    num_negatives: int = 512
    """Negative items per step; with in_batch, the maximum."""
    similarity: Literal["dot", "cosine", "mixture"] = "dot"
    """How an item is scored: dot product, cosine, or a mixture of cosines (see `MixtureOfLogits`)."""
    temperature: float = 1.0
    """Number by which dot products or cosines are divided."""
    repeats: bool = False
    """Whether an item in the history is also scored by how often and how recently the user had it. For logs
    in which users take items again; see [Note: repeated items].
    """

    def __post_init__(self) -> None:
        if self.num_negatives < 1 or not self.temperature > 0:
            raise ValueError(
                f"num_negatives {self.num_negatives} must be at least 1, and the temperature "
                f"{self.temperature} above 0."
            )

    def build_similarity(self, width: int, device: torch.device | None = None) -> Similarity:
        """Create the `Similarity` that these options select.

        Args:
            width: Width of queries and item vectors.
            device: Device for parameters.
        """
        if self.similarity == "mixture":
            return MixtureOfLogits(width, temperature=self.temperature, device=device)
        return DotProduct(normalise=self.similarity == "cosine", temperature=self.temperature)


class ItemChunk(NamedTuple):
    """Consecutive items of the catalog. Functions read the catalog chunk by chunk, to limit memory."""

    ids_C: Tensor
    """Item IDs, ascending, int64."""
    vectors_CD: Tensor
    """Item vectors, converted by ``similarity.convert_items``."""


class Negatives(NamedTuple):
    """Negative items for a training step."""

    ids_N: Tensor
    """Item IDs, int64; an item may occur several times."""
    log_expected_N: Tensor
    """Per negative, the logarithm of how often the item is expected among N draws."""


class NegativeSampler(nn.Module):
    """Module that draws the negative items for every training step.

    Draws depend only on the initial random seed, the step number and, if negatives are drawn "in_batch" (from
    the targets in the step), the targets on all ranks. So all ranks draw the same items, and training does
    not depend on the rank count.

    Args:
        catalogue_I: All item IDs, ascending, int64.
        counts_I: Number of training targets per item. It may be None only if draws are uniform.
        softmax: How negatives are drawn, and how many.
        device: Device for the sampled IDs.

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
        """Return a pseudo-random value in [0, 1) for every counter, float64 [N].

        The value is a hash of the counter, the step number and the seed, so equal counters give equal values
        within a step.

        Args:
            counters_N: Any integers, such as 0 to N - 1.
        """
        hashed = mix(mix(counters_N.long(), self._seed) + self.num_steps, self._seed)
        return (hashed & ((1 << _SHARE_BITS) - 1)).double() * 2.0**-_SHARE_BITS

    def forward(self, targets_T: Tensor) -> Negatives:
        """Draw the negatives for a training step, and advance the step number.

        If negatives are drawn "in_batch", they come from the targets on all ranks, and the call is
        collective. Before the trainer calls ``samples.join``, they come from this rank's targets only, and
        the call is not collective.

        Args:
            targets_T: Target IDs on this rank. Ignored unless negatives are drawn "in_batch".
        """
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
            # `searchsorted` returns num_items for an ID above all items. The clamp keeps the index valid.
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
    """Fixed item scores for users without a history, such as popularity.

    Args:
        ids_I: All item IDs, ascending, int64.
        scores_I: Score per item, float32.
    """

    constant_buffers = ("ids_I", "scores_I")
    from_data = ("scores_I",)
    ids_I: Tensor
    scores_I: Tensor  # persistent: a log that grows after training must not change a trained model

    def __init__(self, ids_I: Tensor, scores_I: Tensor) -> None:
        super().__init__()
        self.register_buffer("ids_I", ids_I.to(scores_I.device), persistent=False)
        self.register_buffer("scores_I", scores_I)

    def forward(self, ids_N: Tensor) -> Tensor:
        """Return the score per item ID, float32 [N]; undefined for IDs that are not in the catalog."""
        return self.scores_I[torch.searchsorted(self.ids_I, ids_N).clamp(max=len(self.ids_I) - 1)]


class NewUsers(NamedTuple):
    """Samples without a history, which are scored by `NewUserScores` instead of a query.

    Attributes:
        is_new_B: Bool mask for the samples without a history.
        scores: Item scores for these samples.
    """

    is_new_B: Tensor
    scores: NewUserScores


class HistoryItems(NamedTuple):
    """Scores for the items in the histories of T targets, for the training loss.

    The loss compares a target with all items in the history, and with sampled items outside the history. See
    [Note: repeated items] in models/repeats.py.
    """

    target_factors_T: Tensor
    """Factor for the target's similarity; 1 for a target outside the history."""
    target_additions_T: Tensor
    """Term added to the target's score; 0 for a target outside the history."""
    scores_TL: Tensor
    """Score per history position; -inf for the target, for padding, and for positions where the item occurs
    again later."""
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
    """Return the cross-entropy per target against sampled items, an estimate for the softmax over all items.

    A sampled item's logit is its score minus ``log_expected_N``, which corrects for the sampling
    distribution. Sampled items equal to the target are masked out. See Jean et al., "On using very large
    target vocabulary for neural machine translation" (2015).

    Args:
        queries_TD: Query per target, converted by ``similarity.convert_queries``.
        targets_TD: Vector per target, converted by ``similarity.convert_items``.
        drawn_ND: Vector per sampled item, converted by ``similarity.convert_items``.
        target_T: Target IDs.
        drawn_N: Sampled IDs.
        log_expected_N: Logarithm of how often a sampled item is expected: log(N p) for N draws with the
            probability p.
        similarity: How items are scored.
        history_items: Items in the targets' histories, if they are scored differently.

    Returns:
        Losses [T].
    """
    target_scores_T = similarity.score_pairs(queries_TD, targets_TD)
    scores_TN = similarity.score_matrix(queries_TD, drawn_ND) - log_expected_N
    scores_TN = scores_TN.masked_fill(target_T[:, None] == drawn_N, float("-inf"))
    logits = [target_scores_T[:, None], scores_TN]
    if history_items is not None:
        # A history item is in the softmax once, with the score in ``scores_TL``.
        scores_TN = scores_TN.masked_fill(history_items.is_in_history_TN, float("-inf"))
        target_scores_T = target_scores_T * history_items.target_factors_T + history_items.target_additions_T
        logits = [target_scores_T[:, None], scores_TN, history_items.scores_TL]
    # The target is class 0.
    return nn.functional.cross_entropy(torch.cat(logits, dim=1), torch.zeros_like(target_T), reduction="none")


@torch.no_grad()
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
    trends: TrendScores | None = None,
) -> Tensor:
    """Rank every sample's target among all items that the user has not seen.

    An item with the same score as the target is a tie. A tie adds 0.5 to the rank, so a model that scores all
    items equally gets the middle rank and not the best rank.

    Scores have the type of the queries. On a CPU with native bf16, bf16 scores would save a fifth of an
    evaluation. But the loss needs all scores, and it would change by up to 0.03 per sample.

    Args:
        query_BD: Queries, converted by ``similarity.convert_queries``.
        target_BD: Vector per target, converted by ``similarity.convert_items``.
        target_B: Target IDs; `NO_ITEM` for a sample without a target.
        chunks: The catalog, chunk by chunk.
        seen: B bags with item IDs that are not ranked. The target is ranked even if it is among them.
        similarity: How items are scored.
        new_users: Samples without a history, and the item scores for them.
        repeated: How items in the users' histories are scored, if differently.
        trends: Term that is added to the similarities; None: no term. New users' scores have no such term.

    Returns:
        Three columns, [B, 3]: the softmax loss over all ranked items; the target's rank, from 1; and the
        number of ties. A sample without a target has 0 in all columns.
    """
    target_scores_B = similarity.score_pairs(query_BD, target_BD)
    if trends is not None:
        target_scores_B = target_scores_B + trends(target_B)
    if new_users is not None:
        # The target must be scored like the other items of its sample, or its rank would be meaningless.
        target_scores_B = torch.where(new_users.is_new_B, new_users.scores(target_B), target_scores_B)
    if repeated is not None:
        is_target_N = repeated.ids_N == target_B[repeated.sample_N]
        sample_N = repeated.sample_N[is_target_N]
        scores_N = target_scores_B[sample_N] * repeated.factor + repeated.additions_N[is_target_N]
        target_scores_B = target_scores_B.index_put((sample_N,), scores_N)
    # The target's score is the first summand. Chunks add the scores for other items.
    log_sum_B, rank_B, ties_B = (
        target_scores_B.clone(),
        torch.ones_like(target_scores_B),
        torch.zeros_like(target_scores_B),
    )
    # The target itself was scored above.
    targets = (torch.arange(len(target_B), device=target_B.device), target_B)
    masked = [targets] if seen is None else [targets, _pairs(seen)]
    blocks = _sample_blocks(query_BD, masked, new_users, repeated)
    for _, block, scores_BC in _score_blocks(chunks, blocks, similarity, new_users, trends):
        # Masked items have the score -inf, so they are not ties. With a NaN target score, all items are above
        # it, so that the target ranks last.
        ranked = rank_scores(scores_BC, target_scores_B[block.rows])
        rank_B[block.rows] += ranked.num_above + 0.5 * ranked.num_equal
        ties_B[block.rows] += ranked.num_equal
        # Streaming log-sum-exp over chunks.
        log_sum_B[block.rows] = torch.logaddexp(log_sum_B[block.rows], ranked.log_sums)
    results = torch.stack([log_sum_B - target_scores_B, rank_B, ties_B], dim=1)
    return results * (target_B != NO_ITEM)[:, None]


class TopItems(NamedTuple):
    """The K items with the highest scores per sample, best first."""

    ids_BK: Tensor
    """Item IDs, int64. An entry with the score -inf is padding, for a sample with fewer than K items left."""
    scores_BK: Tensor


@torch.no_grad()
def top_items(
    query_BD: Tensor,
    chunks: Iterator[ItemChunk],
    k: int,
    *,
    seen: JaggedTensor | None = None,
    similarity: Similarity = _DOT_PRODUCT,
    new_users: NewUsers | None = None,
    repeated: RepeatedItems | None = None,
    trends: TrendScores | None = None,
) -> TopItems:
    """Return the K items with the highest scores per sample, by comparing all items in the catalog.

    Items with equal scores are in catalog order.

    Args:
        query_BD: Queries, converted by ``similarity.convert_queries``.
        chunks: The catalog, chunk by chunk.
        k: Items per sample, K.
        seen: B bags with item IDs that must not be recommended.
        similarity: How items are scored.
        new_users: Samples without a history, and the item scores for them.
        repeated: How items in the users' histories are scored, if differently.
        trends: Term that is added to the similarities; None: no term. New users' scores have no such term.
    """
    # Merged with every chunk, so that memory does not grow with the catalogue.
    best_scores = query_BD.new_full((len(query_BD), k), float("-inf"))
    # Placeholder IDs with score -inf, replaced as soon as k items were seen.
    best_ids = torch.zeros(len(query_BD), k, dtype=torch.int64, device=query_BD.device)
    masked = [] if seen is None else [_pairs(seen)]
    blocks = _sample_blocks(query_BD, masked, new_users, repeated)
    for ids_C, block, scores_BC in _score_blocks(chunks, blocks, similarity, new_users, trends):
        merge_top_k(scores_BC, ids_C, best_scores[block.rows], best_ids[block.rows])
    return TopItems(best_ids, best_scores)


def last_ids(items: JaggedTensor) -> Tensor:
    """Return the last ID in every bag, int64 [B]; `NO_ITEM` for an empty bag."""
    lengths, values = items.lengths(), items.values()
    if not len(values):
        return lengths.new_full(lengths.shape, NO_ITEM, dtype=torch.int64)
    # The clamp only affects empty bags, which torch.where replaces.
    last = (items.offsets()[1:] - 1).clamp(min=0)
    return torch.where(lengths > 0, values[last].long(), NO_ITEM)


class _SampleBlock(NamedTuple):
    """Block of B consecutive samples in a batch, which are scored together.

    All fields except ``rows`` count samples from the start of the block.

    Attributes:
        rows: Slice that selects the block's samples from the batch.
        query_BD: Queries of the block's samples.
        masked: Pairs of a sample and an item that get the score -inf, in ascending order of the item IDs. The
            first tensor has the sample indices, and the second the item IDs.
        new_N: Indices of the samples without a history, if new users have fixed scores.
        repeated: How items in the samples' histories are scored, in ascending order of the item IDs. None:
            like all other items.
    """

    rows: slice
    query_BD: Tensor
    masked: tuple[Tensor, Tensor]
    new_N: Tensor
    repeated: RepeatedItems | None

    def scores(
        self,
        chunk: ItemChunk,
        similarity: Similarity,
        new_user_scores_C: Tensor | None,
        trends_C: Tensor | None,
    ) -> Tensor:
        """Return the score for every sample and every item in a chunk, [B, C]; -inf for masked items.

        Args:
            chunk: The items.
            similarity: How items are scored.
            new_user_scores_C: Score per item for samples without a history.
            trends_C: Term per item that is added to the similarities.
        """
        scores_BC = similarity.score_matrix(self.query_BD, chunk.vectors_CD)
        if trends_C is not None:
            scores_BC += trends_C
        if new_user_scores_C is not None:
            scores_BC[self.new_N] = new_user_scores_C.to(scores_BC.dtype)
        if self.repeated is not None:
            inside = _ids_inside(chunk.ids_C, self.repeated.ids_N)
            add_repeat_scores(scores_BC, chunk.ids_C, self.repeated.select(inside))
        # Last, so that additions for repeated items cannot bring a masked item back.
        sample_N, ids_N = self.masked
        inside = _ids_inside(chunk.ids_C, ids_N)
        _mask_scores(scores_BC, chunk.ids_C, sample_N[inside], ids_N[inside])
        return scores_BC


def _score_blocks(
    chunks: Iterator[ItemChunk],
    blocks: list[_SampleBlock],
    similarity: Similarity,
    new_users: NewUsers | None,
    trends: TrendScores | None,
) -> Iterator[tuple[Tensor, _SampleBlock, Tensor]]:
    """Score all items for all samples, block by block; see `top_items` for the arguments.

    Yields:
        The item IDs in a chunk [C], a block of B samples, and their scores [B, C].
    """
    for chunk in chunks:
        new_user_scores_C = None if new_users is None else new_users.scores(chunk.ids_C)
        trends_C = None if trends is None else trends(chunk.ids_C)
        for block in blocks:
            yield chunk.ids_C, block, block.scores(chunk, similarity, new_user_scores_C, trends_C)


def _sample_blocks(
    query_BD: Tensor,
    masked: list[tuple[Tensor, Tensor]],
    new_users: NewUsers | None,
    repeated: RepeatedItems | None,
) -> list[_SampleBlock]:
    """Divide a batch into blocks of samples.

    On a CPU, a block has `_CPU_BLOCK` samples, except the last block, which may have fewer. On other devices,
    the whole batch is a single block.

    Args:
        masked: Pairs of a sample and an item that get the score -inf, as tensors of sample indices and item
            IDs.
    """
    num_samples, device = len(query_BD), query_BD.device
    size = _CPU_BLOCK if device.type == "cpu" else max(num_samples, 1)
    none = torch.zeros(0, dtype=torch.int64, device=device)
    sample_N = torch.cat([none, *(sample_N for sample_N, _ in masked)])
    ids_N, order_N = torch.cat([none, *(ids_N.long() for _, ids_N in masked)]).sort()
    sample_N = sample_N[order_N]
    if repeated is not None:
        repeated = repeated.select(repeated.ids_N.argsort())
    blocks = []
    for start in range(0, num_samples, size):
        rows = slice(start, min(start + size, num_samples))
        inside_N = ((sample_N >= start) & (sample_N < rows.stop)).nonzero().flatten()
        block_repeated = None
        if repeated is not None:
            is_inside_N = (repeated.sample_N >= start) & (repeated.sample_N < rows.stop)
            block_repeated = repeated.select(is_inside_N)
            block_repeated = block_repeated._replace(sample_N=block_repeated.sample_N - start)
        blocks.append(
            _SampleBlock(
                rows,
                query_BD[rows],
                (sample_N[inside_N] - start, ids_N[inside_N]),
                none if new_users is None else new_users.is_new_B[rows].nonzero().flatten(),
                block_repeated,
            )
        )
    return blocks


def add_repeat_scores(scores_BC: Tensor, ids_C: Tensor, repeated: RepeatedItems) -> None:
    """Replace the scores for items in the samples' histories by those from `RepeatedItems`.

    Args:
        scores_BC: Score for every sample and every item in a chunk, by similarity; modified in place.
        ids_C: Item IDs in the chunk, ascending.
        repeated: How history items are scored. Items outside the chunk are ignored.
    """
    index_N, is_inside_N = _search_ids(ids_C, repeated.ids_N)
    pairs = repeated.sample_N[is_inside_N], index_N[is_inside_N]
    scores_N = scores_BC[pairs] * repeated.factor + repeated.additions_N[is_inside_N]
    scores_BC[pairs] = scores_N.to(scores_BC.dtype)


def sample_indices(bags: JaggedTensor) -> Tensor:
    """Return the sample index per ID, int64 [N]. Example: bags with the lengths [2, 1] give [0, 0, 1]."""
    lengths = bags.lengths()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def _pairs(bags: JaggedTensor) -> tuple[Tensor, Tensor]:
    """Return the sample index and the ID of every ID in the bags, int64 [N] each."""
    return sample_indices(bags), bags.values()


def _mask_scores(scores_BC: Tensor, ids_C: Tensor, sample_N: Tensor, ids_N: Tensor) -> None:
    """Set the scores for N pairs (sample, item) to -inf. Items outside the chunk are ignored.

    Args:
        ids_C: Item IDs in the chunk, ascending.
    """
    index, inside = _search_ids(ids_C, ids_N)
    scores_BC[sample_N[inside], index[inside]] = float("-inf")


def _ids_inside(ids_C: Tensor, ids_N: Tensor) -> slice:
    """Return which of the ascending IDs [N] lie between the first and the last of the ascending IDs [C].

    A search in all IDs of a batch, for every chunk, would take a tenth of an evaluation.
    """
    first = torch.searchsorted(ids_N, ids_C[:1].to(ids_N.dtype))
    stop = torch.searchsorted(ids_N, ids_C[-1:].to(ids_N.dtype), right=True)
    return slice(int(first), int(stop))


def _search_ids(ids_C: Tensor, ids_N: Tensor) -> tuple[Tensor, Tensor]:
    """Search IDs [N] in ascending IDs [C].

    Returns:
        - Per ID, the index in ``ids_C``, int64 [N]; meaningless for an ID that is not there.
        - Whether the ID is in ``ids_C``, bool [N].
    """
    index_N = torch.searchsorted(ids_C, ids_N.to(ids_C.dtype)).clamp(max=len(ids_C) - 1)
    return index_N, ids_C[index_N] == ids_N
