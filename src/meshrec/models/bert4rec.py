"""BERT4Rec: bidirectional self-attention over a user's history that predicts masked items.

Sun et al., "BERT4Rec: sequential recommendation with bidirectional encoder representations from transformer"
(2019). The next item is an additional masked item at the end, in training as in evaluation; the paper masks
it in some samples only. Loss: a sampled softmax, see `meshrec.models.sasrec`.
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.modules import EmbeddingCollection


class BERT4Rec(HistoryModel):
    """Next-item model with bidirectional self-attention, trained to predict masked items.

    Positions are counted from the end of the history.

    Args:
        embedding_collection: As in `HistoryModel`.
        features: As in `HistoryModel`.
        max_length: Maximum history length.
        num_blocks: Blocks. The MLP hidden width is four times the embedding width.
        num_heads: Attention heads.
        dropout: Dropout probability.
        hidden: Fraction of history items masked in training.
        options: Further arguments of `HistoryModel`: ``softmax``, ``items`` and ``device``.

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
