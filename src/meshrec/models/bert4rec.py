"""BERT4Rec: next-item model with bidirectional self-attention, trained to predict masked history items.

See Sun et al., "BERT4Rec: sequential recommendation with bidirectional encoder representations from
transformer" (2019). Two things differ from the paper. The next item is always an additional masked item at
the end, in training and evaluation, while the paper trains on it in some samples only. The loss is a sampled
softmax, as in `meshrec.models.sasrec`.
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.modules import EmbeddingCollection


class BERT4Rec(HistoryModel):
    """Next-item model with bidirectional self-attention, trained to predict masked history items.

    Position embeddings are counted from the end, so recent items have the same position in all histories.

    Args:
        embedding_collection, features: As in `HistoryModel`.
        max_length: Maximum history length, in items.
        num_blocks: Attention blocks. Their MLPs have a hidden width four times the embedding width.
        num_heads: Attention heads per block.
        dropout: Dropout probability.
        hidden: Fraction of history items to mask in training.
        options: Further arguments for `HistoryModel`: ``softmax``, ``items`` and ``device``.

    Raises:
        ValueError: The two features do not share exactly one table, or the sizes are invalid.
    """

    def __init__(
        self,
        embedding_collection: EmbeddingCollection,
        features: HistoryFeatures,
        *,
        max_length: int = 50,
        num_blocks: int = 2,
        num_heads: int = 2,
        dropout: float = 0.2,
        hidden: float = 0.2,
        **options: Unpack[HistoryOptions],
    ) -> None:
        super().__init__(embedding_collection, features, max_length=max_length, hidden=hidden, **options)
        device = self.start.device
        check_heads(self.width, num_heads, num_blocks)
        # max_length items and the masked next item.
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        for table in (self.positions.weight, self.start):
            # The standard deviation of BERT's initial weights.
            nn.init.normal_(table, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            AttentionBlock(
                self.width, num_heads, dropout, hidden=4 * self.width, activation=nn.GELU, device=device
            )
            for _ in range(num_blocks)
        )
        self.norm = nn.LayerNorm(self.width, device=device)

    @override
    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        inputs = torch.cat([rows, rows.new_zeros(lengths.shape[0], 1, self.width)], dim=1)
        # Distance to the next item, which has 0; negative for padding. Recent items get the same positions in
        # short and long histories.
        from_end = lengths[:, None] - torch.arange(inputs.shape[1], device=lengths.device)
        # The next item's slot holds the mask vector, as masked items do.
        inputs = torch.where((from_end == 0)[:, :, None], self.start, inputs)
        inputs = self.drop(inputs + self.positions(from_end.clamp(min=0)))
        for block in self.blocks:
            # Mask out padding. Masked items are attended to: their vectors carry position only.
            inputs = block(inputs, from_end >= 0)
        encoded: Tensor = self.norm(inputs)
        return encoded
