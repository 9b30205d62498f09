"""Base class for next-item models: given a user's history of items, they score all items as the next one.

The base class looks up embeddings, and computes training losses, evaluation results and recommendations. A
subclass only encodes histories to vectors.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypedDict

import torch
from torch import Tensor, nn

from meshrec.models.next_item import (
    CHUNK,
    NO_ITEM,
    HistoryItems,
    ItemChunk,
    NegativeSampler,
    NewUsers,
    NewUserScores,
    SampledSoftmax,
    TopItems,
    evaluate_targets,
    last_ids,
    sample_indices,
    sampled_softmax,
    top_items,
)
from meshrec.models.repeats import RepeatedItems, RepeatScores, prefix_items, repeated_items
from meshrec.models.trends import TrendScores
from meshrec.modules import EmbeddingCollection, EmbeddingConfig
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, L items in a history, N items in all histories, T targets, D embedding width, I catalogue items

_EVALUATION_BLOCK = 256
"""Evaluation encodes a multiple of this many samples, see `HistoryModel._evaluate`."""
_ENCODED_BLOCK = 512
"""Samples that are encoded at a time on a CPU, outside of training."""
_FREE_PADDING = 16
"""Padding positions per sample that cost less than encoding another bucket."""


class HistoryFeatures(NamedTuple):
    """Feature names of a next-item model. The features ``history`` and ``item`` must share a table.

    A sample may have several targets in training. They are aligned with the history at the end: the last
    target follows the whole history, and the others follow shorter prefixes. For example, with the history
    [1, 2, 3] and the targets [3, 4], the model learns to predict 3 from [1, 2], and 4 from [1, 2, 3].
    """

    history: str
    """Feature with the user's items, oldest first."""
    item: str
    """Feature with the target items; in evaluation, a single item."""
    seen: str | None = None
    """Feature with items that must not be recommended again. None: all items are ranked."""
    times: str | None = None
    """Feature with a timestamp per history item, in seconds, which is not looked up in a table. None: the
    model does not read timestamps."""


class ItemCatalogue(NamedTuple):
    """Catalog: the I items that a next-item model ranks."""

    ids_I: Tensor
    """Item IDs in the embedding table, ascending, int64."""
    counts_I: Tensor | None = None
    """How many training targets are this item, per item; None: unknown."""
    new_user_scores_I: Tensor | None = None
    """Score per item for users without a history, float32. None: the model encodes an empty history."""
    trends_I: Tensor | None = None
    """Popularity trend per item, float32. None: scores have no trends."""
    trend_weight: float = 0.0
    """Factor for the trends when they are added to scores."""


class HistoryOptions(TypedDict, total=False):
    """Keyword arguments that all next-item models pass on to `HistoryModel`."""

    softmax: SampledSoftmax
    items: ItemCatalogue | None
    device: torch.device | None


class EncodedHistories(NamedTuple):
    """Encoded histories for B samples: a vector per position, which predicts the item at this position.

    A history with L items has L + 1 vectors. Vector ``l`` predicts item ``l``, counted from 0, and the last
    vector predicts the next item.
    """

    vectors: Tensor
    """Vectors for all samples, sample by sample, [n, D]. There may be padding after a sample's vectors."""
    first_B: Tensor
    """Index of the first vector, per sample, int64."""


class _Targets(NamedTuple):
    """Training targets in a batch, int64 [T] each."""

    ids_T: Tensor
    """Item ID to predict."""
    sample_T: Tensor
    """Sample index in the batch."""
    position_T: Tensor
    """Position in the sample's history whose encoded vector predicts the target; see `EncodedHistories`."""


