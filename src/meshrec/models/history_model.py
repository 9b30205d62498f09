"""The part that all next-item models over histories share: lookups, training losses and evaluation."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.next_item import (
    CHUNK,
    NO_ITEM,
    ItemChunk,
    NegativeDraws,
    SampledSoftmax,
    TopItems,
    judge_targets,
    last_ids,
    sampled_softmax,
    top_items,
)
from meshrec.modules import EmbeddingCollection, EmbeddingConfig
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, L items of a history, N items of all histories, T targets, D embedding width, I items

_BLOCK = 256
_FEW_ITEMS = 16
"""The padding that every sample may have: another bucket would take longer than it does."""


class HistoryFeatures(NamedTuple):
    """The features that a next-item model reads. The first two share one table.

    In training ``item`` holds the items that followed the last items of the history, one for each; in
    evaluation it holds one item.
    """

    history: str
    """The items of a user, oldest first."""
    item: str
    """The targets, in the table of ``history``."""
    seen: str | None = None
    """Items that must not be recommended again. None: all items are ranked."""
    times: str | None = None
    """The times of the items of ``history`` in seconds, one for each. No table reads them."""


class ItemCatalogue(NamedTuple):
    """The items that a next-item model ranks."""

    ids_I: Tensor
    """Their IDs in the table, ascending, int64."""
    counts_I: Tensor | None = None
    """The number of times that each is a target in the training data, if it is known."""


class EncodedHistories(NamedTuple):
    """The encoded histories of B samples."""

    vectors: Tensor
    """[n, D]: for each sample one vector for each item, one for the next item, and maybe padding. Vector
    ``l`` predicts item ``l``.
    """
    first_B: Tensor
    """The position of each sample's first vector."""


class _Targets(NamedTuple):
    """Targets of a training step: their IDs, samples, and positions among the vectors of a sample."""

    ids_T: Tensor
    sample_T: Tensor
    place_T: Tensor


