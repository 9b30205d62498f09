"""HSTU: gated attention over a user's items that predicts the next one.

Architecture and defaults: Zhai et al., "Actions speak louder than words: trillion-parameter sequential
transducers for generative recommendations" (2024), and the public configurations for MovieLens: learned
positions, layers without padding, vectors of length 1, and a sampled softmax with a temperature.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.models.history_model import EncodedHistories, HistoryFeatures, HistoryModel, ItemCatalogue
from meshrec.models.next_item import SampledSoftmax
from meshrec.modules import EmbeddingCollection, HSTUBlock, Tokens, extend_all, kept_shape
from meshrec.sparse import JaggedTensor, KeyedJaggedTensor

# B samples, N items of all histories, D embedding width, V width of queries


class KeptTokens(NamedTuple):
    """The keys and values of the first tokens of B histories: of the start, and then of items."""

    rows: Tensor
    """Keys and values [L, K, S] of K tokens in L layers. The tokens of the first sample come first. Those of
    a single sample may have room after them, which `HSTU.advance` fills instead of copying the rows.
    """
    lengths_B: Tensor
    """The number of kept tokens of each sample, int64; at most the number of its items."""

    @staticmethod
    def none(shape: tuple[int, int], num_samples: int) -> "KeptTokens":
        """Return no tokens; ``shape``: the number of layers L and the width S."""
        num_layers, width = shape
        return KeptTokens(torch.zeros(num_layers, 0, width), torch.zeros(num_samples, dtype=torch.int64))


class AdvancedHistories(NamedTuple):
    """The queries of B histories, and what can be kept of them."""

    query_BV: Tensor
    kept: KeptTokens
    """All tokens but the last of each history, whose result changes with the time of the next item. The rows
    of a single sample have room after them.
    """


class HSTU(HistoryModel):
    """Next-item model of HSTU layers. By default the score of an item is a cosine.

    Histories are not padded: the layers work on the tokens of all samples together.

    Args:
        embedding_collection, max_length, softmax, items, device: see `HistoryModel`.
        features: names of the features; without ``times`` the layers have no time bias.
        num_blocks: the number of layers.
        num_heads, attention_dim, hidden_dim, dropout: see `HSTUBlock`. The widths are by default those of
            the table divided by ``num_heads``.

    Raises:
        ValueError: the two features do not share exactly one table, or a size is below 1.
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
        softmax: SampledSoftmax = SampledSoftmax(  # noqa: B008 - immutable
            num_negatives=128, similarity="cosine", temperature=0.05
        ),
        items: ItemCatalogue | None = None,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(
            embedding_collection,
            features,
            max_length=max_length,
            softmax=softmax,
            items=items,
            device=device,
        )
        if min(num_blocks, num_heads) < 1:
            raise ValueError(f"num_blocks {num_blocks} and num_heads {num_heads} must be at least 1.")
        head_width = self.width // num_heads
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
    def kept_shape(self) -> tuple[int, int]:
        """The number of layers, and the width of a token's keys and values in one of them."""
        return kept_shape(self.blocks)

    @property
    def sizes(self) -> dict[str, int]:
        """The arguments that, with the table and the features, decide the shapes of the weights."""
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

    def advance(self, sparse_features: KeyedJaggedTensor, kept: KeptTokens) -> AdvancedHistories:
        """Return a query for each history, from what was kept of its first tokens; equal to `query_vectors`.

        Only items that are not kept are looked up and encoded. There are no gradients.

        Args:
            sparse_features: the features, with whole histories.
            kept: what `AdvancedHistories.kept` returned for these samples, whose histories then had the same
                first items, at the same times. The room of a single sample's rows is written to, so only the
                newest result that came from them is valid beyond their own tokens.

        Raises:
            ValueError: more tokens are kept than a history has items, or a history is too long.
        """
        history = sparse_features[self.features.history]
        lengths_B, kept_B = history.lengths().long(), kept.lengths_B
        too_many = kept_B > lengths_B
        if bool(too_many.any()):
            sample = int(too_many.nonzero()[0])
            raise ValueError(
                f"sample {sample} keeps {int(kept_B[sample])} tokens of a history of "
                f"{int(lengths_B[sample])} items: allowed are as many as it has items. Start without kept "
                "tokens where a history is another one."
            )
        new_B = lengths_B + 1 - kept_B
        items_B = new_B - (kept_B == 0).long()
        ids = _last_values(history, items_B)
        given = self._times_of(sparse_features, history.lengths())
        times = self._times(lengths_B, given, history.values().shape[0])
        none = torch.zeros_like(items_B)
        wanted = KeyedJaggedTensor(
            [*self.features[:2]], ids, lengths=torch.cat([items_B, none]), stride=len(items_B)
        )
        rows = self.embedding_collection(wanted)[self.features.history]
        tokens = Tokens.after(kept_B, new_B)._replace(timestamps_N=times)
        values = self._tokens(rows, kept_B, int((kept_B == 0).sum()))
        num_tokens, is_alone = int(tokens.offsets_B1[-1]), len(kept_B) == 1
        if is_alone:
            every = _with_room(kept.rows, num_tokens - len(values), num_tokens)
        else:
            every = tokens.joined(kept.rows, len(values))
        encoded = extend_all(self.blocks, values, every[:, :num_tokens], tokens)
        if not is_alone:
            is_kept_N = torch.ones(num_tokens, dtype=torch.bool, device=every.device)
            is_kept_N[tokens.offsets_B1[1:] - 1] = False
            every = every[:, is_kept_N]
        assert tokens.new_offsets_B1 is not None
        query_BV = self.similarity.queries(encoded[tokens.new_offsets_B1[1:] - 1])
        return AdvancedHistories(query_BV, KeptTokens(every, lengths_B))

    @override
    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        lengths_B = history.lengths().long()
        num_samples = lengths_B.shape[0]
        first_B = history.offsets()[:-1].long() + torch.arange(num_samples, device=lengths_B.device)
        num_tokens = history.values().shape[0] + num_samples
        offsets_B1 = torch.cat([first_B, first_B.new_full((1,), num_tokens)])
        tokens = self._tokens(history, torch.zeros_like(lengths_B), num_samples)
        times_of_tokens = self._times(lengths_B, times, history.values().shape[0])
        for block in self.blocks:
            tokens = block(tokens, offsets_B1, times_of_tokens)
        return EncodedHistories(tokens, first_B)

    def _tokens(self, rows: JaggedTensor, kept_B: Tensor, num_starts: int) -> Tensor:
        """Return the new tokens of samples of which some tokens are kept: the start, if it is new, and items.

        Args:
            rows: the rows of the new items.
            kept_B: the numbers of kept tokens.
            num_starts: the number of samples without kept tokens.
        """
        lengths_B, num_items, device = rows.lengths().long(), rows.values().shape[0], kept_B.device
        samples = torch.arange(kept_B.shape[0], device=device)
        starts_B = (kept_B == 0).long()
        num_tokens = num_items + num_starts
        sample_of_item = torch.repeat_interleave(samples, lengths_B, output_size=num_items)
        of_item = torch.arange(num_items, device=device) + starts_B.cumsum(0)[sample_of_item]
        tokens = self.start.expand(num_tokens, -1).index_copy(0, of_item, rows.values() * self.width**0.5)
        new_B = lengths_B + starts_B
        shift_B = kept_B - (new_B.cumsum(0) - new_B)
        place = torch.arange(num_tokens, device=device)
        place = place + torch.repeat_interleave(shift_B, new_B, output_size=num_tokens)
        moved: Tensor = self.drop(tokens + self.positions(place))
        return moved

    def _times(self, lengths_B: Tensor, times: JaggedTensor | None, num_items: int) -> Tensor | None:
        """Return the times of all tokens. The start has that of the first item, before which nothing is
        known.
        """
        if times is None:
            return None
        # An exported program knows the number of items from the histories alone.
        values, num_samples = times.values().long(), lengths_B.shape[0]
        num_tokens = num_items + num_samples
        sample = torch.repeat_interleave(
            torch.arange(num_samples, device=lengths_B.device), lengths_B + 1, output_size=num_tokens
        )
        # The place of a token among the items: one less for each start up to its own.
        at = torch.arange(num_tokens, device=lengths_B.device) - sample - 1
        known = torch.cat([values, lengths_B.new_zeros(1)])
        return known[torch.maximum(at, times.offsets()[:-1].long()[sample]).clamp(max=known.shape[0] - 1)]


def _last_values(bags: JaggedTensor, nums_B: Tensor) -> Tensor:
    """Return the last values of each bag, by their numbers."""
    lengths_B, values = bags.lengths().long(), bags.values()
    if len(lengths_B) == 1:
        return values[len(values) - int(nums_B[0]) :]
    of_N = torch.repeat_interleave(torch.arange(len(lengths_B), device=values.device), lengths_B)
    place_N = torch.arange(len(of_N), device=values.device) - bags.offsets()[of_N]
    return values[place_N >= (lengths_B - nums_B)[of_N]]


def _with_room(rows: Tensor, num_kept: int, num_tokens: int) -> Tensor:
    """Return the keys and values of a sample's kept tokens, with room for all of its tokens: in place, or
    else copied to where more will fit.
    """
    if rows.shape[1] >= num_tokens:
        return rows
    wider = rows.new_empty(rows.shape[0], num_tokens + num_tokens // 8 + 8, rows.shape[2])
    wider[:, :num_kept] = rows[:, :num_kept]
    return wider