class HistoryModel(nn.Module):
    """Base class for next-item models. An item's score is the similarity between its vector and a query.

    The query is the encoded history, see `EncodedHistories`. A subclass implements ``_encode_bucket`` if it
    encodes padded histories, otherwise ``_encode``.

    Args:
        embedding_collection: Collection with a table that the features ``history`` and ``item`` read.
        features: Feature names.
        max_length: Maximum history length, in items.
        softmax: Training loss, and the similarity.
        items: Items to rank; None: all table rows.
        hidden: None for a causal model, in which vector ``l`` depends only on the items before item ``l``.
            For a masked model, the fraction of history items to mask in training. The model predicts a masked
            item from all other items, and also predicts the next item, which is always masked.
        device: Device for all parameters except the table.

    Raises:
        ValueError: The two features do not share exactly one table, a size is below 1, or ``softmax.repeats``
            meets a feature with seen items, which are not ranked.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int,
        softmax: SampledSoftmax = SampledSoftmax(),  # noqa: B008 - immutable
        items: ItemCatalogue | None = None,
        hidden: float | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        table = _shared_table(embedding_collection, features)
        if items is None:
            items = ItemCatalogue(torch.arange(table.num_embeddings))
        if max_length < 1 or not len(items.ids_I) or not 0 <= (hidden or 0.0) < 1:
            raise ValueError(
                f"max_length {max_length} and the number of items {len(items.ids_I)} must be at least 1, and "
                f"the share of hidden items {hidden} in [0, 1)."
            )
        if softmax.repeats and features.seen is not None:
            raise ValueError(
                f"softmax.repeats=True scores history items, and items of feature {features.seen!r} are "
                "not ranked. Set exclude_seen=False in the data, or repeats=False."
            )
        self.embedding_collection = embedding_collection
        self.width: int = table.embedding_dim
        self.features, self._max_length, self._hidden = features, max_length, hidden
        # Trained vector: the start token before every history (causal models), or the input at masked
        # positions (masked models).
        self.start = nn.Parameter(torch.zeros(self.width, device=device))
        self.similarity = softmax.build_similarity(self.width, device)
        # Training never predicts a user's first item, so the query of an empty history is untrained.
        self.scores_new_users = items.new_user_scores_I is not None
        if items.new_user_scores_I is not None:
            self.new_user_scores = NewUserScores(items.ids_I, items.new_user_scores_I.to(device))
        self.trends: TrendScores | None = None
        if items.trends_I is not None:
            self.trends = TrendScores(items.ids_I, items.trends_I, items.trend_weight, device=device)
        num_items = len(items.ids_I)
        self.repeats = RepeatScores(num_items, max_length, device=device) if softmax.repeats else None
        # Draws negatives in training. Also holds the catalog, which `_item_chunks` iterates over.
        self.draws = NegativeSampler(items.ids_I, softmax, counts_I=items.counts_I, device=device)

    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        """Encode the histories in a batch.

        In a causal model, vector ``l`` must depend only on the first ``l`` items in the history.

        Args:
            history: B bags with the table rows for history items, values [N, D].
            times: B bags with timestamps in seconds, int64 [N]; None: the model does not read timestamps.
        """
        return _encode_in_buckets(history, self._max_length, self._encode_bucket)

    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        """Encode a bucket: padded histories with similar lengths.

        Args:
            lengths: History lengths, [B].
            rows: Padded table rows, [B, L, D].

        Returns:
            Vectors, [B, L + 1, D].
        """
        raise NotImplementedError(
            f"{type(self).__name__} cannot encode histories. Write _encode or _encode_bucket in the subclass."
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the training loss per sample or, in evaluation mode, the loss and rank per target.

        Args:
            dense_features: Ignored.
            sparse_features: IDs for all features.

        Returns:
            In training mode, [B, 2]: a column with the mean loss over the sample's targets, and a column with
            zeros. In evaluation mode, the result from `evaluate_targets`, [B, 3].
        """
        items = sparse_features[self.features.item]
        return (
            self._losses(sparse_features, items) if self.training else self._evaluate(sparse_features, items)
        )

    def query_vectors(self, sparse_features: KeyedJaggedTensor, *, check: bool = True) -> Tensor:
        """Return the query that scores items as the next one, per history, [B, D].

        For a dot product or cosine, an item's score is the dot product of the query with the item's row in
        `item_vectors`, divided by the temperature. The item's term from ``trends``, if any, is added. If the
        model has `NewUserScores`, an empty history has a query with zeros.

        Args:
            sparse_features: IDs for all features; ``item`` may be empty.
            check: Whether to check history lengths, which an exported program cannot do.
        """
        history = self._look_up(sparse_features, None)[0]
        query_BD = self._last_queries(sparse_features, history, check=check)
        return query_BD * (history.lengths() > 0)[:, None] if self.scores_new_users else query_BD

    def item_vectors(self) -> Tensor:
        """Return the vectors for all catalog items, converted by ``similarity.convert_items``, [I, D].

        Collective if tables are sharded.
        """
        return torch.cat([chunk.vectors_CD for chunk in self._item_chunks()])

    def recommend(
        self, sparse_features: KeyedJaggedTensor, k: int, *, keep_seen: bool = False, seen: str | None = None
    ) -> TopItems:
        """Return the K items with the highest scores as the next one, per history.

        Collective if tables are sharded.

        Args:
            sparse_features: IDs for all features; ``item`` may be empty.
            k: Number of items to recommend, K.
            keep_seen: Whether to recommend items that the user has seen, too.
            seen: Feature with the seen items; None: ``features.seen``, if any.
        """
        name = self.features.seen if seen is None else seen
        # IDs that must not be recommended.
        seen_items = None if name is None or keep_seen else sparse_features[name]
        query = self.query_vectors(sparse_features)
        new_users = self._new_users(sparse_features[self.features.history].lengths())
        return top_items(
            query,
            self._item_chunks(),
            k,
            seen=seen_items,
            similarity=self.similarity,
            new_users=new_users,
            repeated=self._repeated_items(sparse_features[self.features.history]),
            trends=self.trends,
        )

    def _repeated_items(self, history: JaggedTensor) -> RepeatedItems | None:
        """Return how items in the users' histories are scored; None unless ``softmax.repeats`` is set.

        See [Note: repeated items] in models/repeats.py.
        """
        if self.repeats is None:
            return None
        return repeated_items(self.repeats.weight, self.repeats.chosen, history)

    def _new_users(self, lengths_B: Tensor) -> NewUsers | None:
        """Return which samples lack a history, and the item scores for these samples.

        Return None if the model does not have fixed scores for new users (`NewUserScores`). It then encodes
        empty histories like all others.
        """
        return NewUsers(lengths_B == 0, self.new_user_scores) if self.scores_new_users else None

    def _losses(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        """Return the mean loss over the targets of every sample, and a column of zeros, [B, 2].

        Args:
            items: B bags with target items.
        """
        # Targets per sample; the loss is averaged over them.
        counts_B, device = items.lengths(), items.values().device
        targets = self._select_targets(features[self.features.history], items)
        # Before the lookup, so that histories, targets and negatives share a single collective.
        negatives = self.draws(targets.ids_T)
        # Target rows come first in ``vectors``, then negatives.
        history, vectors = self._look_up(features, torch.cat([targets.ids_T, negatives.ids_N]))
        if not len(targets.ids_T):
            # Lookups and their backward are collective: other ranks wait for this rank.
            zeros_B2 = history.values().new_zeros(len(counts_B), 2)
            used = self._encode_rows(features, history).vectors.sum() + vectors.sum()
            if self.repeats is not None:
                used = used + self.repeats.weight.sum()
            return used * zeros_B2
        # Before the mask: the scores of repeated items need the items' own rows.
        item_rows = history.values()
        if self._hidden is not None:
            history = self._mask_history(history, targets)
        encoded, vectors = self._encode_rows(features, history), self.similarity.convert_items(vectors)
        queries_T = self.similarity.convert_queries(
            encoded.vectors[encoded.first_B[targets.sample_T] + targets.position_T]
        )
        history_items = None
        if self.repeats is not None:
            weight_F, ids = self.repeats.weight, features[self.features.history]
            history_items = self._score_history_items(
                weight_F, ids, item_rows, targets=targets, queries_T=queries_T, drawn_N=negatives.ids_N
            )
        losses_T = sampled_softmax(
            queries_T,
            vectors[: len(targets.ids_T)],
            vectors[len(targets.ids_T) :],
            target_T=targets.ids_T,
            drawn_N=negatives.ids_N,
            log_expected_N=negatives.log_expected_N,
            similarity=self.similarity,
            history_items=history_items,
        )
        sums_B = losses_T.new_zeros(len(counts_B)).index_add(0, targets.sample_T, losses_T)
        # Not counts_B: masked models have other targets, see `_select_targets`.
        nums_B = torch.zeros(len(counts_B), device=device).index_add(
            0, targets.sample_T, torch.ones_like(losses_T)
        )
        # The clamp avoids 0 / 0 for samples without a target.
        return torch.stack([sums_B / nums_B.clamp(min=1), torch.zeros_like(sums_B)], dim=1)

    def _score_history_items(
        self,
        weight_F: Tensor,
        history: JaggedTensor,
        item_rows: Tensor,
        *,
        targets: _Targets,
        queries_T: Tensor,
        drawn_N: Tensor,
    ) -> HistoryItems:
        """Score the items in every target's history, for the training loss; see [Note: repeated items].

        A target's history is the prefix before the target.
        """
        lengths_B, sample_T, position_T = history.lengths(), targets.sample_T, targets.position_T
        stops_P = torch.arange(int(lengths_B.max()) + 1, device=drawn_N.device)
        items = prefix_items(weight_F, history, stops_P.expand(len(lengths_B), -1))
        vectors = JaggedTensor(self.similarity.convert_items(item_rows), lengths=lengths_B)
        vectors_BLV = vectors.to_padded_dense(items.ids_BL.shape[1])
        # Every sample has at most one target per position.
        # Per sample and position, padded with zeros, so that one product scores all histories.
        queries_BPV = queries_T.new_zeros(len(lengths_B), len(stops_P), queries_T.shape[1])
        queries_BPV = queries_BPV.index_put((sample_T, position_T), queries_T)
        scores_TL = self.similarity.score_within_samples(queries_BPV, vectors_BLV)[sample_T, position_T]
        additions_TL = items.scores_BPL[sample_T, position_T]
        is_last_TL = items.is_last_BPL[sample_T, position_T]
        is_target_TL = is_last_TL & (items.ids_BL[sample_T] == targets.ids_T[:, None])
        # Where a sampled item first occurs in the history: it is in all longer prefixes.
        # The largest tensor of a step: B * L * N bytes.
        is_drawn_BLN = items.ids_BL[:, :, None] == drawn_N
        first_BN = torch.where(is_drawn_BLN.any(1), is_drawn_BLN.int().argmax(1), len(stops_P))
        return HistoryItems(
            # In the order of the fields of `HistoryItems`.
            torch.where(is_target_TL.any(1), weight_F[0], 1.0),
            (additions_TL * is_target_TL).sum(1),
            (scores_TL * weight_F[0] + additions_TL).masked_fill(~is_last_TL | is_target_TL, float("-inf")),
            first_BN[sample_T] < position_T[:, None],
        )

    def _select_targets(self, history: JaggedTensor, items: JaggedTensor) -> _Targets:
        """Return the training targets.

        For a causal model, they are all IDs in ``items``. For a masked model, they are randomly selected
        history items, and the next item.
        """
        counts_B, lengths_B = items.lengths(), history.lengths()
        sample_T = sample_indices(items)
        # Aligned at the end: the last target follows the last item.
        position_T = (lengths_B - counts_B + 1)[sample_T]
        position_T = (
            position_T + torch.arange(len(sample_T), device=position_T.device) - items.offsets()[sample_T]
        )
        if len(position_T) and int(position_T.min()) < 0:
            sample = int(sample_T[position_T.argmin()])
            raise ValueError(
                f"sample {sample} has {int(counts_B[sample])} ids in feature {self.features.item!r} and a "
                f"history of {int(lengths_B[sample])}: each id must follow an item of the history, "
                "or be its first one. Give fewer ids."
            )
        targets = _Targets(items.values().long(), sample_T, position_T)
        if self._hidden is None:
            return targets
        is_next = position_T == lengths_B[sample_T]
        ids_N, sample_N = history.values().long(), sample_indices(history)
        position_N = torch.arange(len(ids_N), device=ids_N.device) - history.offsets()[sample_N]
        # The mask depends on the sample's IDs only, so the rank and position in the batch do not matter.
        id_sums_B = torch.zeros_like(lengths_B, dtype=torch.int64).index_add(0, sample_N, ids_N)
        # The low 10 bits count positions, so that the items of a history of up to 1024 items get different
        # numbers.
        is_hidden = self.draws.uniform((id_sums_B[sample_N] << 10) + position_N) < self._hidden
        return _Targets(
            torch.cat([ids_N[is_hidden], targets.ids_T[is_next]]),
            torch.cat([sample_N[is_hidden], sample_T[is_next]]),
            torch.cat([position_N[is_hidden], position_T[is_next]]),
        )

    def _mask_history(self, history: JaggedTensor, targets: _Targets) -> JaggedTensor:
        """Replace the table rows of masked items by the trained vector ``start``.

        An item in the history is masked if it is a target. Targets that follow the history are ignored.
        """
        lengths_B, rows = history.lengths(), history.values()
        is_item = targets.position_T < lengths_B[targets.sample_T]
        index = (history.offsets()[targets.sample_T] + targets.position_T)[is_item]
        rows = rows.index_copy(0, index, self.start.expand(len(index), -1).to(rows.dtype))
        return JaggedTensor(rows, lengths=lengths_B)

    def _evaluate(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        """Evaluate the last target of every sample, and return the result of `evaluate_targets`, [B, 3]."""
        target_B = last_ids(items)
        has_target = target_B != NO_ITEM
        history, vectors = self._look_up(features, target_B[has_target])
        # Samples without a target keep a zero row: evaluate_targets masks their result.
        target_BD = vectors.new_zeros(len(target_B), vectors.shape[1])
        target_BD[has_target] = vectors
        seen = None if self.features.seen is None else features[self.features.seen]
        # Skip trailing samples without a target, which pad the last batch. Whole blocks keep the summation
        # order, and thus the result, independent of the batch size.
        last = int(has_target.nonzero()[-1]) + 1 if bool(has_target.any()) else 0
        size = min(-(-last // _EVALUATION_BLOCK) * _EVALUATION_BLOCK, len(target_B))
        evaluated = _first_bags(history, size)
        results = evaluate_targets(
            self._last_queries(features, evaluated),
            self.similarity.convert_items(target_BD[:size]),
            target_B[:size],
            self._item_chunks(),
            seen=None if seen is None else _first_bags(seen, size),
            similarity=self.similarity,
            new_users=self._new_users(evaluated.lengths()),
            repeated=self._repeated_items(_first_bags(features[self.features.history], size)),
            trends=self.trends,
        )
        return nn.functional.pad(results, (0, 0, 0, len(target_B) - size))

    def _last_queries(
        self, features: KeyedJaggedTensor, history: JaggedTensor, *, check: bool = True
    ) -> Tensor:
        """Encode histories, and return the converted query for the next item, per history, [B, D].

        Args:
            history: B bags with the table rows for the history items. These may be only the first samples of
                the batch.
        """
        times = self._checked_times(features, history.lengths(), check=check)
        if not check or history.values().device.type != "cpu":
            return self._encode_last(history, times)
        # Histories of a few samples stay in the cache: blocks of 4,096 samples took twice as long.
        num_samples = history.lengths().shape[0]
        parts = [
            self._encode_last(
                _select_bags(history, start, start + _ENCODED_BLOCK),
                None if times is None else _select_bags(times, start, start + _ENCODED_BLOCK),
            )
            for start in range(0, max(num_samples, 1), _ENCODED_BLOCK)
        ]
        return torch.cat(parts)

    def _encode_last(self, history: JaggedTensor, times: JaggedTensor | None) -> Tensor:
        """Encode histories, and return the converted query for the next item; see `_encode`."""
        encoded = self._encode(history, times)
        return self.similarity.convert_queries(encoded.vectors[encoded.first_B + history.lengths()])

    def _encode_rows(
        self, features: KeyedJaggedTensor, history: JaggedTensor, *, check: bool = True
    ) -> EncodedHistories:
        """Check and encode histories; see `_last_queries` for the arguments."""
        return self._encode(history, self._checked_times(features, history.lengths(), check=check))

    def _checked_times(
        self, features: KeyedJaggedTensor, lengths: Tensor, *, check: bool = True
    ) -> JaggedTensor | None:
        """Check history lengths, and return the timestamps; None if the model does not read timestamps.

        Args:
            lengths: History lengths, [B]. These may be only the first samples of the batch; the result then
                has the timestamps of only these samples.
        """
        # Read sizes from shapes: `len` would make them constants in an exported program.
        times = None
        if self.features.times is not None:
            times = _first_bags(features[self.features.times], lengths.shape[0])
        if not check:
            return times
        longest = int(lengths.max()) if lengths.shape[0] else 0
        if longest > self._max_length:
            raise ValueError(
                f"sample {int(lengths.argmax())} has a history of {longest} items, and max_length is "
                f"{self._max_length}. Cut histories where they are read, or raise max_length."
            )
        if times is not None and not torch.equal(times.lengths().to(lengths.dtype), lengths):
            sample = int((times.lengths() != lengths).nonzero()[0])
            raise ValueError(
                f"sample {sample} has a history of {int(lengths[sample])} items and "
                f"{int(times.lengths()[sample])} times in feature {self.features.times!r}. Give every item "
                "of the history its time."
            )
        return times

    def _item_chunks(self) -> Iterator[ItemChunk]:
        """Iterate over the catalog, and look up the items chunk by chunk.

        Collective if tables are sharded, so all ranks must iterate together.
        """
        for ids in self.draws.catalogue_I.split(CHUNK):
            # A single bag with the whole chunk; the history feature is empty.
            none = ids.new_zeros(1)
            features = KeyedJaggedTensor(
                [*self.features[:2]], ids, lengths=torch.cat([none, none + len(ids)]), stride=1
            )
            rows = self.embedding_collection(features)[self.features.item].values()
            yield ItemChunk(ids, self.similarity.convert_items(rows))

    def _look_up(self, features: KeyedJaggedTensor, extra_ids: Tensor | None) -> tuple[JaggedTensor, Tensor]:
        """Look up history items and further items in one lookup, which is collective if tables are sharded.

        Returns:
            Rows for the histories, B bags, and rows for ``extra_ids``.
        """
        history = features[self.features.history]
        ids, lengths = history.values(), history.lengths()
        lengths_of_item = torch.zeros_like(lengths)
        if extra_ids is not None and lengths.shape[0]:
            # All extra IDs go to the last sample's bag, because every sample must have a bag.
            lengths_of_item[-1] += extra_ids.shape[0]
            ids = torch.cat([ids, extra_ids.to(ids.dtype)])
        requested = KeyedJaggedTensor(
            [*self.features[:2]], ids, lengths=torch.cat([lengths, lengths_of_item]), stride=lengths.shape[0]
        )
        rows_by_feature = self.embedding_collection(requested)
        return rows_by_feature[self.features.history], rows_by_feature[self.features.item].values()


def _encode_in_buckets(
    history: JaggedTensor, max_length: int, encode: Callable[[Tensor, Tensor], Tensor]
) -> EncodedHistories:
    """Encode histories of different lengths with a function that needs padded inputs.

    To limit padding, histories are divided into buckets with similar lengths. A bucket is padded to its
    longest history. An exported program has a single bucket instead.

    Args:
        max_length: Length to which an exported program pads all histories.
        encode: Function that maps a bucket's lengths [b] and padded rows [b, L, D] to vectors [b, L + 1, D].
    """
    lengths_B, offsets = history.lengths(), history.offsets()
    # Bucket sizes depend on the data, which an exported program cannot branch on.
    if torch.compiler.is_exporting():
        parts = [encode(lengths_B, history.to_padded_dense(max_length))]
        order_B = torch.arange(lengths_B.shape[0], device=lengths_B.device)
    else:
        # Sort the samples by length and permute the rows accordingly, so that buckets are contiguous.
        order_B = lengths_B.argsort(descending=True, stable=True)
        sorted_B = lengths_B[order_B]
        shift_B = offsets[:-1][order_B] - sorted_B.cumsum(0) + sorted_B
        shift_N = shift_B.repeat_interleave(sorted_B)
        rows = history.values().index_select(0, shift_N + torch.arange(len(shift_N), device=shift_N.device))
        # Read on the CPU, because bucket sizes decide the shapes below.
        lengths = sorted_B.tolist()
        buckets = sorted_B.split(_bucket_sizes(lengths))
        parts, first, start = [], 0, 0
        for bucket_lengths_B in buckets:
            bucket_lengths = lengths[first : first + len(bucket_lengths_B)]
            first, end = first + len(bucket_lengths), start + sum(bucket_lengths)
            bucket = JaggedTensor(rows[start:end], lengths=bucket_lengths_B)
            parts.append(encode(bucket_lengths_B, bucket.to_padded_dense(max(bucket_lengths, default=0))))
            start = end
    # Vectors per sample in a padded bucket.
    widths = torch.cat([part.new_full(part.shape[:1], part.shape[1], dtype=torch.int64) for part in parts])
    # Back to batch order.
    first_B = torch.empty_like(widths).scatter(0, order_B, widths.cumsum(0) - widths)
    return EncodedHistories(torch.cat([part.flatten(0, 1) for part in parts]), first_B)


def _bucket_sizes(lengths: list[int]) -> list[int]:
    """Divide histories into buckets of similar lengths, and return the number of histories per bucket.

    All histories in a bucket are padded to the longest one. A history with length L starts a new bucket if
    the current bucket would pad it to more than ``2 * L + _FREE_PADDING`` positions.

    Args:
        lengths: History lengths, descending.
    """
    # Lengths descend, so a new bucket starts when a sample is too short for the current one.
    sizes, longest = [0], lengths[0] if lengths else 0
    for length in lengths:
        if 2 * length + _FREE_PADDING < longest:
            sizes.append(0)
            longest = length
        sizes[-1] += 1
    return sizes


def _shared_table(collection: EmbeddingCollection, features: HistoryFeatures) -> EmbeddingConfig:
    """Return the configuration for the table that both ``history`` and ``item`` read."""
    history, item = features.history, features.item
    tables = [
        config for config in collection.embedding_configs() if {history, item} <= {*config.feature_names}
    ]
    if len(tables) != 1:
        raise ValueError(
            f"the features {history!r} and {item!r} must share one table: {len(tables)} have both. Give "
            "the features one table (Feature.table)."
        )
    return tables[0]


def _first_bags(bags: JaggedTensor, size: int) -> JaggedTensor:
    """Return the first ``size`` bags."""
    return _select_bags(bags, 0, size)


def _select_bags(bags: JaggedTensor, start: int, stop: int) -> JaggedTensor:
    """Return the bags ``start`` to ``stop``, exclusive; fewer if there are fewer."""
    lengths = bags.lengths()
    # Then the offsets below need not be read from the device.
    if start == 0 and stop >= lengths.shape[0]:
        return bags
    offsets = bags.offsets()
    stop = min(stop, lengths.shape[0])
    return JaggedTensor(bags.values()[int(offsets[start]) : int(offsets[stop])], lengths=lengths[start:stop])