class HistoryModel(nn.Module):
    """A next-item model: the score of an item is its similarity to the encoded history.

    A subclass encodes histories in ``_encode_bucket`` if it pads them, or else in ``_encode``.

    Args:
        embedding_collection: a collection with one table that the features ``history`` and ``item`` read.
        features: names of the features.
        max_length: maximum length of a history.
        softmax: the loss of training.
        items: the items to rank; None: all rows of the table.
        hidden: None for a model whose vector ``l`` depends on the items before item ``l`` only. Otherwise
            the share of a history's items that training hides, and predicts from all others: ``start`` takes
            their place, and that of the next item, which is always predicted.
        device: device of everything except the table.

    Raises:
        ValueError: the two features do not share exactly one table, or a size is below 1.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int,
        softmax: SampledSoftmax,
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
        self.embedding_collection = embedding_collection
        self.width: int = table.embedding_dim
        self.features, self._max_length, self._hidden = features, max_length, hidden
        self.start = nn.Parameter(torch.zeros(self.width, device=device))
        self.similarity = softmax.scores(self.width, device)
        self.draws = NegativeDraws(items.ids_I, softmax, counts_I=items.counts_I, device=device)

    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        """Encode histories. Vector ``l`` of a sample depends on its first ``l`` items only.

        Args:
            history: the rows of the items, values [N, D].
            times: the times of the items, int64 [N]; None: the model has no ``times`` feature.
        """
        return encoded_in_buckets(history, self._max_length, self._encode_bucket)

    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        """Encode histories of similar lengths, as `encoded_in_buckets` asks."""
        raise NotImplementedError(
            f"{type(self).__name__} cannot encode histories. Write _encode or _encode_bucket in the subclass."
        )

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the loss and the rank of each target, [B, 2]; see `meshrec.models.next_item`.

        ``dense_features`` is ignored.
        """
        items = sparse_features[self.features.item]
        return self._losses(sparse_features, items) if self.training else self._places(sparse_features, items)

    def query_vectors(self, sparse_features: KeyedJaggedTensor, *, check: bool = True) -> Tensor:
        """Return a query for each history, [B, D]. If the similarity is a dot product or a cosine, the dot
        product of a query with one of `item_vectors` is the score times the temperature.

        ``check``: whether to check the lengths of histories, which an exported program cannot.
        """
        return self._last(sparse_features, self._look_up(sparse_features, None)[0], check=check)

    def item_vectors(self) -> Tensor:
        """Return the vectors of all items, [I, D], as the similarity prepares them."""
        return torch.cat([each.vectors_CD for each in self._chunks()])

    def recommend(self, sparse_features: KeyedJaggedTensor, k: int, *, keep_seen: bool = False) -> TopItems:
        """Return the K best items for each history. Collective, as the lookups of sharded tables are.

        Args:
            sparse_features: the features, of which ``item`` may be empty.
            k: the number of items K.
            keep_seen: whether items that the user has seen are recommended, too.
        """
        seen = None if self.features.seen is None or keep_seen else sparse_features[self.features.seen]
        query = self.query_vectors(sparse_features)
        return top_items(query, self._chunks(), k, seen=seen, similarity=self.similarity)

    def _losses(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        counts_B, device = items.lengths(), items.values().device
        found = self._targets(features[self.features.history], items)
        negatives = self.draws(found.ids_T)
        history, vectors = self._look_up(features, torch.cat([found.ids_T, negatives.ids_N]))
        if not len(found.ids_T):
            # Lookups are collective: ranks that have targets wait for this one.
            nothing = history.values().new_zeros(len(counts_B), 2)
            return (self._checked(features, history).vectors.sum() + vectors.sum()) * nothing
        if self._hidden is not None:
            history = self._without_hidden(history, found)
        encoded, vectors = self._checked(features, history), self.similarity.items(vectors)
        losses_T = sampled_softmax(
            self.similarity.queries(encoded.vectors[encoded.first_B[found.sample_T] + found.place_T]),
            vectors[: len(found.ids_T)],
            vectors[len(found.ids_T) :],
            target_T=found.ids_T,
            drawn_N=negatives.ids_N,
            log_expected_N=negatives.log_expected_N,
            similarity=self.similarity,
        )
        sums_B = losses_T.new_zeros(len(counts_B)).index_add(0, found.sample_T, losses_T)
        nums_B = torch.zeros(len(counts_B), device=device).index_add(
            0, found.sample_T, torch.ones_like(losses_T)
        )
        return torch.stack([sums_B / nums_B.clamp(min=1), torch.zeros_like(sums_B)], dim=1)

    def _targets(self, history: JaggedTensor, items: JaggedTensor) -> _Targets:
        """Return the targets of a training step."""
        counts_B, lengths_B = items.lengths(), history.lengths()
        sample_T = _samples_of(items)
        # The last target follows the last item.
        place_T = (lengths_B - counts_B + 1)[sample_T]
        place_T = place_T + torch.arange(len(sample_T), device=place_T.device) - items.offsets()[sample_T]
        if len(place_T) and int(place_T.min()) < 0:
            sample = int(sample_T[place_T.argmin()])
            raise ValueError(
                f"sample {sample} has {int(counts_B[sample])} ids in feature {self.features.item!r} and a "
                f"history of {int(lengths_B[sample])}: each id must follow an item of the history, "
                "or be its first one. Give fewer ids."
            )
        found = _Targets(items.values().long(), sample_T, place_T)
        if self._hidden is None:
            return found
        is_next = place_T == lengths_B[sample_T]
        ids_N, sample_N = history.values().long(), _samples_of(history)
        place_N = torch.arange(len(ids_N), device=ids_N.device) - history.offsets()[sample_N]
        # A function of the sample alone, so that it does not matter which rank has it.
        of_sample_B = torch.zeros_like(lengths_B, dtype=torch.int64).index_add(0, sample_N, ids_N)
        is_hidden = self.draws.bits((of_sample_B[sample_N] << 10) + place_N) < self._hidden
        return _Targets(
            torch.cat([ids_N[is_hidden], found.ids_T[is_next]]),
            torch.cat([sample_N[is_hidden], sample_T[is_next]]),
            torch.cat([place_N[is_hidden], place_T[is_next]]),
        )

    def _without_hidden(self, history: JaggedTensor, targets: _Targets) -> JaggedTensor:
        """Replace the rows of the hidden items by ``start``."""
        lengths_B, rows = history.lengths(), history.values()
        is_item = targets.place_T < lengths_B[targets.sample_T]
        at = (history.offsets()[targets.sample_T] + targets.place_T)[is_item]
        rows = rows.index_copy(0, at, self.start.expand(len(at), -1).to(rows.dtype))
        return JaggedTensor(rows, lengths=lengths_B)

    def _places(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        target_B = last_ids(items)
        found = target_B != NO_ITEM
        history, vectors = self._look_up(features, target_B[found])
        target_BD = vectors.new_zeros(len(target_B), vectors.shape[1])
        target_BD[found] = vectors
        seen = None if self.features.seen is None else features[self.features.seen]
        # Samples without a target, which fill up the last batch, are left out. What remains is rounded up to
        # whole blocks: sums over a block have one order, whatever the batch.
        last = int(found.nonzero()[-1]) + 1 if bool(found.any()) else 0
        size = min(-(-last // _BLOCK) * _BLOCK, len(target_B))
        places = judge_targets(
            self._last(features, _first_bags(history, size)),
            self.similarity.items(target_BD[:size]),
            target_B[:size],
            self._chunks(),
            seen=None if seen is None else _first_bags(seen, size),
            similarity=self.similarity,
        )
        return nn.functional.pad(places, (0, 0, 0, len(target_B) - size))

    def _last(self, features: KeyedJaggedTensor, history: JaggedTensor, *, check: bool = True) -> Tensor:
        """Encode the histories and return the query of each, [B, D]."""
        encoded = self._checked(features, history, check=check)
        return self.similarity.queries(encoded.vectors[encoded.first_B + history.lengths()])

    def _checked(
        self, features: KeyedJaggedTensor, history: JaggedTensor, *, check: bool = True
    ) -> EncodedHistories:
        """Encode the rows of histories, which may be those of the first samples only, after checking them."""
        return self._encode(history, self._times_of(features, history.lengths(), check=check))

    def _times_of(
        self, features: KeyedJaggedTensor, lengths: Tensor, *, check: bool = True
    ) -> JaggedTensor | None:
        """Check the histories of the first samples, given by their lengths, and return their times."""
        # Sizes are read from shapes: `len` would make them constants of an exported program.
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

    def _chunks(self) -> Iterator[ItemChunk]:
        """Look all items up in chunks. The lookups are collective, so all ranks must run this together."""
        for ids in self.draws.catalogue_I.split(CHUNK):
            none = ids.new_zeros(1)
            features = KeyedJaggedTensor(
                [*self.features[:2]], ids, lengths=torch.cat([none, none + len(ids)]), stride=1
            )
            found = self.embedding_collection(features)[self.features.item].values()
            yield ItemChunk(ids, self.similarity.items(found))

    def _look_up(self, features: KeyedJaggedTensor, more: Tensor | None) -> tuple[JaggedTensor, Tensor]:
        """Look up the rows of the histories, and the rows of more IDs: one lookup serves both."""
        history = features[self.features.history]
        ids, lengths = history.values(), history.lengths()
        lengths_of_item = torch.zeros_like(lengths)
        if more is not None and lengths.shape[0]:
            lengths_of_item[-1] += more.shape[0]
            ids = torch.cat([ids, more.to(ids.dtype)])
        wanted = KeyedJaggedTensor(
            [*self.features[:2]], ids, lengths=torch.cat([lengths, lengths_of_item]), stride=lengths.shape[0]
        )
        found = self.embedding_collection(wanted)
        return found[self.features.history], found[self.features.item].values()


def encoded_in_buckets(
    history: JaggedTensor, max_length: int, encode: Callable[[Tensor, Tensor], Tensor]
) -> EncodedHistories:
    """Encode histories of similar lengths together, padded to the longest of their bucket.

    Args:
        history: the rows of the items.
        max_length: the length to which an exported program, which has one bucket, pads histories.
        encode: maps the lengths [B] of a bucket and its rows [B, L, D], padded at the end, to vectors
            [B, L + 1, D].
    """
    lengths_B, offsets = history.lengths(), history.offsets()
    if torch.compiler.is_exporting():
        parts = [encode(lengths_B, history.to_padded_dense(max_length))]
        order_B = torch.arange(lengths_B.shape[0], device=lengths_B.device)
    else:
        order_B = lengths_B.argsort(descending=True, stable=True)
        falling_B = lengths_B[order_B]
        moved_B = offsets[:-1][order_B] - falling_B.cumsum(0) + falling_B
        places = moved_B.repeat_interleave(falling_B)
        rows = history.values().index_select(0, places + torch.arange(len(places), device=places.device))
        lengths = falling_B.tolist()
        buckets = falling_B.split(_bucket_sizes(lengths))
        parts, first, begin = [], 0, 0
        for own_B in buckets:
            own = lengths[first : first + len(own_B)]
            first, end = first + len(own), begin + sum(own)
            bucket = JaggedTensor(rows[begin:end], lengths=own_B)
            parts.append(encode(own_B, bucket.to_padded_dense(max(own, default=0))))
            begin = end
    widths = torch.cat([part.new_full(part.shape[:1], part.shape[1], dtype=torch.int64) for part in parts])
    first_B = torch.empty_like(widths).scatter(0, order_B, widths.cumsum(0) - widths)
    return EncodedHistories(torch.cat([part.flatten(0, 1) for part in parts]), first_B)


def _bucket_sizes(lengths: list[int]) -> list[int]:
    """Return the number of samples of each bucket. No sample is shorter than half of the longest one of its
    bucket, give or take `_FEW_ITEMS`.

    Args:
        lengths: the lengths of the samples, the longest first.
    """
    sizes, longest = [0], lengths[0] if lengths else 0
    for length in lengths:
        if 2 * length + _FEW_ITEMS < longest:
            sizes.append(0)
            longest = length
        sizes[-1] += 1
    return sizes


def _shared_table(collection: EmbeddingCollection, features: HistoryFeatures) -> EmbeddingConfig:
    history, item = features.history, features.item
    tables = [each for each in collection.embedding_configs() if {history, item} <= {*each.feature_names}]
    if len(tables) != 1:
        raise ValueError(
            f"the features {history!r} and {item!r} must share one table: {len(tables)} have both. Give "
            "the features one table (Feature.table)."
        )
    return tables[0]


def _samples_of(bags: JaggedTensor) -> Tensor:
    """Return the sample of each ID."""
    lengths = bags.lengths()
    return torch.repeat_interleave(torch.arange(lengths.shape[0], device=lengths.device), lengths)


def _first_bags(bags: JaggedTensor, size: int) -> JaggedTensor:
    """Return the first ``size`` bags."""
    if size == bags.lengths().shape[0]:
        return bags
    return JaggedTensor(bags.values()[: int(bags.offsets()[size])], lengths=bags.lengths()[:size])
