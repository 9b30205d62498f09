"""The part that all next-item models over histories share: lookups, training losses and evaluation."""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn

from meshrec.models.next_item import CHUNK, ItemChunk, judge_targets, last_ids, sampled_softmax
from meshrec.modules import EmbeddingCollection
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, L items of a history, T targets, D embedding width, I items

_BLOCK = 256


class HistoryFeatures(NamedTuple):
    """The features that a next-item model reads. The first two share one table.

    In training ``item`` holds the items that followed the last items of the history, one for each; in
    evaluation it holds one item.
    """

    history: str
    """The items of a user, oldest first."""
    item: str
    """The target."""
    seen: str | None = None
    """Items that must not be recommended again. None: all items are ranked."""
    times: str | None = None
    """The times of the items of ``history`` in seconds, one for each. No table reads them."""


class EncodedHistories(NamedTuple):
    """The encoded histories of B samples."""

    vectors: Tensor
    """[n, D]: for each sample one vector before its first item and one after each item, and maybe padding."""
    first_B: Tensor
    """Where the vectors of each sample begin."""


class HistoryModel(nn.Module):
    """A next-item model: an item's score is the dot product of its vector with the encoded history.

    A subclass encodes histories in ``_encode``, and may normalise vectors in ``_unit``.

    Args:
        embedding_collection: a collection with one table that the features ``history`` and ``item`` read.
        features: names of the features.
        max_length: maximum length of a history.
        num_drawn: number of items drawn uniformly per training step and rank. All targets of the step share
            them.
        temperature: divisor of the dot products in the loss.
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
        num_drawn: int,
        temperature: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        history, item = features.history, features.item
        tables = [
            each
            for each in embedding_collection.embedding_configs()
            if {history, item} <= {*each.feature_names}
        ]
        if len(tables) != 1:
            raise ValueError(
                f"the features {history!r} and {item!r} must share one table: {len(tables)} have both. Give "
                "the features one table (Feature.table)."
            )
        if min(max_length, num_drawn) < 1 or temperature <= 0:
            raise ValueError(
                f"max_length {max_length} and num_drawn {num_drawn} must be at least 1, and the temperature "
                f"{temperature} above 0."
            )
        self.embedding_collection = embedding_collection
        self.width: int = tables[0].embedding_dim
        self._features = features
        self._num_items = tables[0].num_embeddings
        self._max_length, self._num_drawn, self._temperature = max_length, num_drawn, temperature
        self.start = nn.Parameter(torch.zeros(self.width, device=device))

    @abstractmethod
    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        """Encode histories. Vector ``l`` of a sample depends on its first ``l`` items only.

        Args:
            history: the rows of the items, values [n, D].
            times: the times of the items, int64 [n]; None: the model has no ``times`` feature.
        """

    def _unit(self, vectors: Tensor) -> Tensor:
        """Return vectors [n, D] as they enter dot products."""
        return vectors

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the loss and the rank of each target, [B, 2]; see `meshrec.models.next_item`.

        ``dense_features`` is ignored.
        """
        items = sparse_features[self._features.item]
        return self._losses(sparse_features, items) if self.training else self._places(sparse_features, items)

    def query_vectors(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return a query vector for each history, [B, D]. Its dot products with `item_vectors` are the
        scores.
        """
        return self._last(sparse_features, self._look_up(sparse_features, None)[0])

    def item_vectors(self) -> Tensor:
        """Return the vectors of all items, [I, D]."""
        return torch.cat([each.vectors_CD for each in self._chunks(self.start.device)])

    def _losses(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        counts_B, targets_T = items.lengths(), items.values().long()
        num_samples, device = len(counts_B), targets_T.device
        if not len(targets_T):
            # Lookups are collective: ranks that have targets wait for this one.
            history, _ = self._look_up(features, None)
            return self._checked(features, history).vectors.sum() * history.values().new_zeros(num_samples, 2)
        drawn_N = torch.randint(self._num_items, (self._num_drawn,), device=device)
        history, vectors = self._look_up(features, items, drawn_N)
        sample_T = torch.repeat_interleave(torch.arange(num_samples, device=device), counts_B)
        # Place 0 is the start, before the first item; the last target follows the last item.
        place_T = (history.lengths() - counts_B + 1)[sample_T]
        place_T = place_T + torch.arange(len(sample_T), device=device) - items.offsets()[sample_T]
        if int(place_T.min()) < 0:
            sample = int(sample_T[place_T.argmin()])
            raise ValueError(
                f"sample {sample} has {int(counts_B[sample])} ids in feature {self._features.item!r} and a "
                f"history of {int(history.lengths()[sample])}: each id must follow an item of the history, "
                "or be its first one. Give fewer ids."
            )
        encoded, vectors = self._checked(features, history), self._unit(vectors)
        losses_T = sampled_softmax(
            self._unit(encoded.vectors[encoded.first_B[sample_T] + place_T]),
            vectors[: len(targets_T)],
            vectors[len(targets_T) :],
            target_T=targets_T,
            drawn_N=drawn_N,
            log_expected_N=math.log(self._num_drawn / self._num_items),
            temperature=self._temperature,
        )
        sums_B = losses_T.new_zeros(num_samples).index_add(0, sample_T, losses_T)
        return torch.stack([sums_B / counts_B.clamp(min=1), torch.zeros_like(sums_B)], dim=1)

    def _places(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        target_B = last_ids(items)
        history, vectors = self._look_up(features, items)
        vectors = self._unit(vectors)
        target_BD = vectors.new_zeros(len(target_B), vectors.shape[1])
        found = target_B >= 0
        target_BD[found] = vectors[items.offsets()[1:][found] - 1]
        seen = None if self._features.seen is None else features[self._features.seen]
        # Samples without a target, which fill up the last batch, are left out. What remains is rounded up to
        # whole blocks: sums over a block have one order, whatever the batch.
        last = int(found.nonzero()[-1]) + 1 if bool(found.any()) else 0
        size = min(-(-last // _BLOCK) * _BLOCK, len(target_B))
        places = judge_targets(
            self._last(features, _first_bags(history, size)),
            target_BD[:size],
            target_B[:size],
            self._chunks(target_B.device),
            seen=None if seen is None else _first_bags(seen, size),
            temperature=self._temperature,
        )
        return nn.functional.pad(places, (0, 0, 0, len(target_B) - size))

    def _last(self, features: KeyedJaggedTensor, history: JaggedTensor) -> Tensor:
        """Encode the histories and return the last vector of each, [B, D]."""
        encoded = self._checked(features, history)
        return self._unit(encoded.vectors[encoded.first_B + history.lengths()])

    def _checked(self, features: KeyedJaggedTensor, history: JaggedTensor) -> EncodedHistories:
        """Encode the rows of histories, which may be those of the first samples only, after checking them."""
        lengths = history.lengths()
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self._max_length:
            raise ValueError(
                f"sample {int(lengths.argmax())} has a history of {longest} items, and max_length is "
                f"{self._max_length}. Cut histories where they are read, or raise max_length."
            )
        if self._features.times is None:
            return self._encode(history, None)
        times = _first_bags(features[self._features.times], len(lengths))
        if not torch.equal(times.lengths().to(lengths.dtype), lengths):
            sample = int((times.lengths() != lengths).nonzero()[0])
            raise ValueError(
                f"sample {sample} has a history of {int(lengths[sample])} items and "
                f"{int(times.lengths()[sample])} times in feature {self._features.times!r}. Give every item "
                "of the history its time."
            )
        return self._encode(history, times)

    def _chunks(self, device: torch.device) -> Iterator[ItemChunk]:
        """Yield the vectors of all items. The lookups are collective, so all ranks must run this together."""
        none = torch.zeros(1, dtype=torch.int64, device=device)
        for first in range(0, self._num_items, CHUNK):
            ids = torch.arange(first, min(first + CHUNK, self._num_items), device=device)
            lengths = torch.cat([none, none + len(ids)])
            features = KeyedJaggedTensor([*self._features[:2]], ids, lengths=lengths, stride=1)
            found = self.embedding_collection(features)[self._features.item].values()
            yield ItemChunk(first, self._unit(found))

    def _look_up(
        self, features: KeyedJaggedTensor, items: JaggedTensor | None, drawn_N: Tensor | None = None
    ) -> tuple[JaggedTensor, Tensor]:
        """Look up the rows of the histories, and the rows of the items followed by those of the drawn items.

        The drawn items are appended to the last bag of ``items``, so that one lookup serves all three.
        """
        history = features[self._features.history]
        ids, lengths = history.values(), history.lengths()
        more = torch.zeros_like(lengths) if items is None else items.lengths()
        values = [ids] if items is None else [ids, items.values()]
        if drawn_N is not None:
            more = more.clone()
            more[-1] += len(drawn_N)
            values.append(drawn_N.to(ids.dtype))
        wanted = KeyedJaggedTensor(
            [*self._features[:2]],
            torch.cat(values),
            lengths=torch.cat([lengths, more.to(lengths.dtype)]),
            stride=len(lengths),
        )
        found = self.embedding_collection(wanted)
        return found[self._features.history], found[self._features.item].values()


def _first_bags(bags: JaggedTensor, size: int) -> JaggedTensor:
    """Return the first ``size`` bags."""
    return JaggedTensor(bags.values()[: int(bags.offsets()[size])], lengths=bags.lengths()[:size])
