"""HSTU: next-item model with gated attention over the user's history.

The architecture is from Zhai et al., "Actions speak louder than words: trillion-parameter sequential
transducers for generative recommendations" (2024). Defaults follow the paper and the public configurations
for MovieLens: learned position embeddings, unit-length vectors, and a sampled softmax with a temperature.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.history_model import EncodedHistories, HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.models.next_item import SampledSoftmax
from meshrec.modules import EmbeddingCollection, HSTUBlock, Tokens, cache_shape, extend_all
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items in all histories, D embedding width, V query width


_DEFAULT_SOFTMAX = SampledSoftmax(num_negatives=128, similarity="cosine", temperature=0.05)


class TokenCache(NamedTuple):
    """KV cache for B histories: attention keys and values for the first tokens in every history.

    A history has a start token, token 0, and a token per item: token l is the l-th item.
    """

    rows: Tensor
    """Keys and values for all K cached tokens, sample by sample, [L, K, S]: L layers, S values per token.
    With a single sample, there may be spare capacity at the end, which `HSTU.advance` fills in place.
    """
    lengths_B: Tensor
    """Cached tokens per sample, int64; at most as many as the history has items."""

    @staticmethod
    def empty(shape: tuple[int, int], num_samples: int) -> "TokenCache":
        """Return a cache without tokens.

        Args:
            shape: ``HSTU.cache_shape``: layers L, and values per token S.
            num_samples: Samples B.
        """
        num_layers, width = shape
        return TokenCache(torch.zeros(num_layers, 0, width), torch.zeros(num_samples, dtype=torch.int64))


class AdvancedHistories(NamedTuple):
    """Result of `HSTU.advance` for B histories."""

    query_BV: Tensor
    """Query that scores items as the next one, per history."""
    cache: TokenCache
    """Cache with all tokens except a history's last one, whose keys and values depend on the time of the next
    item. With a single sample, there is spare capacity at the end.
    """


class HSTU(HistoryModel):
    """Next-item model with HSTU layers. By default, items are scored by the cosine.

    Histories are not padded: a layer processes the tokens from all samples as one tensor.

    Args:
        embedding_collection: As in `HistoryModel`.
        features: Feature names. Without ``times``, attention has no bias that depends on time.
        max_length: Maximum history length, in items.
        num_blocks: Number of layers.
        num_heads: Attention heads per layer.
        attention_dim: Width of queries and keys per head; None: embedding width / ``num_heads``.
        hidden_dim: Width of values and gates per head; None: embedding width / ``num_heads``.
        dropout: Dropout probability.
        options: Further arguments for `HistoryModel`: ``softmax``, ``items`` and ``device``.

    Raises:
        ValueError: The two features do not share exactly one table, or a size is below 1.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int = 200,
        num_blocks: int = 2,
        num_heads: int = 1,
        attention_dim: int | None = None,
        hidden_dim: int | None = None,
        dropout: float = 0.2,
        **options: Unpack[HistoryOptions],
    ) -> None:
        options.setdefault("softmax", _DEFAULT_SOFTMAX)
        super().__init__(embedding_collection, features, max_length=max_length, **options)
        device = self.start.device
        if min(num_blocks, num_heads) < 1:
            raise ValueError(f"num_blocks {num_blocks} and num_heads {num_heads} must be at least 1.")
        head_width = self.width // num_heads
        # A start token precedes the items.
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        nn.init.normal_(self.positions.weight, std=math.sqrt(1 / self.width))
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            HSTUBlock(
                self.width,
                max_length=max_length + 1,
                num_heads=num_heads,
                attention_dim=attention_dim or head_width,
                hidden_dim=hidden_dim or head_width,
                num_time_buckets=0 if features.times is None else 129,
                dropout=dropout,
                device=device,
            )
            for _ in range(num_blocks)
        )

    @property
    def cache_shape(self) -> tuple[int, int]:
        """Shape of a KV cache: layers L, and values per token and layer S; see `TokenCache`."""
        return cache_shape(self.blocks)

    @property
    def sizes(self) -> dict[str, int]:
        """Constructor arguments that, together with table and features, determine all weight shapes."""
        # All blocks have equal sizes.
        block = self.blocks[0]
        assert isinstance(block, HSTUBlock)
        num_heads, hidden_dim, attention_dim = block.heads
        return {
            "max_length": self._max_length,
            "num_blocks": len(self.blocks),
            "num_heads": num_heads,
            "attention_dim": attention_dim,
            "hidden_dim": hidden_dim,
        }

    def advance(self, sparse_features: KeyedJaggedTensor, cache: TokenCache) -> AdvancedHistories:
        """Return the query per history, as `query_vectors` does, but encode only items that are not cached.

        When histories have grown, call this method again with the returned cache. Computes no gradients.

        Args:
            sparse_features: IDs and timestamps for the whole histories.
            cache: ``AdvancedHistories.cache`` from an earlier call for the same samples, or an empty cache.
                The cached items must still be the first items, with the same timestamps. With a single
                sample, the call may overwrite spare capacity in this cache, so do not continue two different
                histories from the same cache.

        Raises:
            ValueError: More tokens are cached than a history has items, or a history is too long.
        """
        history = sparse_features[self.features.history]
        lengths_B, cached_B = history.lengths().long(), cache.lengths_B
        # A cache longer than the history belongs to another history.
        exceeds = cached_B > lengths_B
        if bool(exceeds.any()):
            sample = int(exceeds.nonzero()[0])
            raise ValueError(
                f"sample {sample} caches {int(cached_B[sample])} tokens of a history of "
                f"{int(lengths_B[sample])} items: allowed are as many as it has items. Start without cached "
                "tokens where a history is another one."
            )
        # Tokens to encode: with the start token, a history has one more token than items.
        new_B = lengths_B + 1 - cached_B
        # A sample without cached tokens also encodes the start token, which is not looked up.
        items_B = new_B - (cached_B == 0).long()
        ids = _tail_values(history, items_B)
        times_given = self._checked_times(sparse_features, history.lengths())
        # Timestamps for all tokens: attention compares new tokens with cached ones.
        times = self._token_times(lengths_B, times_given, history.values().shape[0])
        # The feature ``item`` gets empty bags, because a lookup needs both features.
        none = torch.zeros_like(items_B)
        requested = KeyedJaggedTensor(
            [*self.features[:2]], ids, lengths=torch.cat([items_B, none]), stride=len(items_B)
        )
        rows = self.embedding_collection(requested)[self.features.history]
        tokens = Tokens.after(cached_B, new_B)._replace(timestamps_N=times)
        values = self._new_tokens(rows, cached_B, int((cached_B == 0).sum()))
        # A single sample appends to the cache in place. Several samples must be interleaved, which copies.
        num_tokens, is_single = int(tokens.offsets_B1[-1]), len(cached_B) == 1
        if is_single:
            all_LNS = _with_capacity(cache.rows, num_tokens - len(values), num_tokens)
        else:
            all_LNS = tokens.extend_cache(cache.rows, len(values))
        # Without the spare capacity behind the tokens.
        encoded = extend_all(self.blocks, values, all_LNS[:, :num_tokens], tokens)
        if not is_single:
            is_cached_N = torch.ones(num_tokens, dtype=torch.bool, device=all_LNS.device)
            # Drop the last token per sample; it is encoded again with the next item's time.
            is_cached_N[tokens.offsets_B1[1:] - 1] = False
            all_LNS = all_LNS[:, is_cached_N]
        assert tokens.new_offsets_B1 is not None
        query_BV = self.similarity.convert_queries(encoded[tokens.new_offsets_B1[1:] - 1])
        if self.scores_new_users:
            # As in `query_vectors`: new users have fixed scores instead of a query.
            query_BV = query_BV * (lengths_B > 0)[:, None]
        return AdvancedHistories(query_BV, TokenCache(all_LNS, lengths_B))

    @override
    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        lengths_B = history.lengths().long()
        num_samples = lengths_B.shape[0]
        # Every history gets a start token in front.
        first_B = history.offsets()[:-1].long() + torch.arange(num_samples, device=lengths_B.device)
        num_tokens = history.values().shape[0] + num_samples
        offsets_B1 = torch.cat([first_B, first_B.new_full((1,), num_tokens)])
        tokens = self._new_tokens(history, torch.zeros_like(lengths_B), num_samples)
        times_of_tokens = self._token_times(lengths_B, times, history.values().shape[0])
        for block in self.blocks:
            tokens = block(tokens, offsets_B1, times_of_tokens)
        return EncodedHistories(tokens, first_B)

    def _new_tokens(self, rows: JaggedTensor, cached_B: Tensor, num_starts: int) -> Tensor:
        """Return the input vectors for tokens that are not cached, sample by sample, [n, D].

        A sample has a token per new item. If no tokens of the sample are cached, the start token comes first.
        """
        lengths_B, num_items, device = rows.lengths().long(), rows.values().shape[0], cached_B.device
        samples = torch.arange(cached_B.shape[0], device=device)
        starts_B = (cached_B == 0).long()
        num_tokens = num_items + num_starts
        sample_of_item = torch.repeat_interleave(samples, lengths_B, output_size=num_items)
        # Every start token up to an item's sample moves the item by one.
        item_index = torch.arange(num_items, device=device) + starts_B.cumsum(0)[sample_of_item]
        # Item vectors are multiplied by the square root of the width, as in the Transformer.
        tokens = self.start.expand(num_tokens, -1).index_copy(0, item_index, rows.values() * self.width**0.5)
        new_B = lengths_B + starts_B
        # From an index in the flat tensor to a position in the history: minus the sample's first index, plus
        # its cached tokens.
        shift_B = cached_B - (new_B.cumsum(0) - new_B)
        position = torch.arange(num_tokens, device=device)
        position = position + torch.repeat_interleave(shift_B, new_B, output_size=num_tokens)
        embedded: Tensor = self.drop(tokens + self.positions(position))
        return embedded

    def _token_times(self, lengths_B: Tensor, times: JaggedTensor | None, num_items: int) -> Tensor | None:
        """Return the timestamp per token in seconds, int64 [B + N].

        A start token has the first item's timestamp.
        """
        if times is None:
            return None
        # Derived from the histories only: an exported program cannot relate the two shapes.
        values, num_samples = times.values().long(), lengths_B.shape[0]
        num_tokens = num_items + num_samples
        sample = torch.repeat_interleave(
            torch.arange(num_samples, device=lengths_B.device), lengths_B + 1, output_size=num_tokens
        )
        # Index among all items: subtract a start token per sample up to this sample.
        index = torch.arange(num_tokens, device=lengths_B.device) - sample - 1
        # With one more value, an index is valid even if no sample has items.
        padded_times = torch.cat([values, lengths_B.new_zeros(1)])
        return padded_times[
            torch.maximum(index, times.offsets()[:-1].long()[sample]).clamp(max=padded_times.shape[0] - 1)
        ]


def _tail_values(bags: JaggedTensor, nums_B: Tensor) -> Tensor:
    """Return the last values in every bag, concatenated: ``nums_B[b]`` values from bag b."""
    lengths_B, values = bags.lengths().long(), bags.values()
    # The only bag is the whole tensor: slice instead of building a mask.
    if len(lengths_B) == 1:
        return values[len(values) - int(nums_B[0]) :]
    sample_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=values.device), lengths_B)
    position_N = torch.arange(len(sample_N), device=values.device) - bags.offsets()[sample_N]
    return values[position_N >= (lengths_B - nums_B)[sample_N]]


def _with_capacity(rows: Tensor, num_cached: int, num_tokens: int) -> Tensor:
    """Return a tensor with the cached keys and values of a single sample, and with room for new tokens.

    Return ``rows`` itself if the capacity suffices, otherwise a larger copy.
    """
    # In place: the caller's rows share the memory.
    if rows.shape[1] >= num_tokens:
        return rows
    # 1/8 more than required, and at least 8 tokens: appending copies rarely, and memory stays bounded.
    wider = rows.new_empty(rows.shape[0], num_tokens + num_tokens // 8 + 8, rows.shape[2])
    wider[:, :num_cached] = rows[:, :num_cached]
    return wider
