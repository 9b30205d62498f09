"""SASRec: causal self-attention over a user's history that predicts the next item.

Architecture: Kang, McAuley, "Self-attentive sequential recommendation" (2018), with causal attention, learned
positions and a shared item table. Loss: the paper compares the target with a single negative; here every
position is trained with a sampled softmax, after Klenitskiy, Vasilev, "Turning dross into gold loss: is
BERT4Rec really better than SASRec?" (2023).
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.modules import EmbeddingCollection


class SASRec(HistoryModel):
    """Next-item model with causal self-attention.

    Histories with similar lengths are padded together, because torch's nested tensors lack causal attention
    on the CPU. Padding is at the end, where causal attention does not look. Positions are counted from the
    end.

    Args:
        embedding_collection: As in `HistoryModel`.
        features: As in `HistoryModel`.
        max_length: Maximum history length.
        num_blocks: Blocks.
        num_heads: Attention heads.
        dropout: Dropout probability.
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
        num_heads: int = 1,
        dropout: float = 0.2,
        **options: Unpack[HistoryOptions],
    ) -> None:
        super().__init__(embedding_collection, features, max_length=max_length, **options)
        device = self.start.device
        check_heads(self.width, num_heads, num_blocks)
        # max_length items and the start token.
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(AttentionBlock(self.width, num_heads, dropout, device=device) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(self.width, device=device)

    @override
    def _encode_bucket(self, lengths: Tensor, rows: Tensor) -> Tensor:
        # The start token predicts the first item, so that vector l depends on items before l only.
        inputs = torch.cat([self.start.expand(lengths.shape[0], 1, -1), rows], dim=1)
        # Distance to the next item. Recent items get the same positions in short and long histories.
        from_end = lengths[:, None] - torch.arange(inputs.shape[1], device=lengths.device)
        inputs = self.drop(inputs + self.positions(from_end.clamp(min=0)))
        encoded: Tensor = self.norm(self.blocks(inputs))
        return encoded
