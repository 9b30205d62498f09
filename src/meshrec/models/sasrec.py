"""SASRec: self-attention over a user's items that predicts the next one.

Architecture: Kang, McAuley, "Self-attentive sequential recommendation" (2018), with its causal attention,
learned positions and shared item table. Loss: the paper compares each target with one other item; here every
position learns by a sampled softmax, after Klenitskiy, Vasilev, "Turning dross into gold loss: is BERT4Rec
really better than SASRec?" (2023).
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from meshrec.models.next_item import CHUNK, ItemChunk, judge_targets, last_ids, sampled_softmax
from meshrec.modules import EmbeddingCollection
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, L positions, T targets, D embedding width

_BLOCK = 256


class AttentionBlock(nn.Module):
    """Transformer block: causal self-attention and a small MLP, each with a layer norm and a residual
    connection.

    Args:
        width: the width D.
        num_heads: number of attention heads; must divide D.
        dropout: share of values dropped during training.
    """

    def __init__(self, width: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, width)
        )
        self.drop = nn.Dropout(dropout)

    def forward(self, values_BLD: Tensor) -> Tensor:
        """Map [B, L, D] to [B, L, D]. A position attends to itself and to earlier positions."""
        heads = self.projections(self.attention_norm(values_BLD)).unflatten(-1, (3, self._num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self._dropout if self.training else 0.0, is_causal=True
        )
        values_BLD = values_BLD + self.drop(self.output(attended.transpose(1, 2).flatten(2)))
        mixed: Tensor = values_BLD + self.drop(self.mlp(self.mlp_norm(values_BLD)))
        return mixed


class SASRec(nn.Module):
    """Next-item model: an item's score is the dot product of its vector with the encoded history.

    Histories are padded for attention, because torch's nested tensors have no causal attention on the CPU.
    The padding is at the end, where causal attention does not look. Positions are counted from the end of a
    history.

    Args:
        embedding_collection: a collection with one table that the features ``history`` and ``item`` read.
        history: name of the feature with a user's items, oldest first.
        item: name of the feature with the target. In training it holds the items that followed the last items
            of the history, one for each; in evaluation it holds one item.
        seen: name of the feature with items that must not be recommended again. None: all items are ranked.
        max_length: maximum length of a history.
        num_blocks, num_heads, dropout: see `AttentionBlock`.
        num_drawn: number of items drawn uniformly per training step and rank. All targets of the step share
            them.
        device: device of everything except the table.

    Raises:
        ValueError: the two features do not share exactly one table, or the sizes do not fit.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        *,
        history: str,
        item: str,
        seen: str | None = None,
        max_length: int = 50,
        num_blocks: int = 2,
        num_heads: int = 1,
        dropout: float = 0.2,
        num_drawn: int = 512,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
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
        width = tables[0].embedding_dim
        if width % num_heads or min(max_length, num_blocks, num_drawn) < 1:
            raise ValueError(
                f"num_heads {num_heads} must divide the table's width {width}, and max_length {max_length}, "
                f"num_blocks {num_blocks} and num_drawn {num_drawn} must be at least 1."
            )
        self.embedding_collection = embedding_collection
        self._history, self._item, self._seen = history, item, seen
        self._num_items = tables[0].num_embeddings
        self._max_length, self._num_drawn = max_length, num_drawn
        self.start = nn.Parameter(torch.zeros(width, device=device))
        self.positions = nn.Embedding(max_length + 1, width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(AttentionBlock(width, num_heads, dropout) for _ in range(num_blocks)))
        self.norm = nn.LayerNorm(width, device=device)
        if device is not None:
            self.blocks.to(device)

    def forward(self, dense_features: Tensor, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return the loss and the rank of each target, [B, 2]; see `meshrec.models.next_item`.

        ``dense_features`` is ignored.
        """
        items = sparse_features[self._item]
        return self._losses(sparse_features, items) if self.training else self._places(sparse_features, items)

    def query_vectors(self, sparse_features: KeyedJaggedTensor) -> Tensor:
        """Return a query vector for each history, [B, D]. Its dot products with `item_vectors` are the
        scores.
        """
        return self._last(self._look_up(sparse_features[self._history], None)[0])

    def item_vectors(self) -> Tensor:
        """Return the vectors of all items, [I, D]."""
        return torch.cat([each.vectors_CD for each in self._chunks(self.start.device)])

    def _losses(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        counts_B, targets_T = items.lengths(), items.values().long()
        num_samples, device = len(counts_B), targets_T.device
        if not len(targets_T):
            # Lookups are collective: ranks that have targets wait for this one.
            history, _ = self._look_up(features[self._history], None)
            return self._encode(history).sum() * history.values().new_zeros(num_samples, 2)
        drawn_N = torch.randint(self._num_items, (self._num_drawn,), device=device)
        history, vectors = self._look_up(features[self._history], items, drawn_N)
        sample_T = torch.repeat_interleave(torch.arange(num_samples, device=device), counts_B)
        # Place 0 is the start, before the first item; the last target follows the last item.
        place_T = (history.lengths() - counts_B + 1)[sample_T]
        place_T = place_T + torch.arange(len(sample_T), device=device) - items.offsets()[sample_T]
        if int(place_T.min()) < 0:
            sample = int(sample_T[place_T.argmin()])
            raise ValueError(
                f"sample {sample} has {int(counts_B[sample])} ids in feature {self._item!r} and a history of "
                f"{int(history.lengths()[sample])}: each id must follow an item of the history, or be its "
                "first one. Give fewer ids."
            )
        losses_T = sampled_softmax(
            self._encode(history)[sample_T, place_T],
            vectors[: len(targets_T)],
            vectors[len(targets_T) :],
            target_T=targets_T,
            drawn_N=drawn_N,
            log_expected_N=math.log(self._num_drawn / self._num_items),
        )
        sums_B = losses_T.new_zeros(num_samples).index_add(0, sample_T, losses_T)
        return torch.stack([sums_B / counts_B.clamp(min=1), torch.zeros_like(sums_B)], dim=1)

    def _places(self, features: KeyedJaggedTensor, items: JaggedTensor) -> Tensor:
        target_B = last_ids(items)
        history, vectors = self._look_up(features[self._history], items)
        target_BD = vectors.new_zeros(len(target_B), vectors.shape[1])
        found = target_B >= 0
        target_BD[found] = vectors[items.offsets()[1:][found] - 1]
        seen = None if self._seen is None else features[self._seen]
        # Samples without a target, which fill up the last batch, are left out. What remains is rounded up to
        # whole blocks: sums over a block have one order, whatever the batch.
        last = int(found.nonzero()[-1]) + 1 if bool(found.any()) else 0
        size = min(-(-last // _BLOCK) * _BLOCK, len(target_B))
        places = judge_targets(
            self._last(_first_bags(history, size)),
            target_BD[:size],
            target_B[:size],
            self._chunks(target_B.device),
            seen=None if seen is None else _first_bags(seen, size),
        )
        return nn.functional.pad(places, (0, 0, 0, len(target_B) - size))

    def _last(self, history: JaggedTensor) -> Tensor:
        """Encode each history and return the last position, [B, D]."""
        lengths = history.lengths()
        return self._encode(history)[torch.arange(len(lengths), device=lengths.device), lengths]

    def _encode(self, history: JaggedTensor) -> Tensor:
        """Encode histories: [B, 1 + L, D], one vector before the first item and one after each item."""
        lengths = history.lengths()
        longest = int(lengths.max()) if len(lengths) else 0
        if longest > self._max_length:
            raise ValueError(
                f"sample {int(lengths.argmax())} has a history of {longest} items, and max_length is "
                f"{self._max_length}. Cut histories where they are read, or raise max_length."
            )
        padded = history.to_padded_dense(longest)
        whole = torch.cat([self.start.expand(len(lengths), 1, -1), padded], dim=1)
        from_end = lengths[:, None] - torch.arange(longest + 1, device=lengths.device)
        whole = self.drop(whole + self.positions(from_end.clamp(min=0)))
        encoded: Tensor = self.norm(self.blocks(whole))
        return encoded

    def _chunks(self, device: torch.device) -> Iterator[ItemChunk]:
        """Yield the vectors of all items. The lookups are collective, so all ranks must run this together."""
        none = torch.zeros(1, dtype=torch.int64, device=device)
        for first in range(0, self._num_items, CHUNK):
            ids = torch.arange(first, min(first + CHUNK, self._num_items), device=device)
            lengths = torch.cat([none, none + len(ids)])
            features = KeyedJaggedTensor([self._history, self._item], ids, lengths=lengths, stride=1)
            yield ItemChunk(first, self.embedding_collection(features)[self._item].values())

    def _look_up(
        self, history: JaggedTensor, items: JaggedTensor | None, drawn_N: Tensor | None = None
    ) -> tuple[JaggedTensor, Tensor]:
        """Look up the rows of the histories, and the rows of the items followed by those of the drawn items.

        The drawn items are appended to the last bag of ``items``, so that one lookup serves all three.
        """
        ids, lengths = history.values(), history.lengths()
        more = torch.zeros_like(lengths) if items is None else items.lengths()
        values = [ids] if items is None else [ids, items.values()]
        if drawn_N is not None:
            more = more.clone()
            more[-1] += len(drawn_N)
            values.append(drawn_N.to(ids.dtype))
        features = KeyedJaggedTensor(
            [self._history, self._item],
            torch.cat(values),
            lengths=torch.cat([lengths, more.to(lengths.dtype)]),
            stride=len(lengths),
        )
        found = self.embedding_collection(features)
        return found[self._history], found[self._item].values()


def _first_bags(bags: JaggedTensor, size: int) -> JaggedTensor:
    """Return the first ``size`` bags."""
    return JaggedTensor(bags.values()[: int(bags.offsets()[size])], lengths=bags.lengths()[:size])
