"""SASRec: self-attention over a user's items that predicts the next one.

Architecture: Kang, McAuley, "Self-attentive sequential recommendation" (2018), with its causal attention,
learned positions and shared item table. Loss: the paper compares each target with one other item; here every
position learns by a sampled softmax, after Klenitskiy, Vasilev, "Turning dross into gold loss: is BERT4Rec
really better than SASRec?" (2023).
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

from meshrec.models.history_model import EncodedHistories, HistoryFeatures, HistoryModel
from meshrec.modules import EmbeddingCollection
from meshrec.sparse import JaggedTensor

# B samples, L positions, D embedding width


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


class SASRec(HistoryModel):
    """Next-item model: an item's score is the dot product of its vector with the encoded history.

    Histories are padded for attention, because torch's nested tensors have no causal attention on the CPU.
    The padding is at the end, where causal attention does not look. Positions are counted from the end of a
    history.

    Args:
        embedding_collection, max_length, num_drawn, device: see `HistoryModel`.
        history, item, seen: see `HistoryFeatures`.
        num_blocks, num_heads, dropout: see `AttentionBlock`.

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
        features = HistoryFeatures(history, item, seen)
        super().__init__(
            embedding_collection, features, max_length=max_length, num_drawn=num_drawn, device=device
        )
        if self.width % num_heads or num_blocks < 1:
            raise ValueError(
                f"num_heads {num_heads} must divide the table's width {self.width}, and num_blocks "
                f"{num_blocks} must be at least 1."
            )
        self.positions = nn.Embedding(max_length + 1, self.width, device=device)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(AttentionBlock(self.width, num_heads, dropout) for _ in range(num_blocks))
        )
        self.norm = nn.LayerNorm(self.width, device=device)
        if device is not None:
            self.blocks.to(device)

    @override
    def _encode(self, history: JaggedTensor, times: JaggedTensor | None) -> EncodedHistories:
        lengths = history.lengths()
        longest = int(lengths.max()) if len(lengths) else 0
        padded = history.to_padded_dense(longest)
        whole = torch.cat([self.start.expand(len(lengths), 1, -1), padded], dim=1)
        from_end = lengths[:, None] - torch.arange(longest + 1, device=lengths.device)
        whole = self.drop(whole + self.positions(from_end.clamp(min=0)))
        encoded: Tensor = self.norm(self.blocks(whole))
        first_B = torch.arange(len(lengths), device=lengths.device) * (longest + 1)
        return EncodedHistories(encoded.flatten(0, 1), first_B)
