"""HSTU: gated attention over a user's items that predicts the next one.

Architecture and defaults: Zhai et al., "Actions speak louder than words: trillion-parameter sequential
transducers for generative recommendations" (2024), and the public configurations for MovieLens: learned
positions, layers without padding, vectors of length 1, and a sampled softmax with a temperature.
"""

import math

import torch
from torch import nn
from typing_extensions import override

from meshrec.models.history_model import EncodedHistories, HistoryFeatures, HistoryModel, ItemCatalogue
from meshrec.models.next_item import SampledSoftmax
from meshrec.modules import EmbeddingCollection, HSTUBlock
from meshrec.sparse import JaggedTensor

# B samples, N items of all histories


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

    @override
    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        lengths_B, num_items = history.lengths().long(), history.values().shape[0]
        device, num_samples = lengths_B.device, lengths_B.shape[0]
        first_B = history.offsets()[:-1].long() + torch.arange(num_samples, device=device)
        num_tokens = num_items + num_samples
        offsets_B1 = torch.cat([first_B, first_B.new_full((1,), num_tokens)])
        sample_N = torch.repeat_interleave(
            torch.arange(num_samples, device=device), lengths_B, output_size=num_items
        )
        of_item = torch.arange(num_items, device=device) + sample_N + 1
        tokens = self.start.expand(num_tokens, -1).index_copy(0, of_item, history.values() * self.width**0.5)
        sample = torch.repeat_interleave(
            torch.arange(num_samples, device=device), lengths_B + 1, output_size=num_tokens
        )
        place = torch.arange(num_tokens, device=device) - first_B[sample]
        tokens = self.drop(tokens + self.positions(place))
        times_of_tokens = None
        if times is not None:
            # The start has the time of the first item, before which nothing is known.
            known = torch.cat([times.values().long(), lengths_B.new_zeros(1)])
            at = times.offsets()[:-1].long()[sample] + (place - 1).clamp(min=0)
            times_of_tokens = known[at.clamp(max=known.shape[0] - 1)]
        for block in self.blocks:
            tokens = block(tokens, offsets_B1, times_of_tokens)
        return EncodedHistories(tokens, first_B)
