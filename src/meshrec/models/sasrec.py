"""SASRec: next-item model with causal self-attention over the user's history.

The architecture is from Kang, McAuley, "Self-attentive sequential recommendation" (2018): causal attention,
learned position embeddings, and one item table for histories and targets. In the paper, the loss compares a
target with a single negative. Here it is a sampled softmax at every position, as in Klenitskiy, Vasilev,
"Turning dross into gold loss: is BERT4Rec really better than SASRec?" (2023).
"""

import torch
from torch import Tensor, nn
from typing_extensions import Unpack, override

from meshrec.models.attention_block import AttentionBlock, check_heads
from meshrec.models.history_model import HistoryFeatures, HistoryModel, HistoryOptions
from meshrec.modules import EmbeddingCollection


class SASRec(HistoryModel):
    """Next-item model with causal self-attention.

    Position embeddings are counted from the end, so recent items have the same position in all histories.

    Args:
        embedding_collection, features: As in `HistoryModel`.
        max_length: Maximum history length, in items.
        num_blocks: Attention blocks.
        num_heads: Attention heads per block.
        dropout: Dropout probability.
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
        # Padded, because torch's nested tensors lack causal attention on the CPU. Padding is at the end,
        # where causal attention does not look.
        # The start token predicts the first item, so that vector l depends on items before l only.
        inputs = torch.cat([self.start.expand(lengths.shape[0], 1, -1), rows], dim=1)
        # Distance to the next item. Recent items get the same positions in short and long histories.
        from_end = lengths[:, None] - torch.arange(inputs.shape[1], device=lengths.device)
        inputs = self.drop(inputs + self.positions(from_end.clamp(min=0)))
        encoded: Tensor = self.norm(self.blocks(inputs))
        return encoded
